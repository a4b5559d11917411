"""Which wire a target means.

Enters `grpc://host:port`, `host:port`, `http://...` or `https://...`, leaves a transport.
Invariant: a target that names no wire we have is refused before anything is sent.
"""

from __future__ import annotations

import httpx

from ratoon_client.config import ClientConfig
from ratoon_client.errors import InvalidArgumentError
from ratoon_client.transport.base import Transport
from ratoon_client.transport.grpc_wire import GrpcTransport
from ratoon_client.transport.http_wire import HttpTransport


def check_target(target: str) -> tuple[str, str]:
    """(scheme, rest). Raises InvalidArgumentError for an unknown scheme or no address."""
    scheme, separator, rest = target.partition("://")
    if not separator:
        scheme, rest = "grpc", target
    rest = rest.rstrip("/")
    if scheme not in ("grpc", "http", "https") or not rest:
        raise InvalidArgumentError(
            "target", repr(target), "grpc://host:port, host:port or http(s)://host:port"
        )
    return scheme, rest


def open_transport(target: str, config: ClientConfig) -> Transport:
    """Must be called on the event loop that will use it."""
    scheme, rest = check_target(target)
    if scheme == "grpc":
        return GrpcTransport(rest, config)
    try:
        return HttpTransport(f"{scheme}://{rest}", config)
    except httpx.InvalidURL as err:
        raise InvalidArgumentError("target", repr(target), f"a URL ({err})") from err
