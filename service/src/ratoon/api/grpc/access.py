"""The gate on gRPC.

Enters the context of a call, leaves what its caller presented; on the gateway, also a refusal
before the request is read. Invariant: the servicer asks the gate in any case; what is refused early
would be refused there.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import unquote

import grpc
import grpc.aio

from ratoon.api.gate import Gate
from ratoon.api.grpc.status import CallContext
from ratoon.api.grpc.wiring import SERVICE
from ratoon.auth.access import Presented
from ratoon.errors import RatoonError

AUTHORIZATION = "authorization"


def call_name(rpc: str) -> str:
    """The service's method of an RPC: `get_policy` of `GetPolicy`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", rpc).lower()


def presented_of(context: CallContext) -> Presented:
    authorization = _authorization(context.invocation_metadata())
    return Presented(authorization=authorization, peer=host_of(str(context.peer())))


class EarlyRefusal(grpc.aio.ServerInterceptor):
    """Refuses a caller without a fitting key before its request, of up to 256 MiB, is read.

    gRPC reads the request of a unary call before any handler runs, so the refusal is a handler of a
    stream that nobody reads: on the wire the two are the same.
    """

    def __init__(self, gate: Gate, refuse: Callable[[str, RatoonError, CallContext], None]) -> None:
        self._gate = gate
        self._refuse = refuse
        self._calls = {f"/{SERVICE.full_name}/{rpc.name}": rpc.name for rpc in SERVICE.methods}

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        rpc = self._calls.get(str(handler_call_details.method))
        if rpc is not None:
            call = call_name(rpc)
            authorization = _authorization(handler_call_details.invocation_metadata)
            # The peer is not known here, and where keys are asked for it does not matter.
            error = self._gate.refusal(call, Presented(authorization=authorization, peer=""))
            if error is not None:
                return self._refusal(call, error)
        return await continuation(handler_call_details)

    def _refusal(self, call: str, error: RatoonError) -> grpc.RpcMethodHandler[Any, Any]:
        async def refuse(_: AsyncIterator[bytes], context: CallContext) -> None:
            self._refuse(call, error, context)

        return grpc.stream_stream_rpc_method_handler(refuse)


def host_of(peer: str) -> str:
    """The host of a peer as gRPC names it (`ipv4:127.0.0.1:4711`); what is no address, as it is."""
    kind, separator, rest = peer.partition(":")
    if not separator or kind not in ("ipv4", "ipv6"):
        return peer
    return unquote(rest).rpartition(":")[0].strip("[]")


def _authorization(metadata: Any) -> str:
    for name, value in metadata or ():
        if name == AUTHORIZATION:
            return str(value)
    return ""
