"""Which wire a target means.

Enters `grpc(s)://host:port`, `host:port` or `http(s)://...`, leaves a transport.
Invariant: a target that names no wire we have is refused before anything is sent.
"""

from __future__ import annotations

import httpx

from ratoon_client.config import ClientConfig
from ratoon_client.errors import InvalidArgumentError
from ratoon_client.transport.base import Transport
from ratoon_client.transport.grpc_wire import GrpcTransport
from ratoon_client.transport.http_wire import HttpTransport
from ratoon_client.transport.tls import channel_credentials, ssl_context

TLS_SCHEMES = ("grpcs", "https")


def check_target(target: str) -> tuple[str, str]:
    """(scheme, rest). Raises InvalidArgumentError for an unknown scheme or no address."""
    scheme, separator, rest = target.partition("://")
    if not separator:
        scheme, rest = "grpc", target
    rest = rest.rstrip("/")
    if scheme not in ("grpc", *TLS_SCHEMES, "http") or not rest:
        raise InvalidArgumentError(
            "target", repr(target), "grpc(s)://host:port, host:port or http(s)://host:port"
        )
    return scheme, rest


def open_transport(target: str, config: ClientConfig) -> Transport:
    """Must be called on the event loop that will use it."""
    scheme, rest = check_target(target)
    if scheme in ("grpc", "grpcs"):
        credentials = channel_credentials(config) if scheme == "grpcs" else None
        return GrpcTransport(rest, config, credentials)
    try:
        context = ssl_context(config) if scheme == "https" else None
        return HttpTransport(f"{scheme}://{rest}", config, context)
    except httpx.InvalidURL as err:
        raise InvalidArgumentError("target", repr(target), f"a URL ({err})") from err
