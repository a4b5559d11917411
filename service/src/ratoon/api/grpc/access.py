"""The credentials of a gRPC call: its API key and the host that it comes from."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from ratoon.api.grpc.status import CallContext
from ratoon.auth.access import Presented

AUTHORIZATION = "authorization"


def presented_of(context: CallContext) -> Presented:
    authorization = _authorization(context.invocation_metadata())
    return Presented(authorization=authorization, peer=host_of(str(context.peer())))


def host_of(peer: str) -> str:
    """The host of a peer as gRPC names it (`ipv4:127.0.0.1:4711`); other text unchanged."""
    kind, separator, rest = peer.partition(":")
    if not separator or kind not in ("ipv4", "ipv6"):
        return peer
    return unquote(rest).rpartition(":")[0].strip("[]")


def _authorization(metadata: Any) -> str:
    for name, value in metadata or ():
        if name == AUTHORIZATION:
            return str(value)
    return ""
