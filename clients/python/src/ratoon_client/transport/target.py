"""Which transport a target means: `grpc(s)://host:port`, `host:port` or `http(s)://...`."""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit

import httpx

from ratoon_client.caller import Transport
from ratoon_client.config import PLAIN_VARIABLE, ClientConfig, may_send_plain_key
from ratoon_client.errors import InvalidArgumentError
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


def check_key_target(target: str, config: ClientConfig) -> None:
    """Raises InvalidArgumentError where the key would go to another machine in plain text."""
    scheme, rest = check_target(target)
    if not config.api_key or scheme in TLS_SCHEMES or _is_this_machine(rest):
        return
    if not may_send_plain_key(config):
        raise InvalidArgumentError(
            "target",
            "another machine, to which the API key would go in plain text",
            f"https://, grpcs://, or ClientConfig(plain_text_key=True) or {PLAIN_VARIABLE}=1 where"
            " something else encrypts",
        )


def _is_this_machine(address: str) -> bool:
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    try:
        host = urlsplit(f"//{address}").hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


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
