"""Which transport a target means: `grpc(s)://host:port`, `host:port` or `http(s)://...`.

With TLS the service's certificate and name are always verified.
"""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
from ipaddress import ip_address
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

import grpc
import httpx

from ratoon_client.caller import Transport
from ratoon_client.config import PLAIN_VARIABLE, ClientConfig, may_send_plain_key
from ratoon_client.errors import InvalidArgumentError, TransportError
from ratoon_client.transport.grpc_wire import GrpcTransport
from ratoon_client.transport.http_wire import HttpTransport

TLS_SCHEMES = ("grpcs", "https")
_PORTS = MappingProxyType({"http": 80, "https": 443})
_RECONNECT_S = 0.1


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


async def reach(target: str, timeout_s: float) -> None:
    """Wait until something at the target takes a connection: a service that is there does at once.

    Raises TransportError after `timeout_s` seconds. A target that names no port is not looked at.
    """
    scheme, rest = check_target(target)
    try:
        place = urlsplit(f"//{rest}")
        host, port = place.hostname, place.port or _PORTS.get(scheme)
    except ValueError:
        return
    if host is None or port is None:
        return
    reason = "no answer"
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    _, writer = await asyncio.open_connection(host, port)
                except OSError as err:
                    # The text would list each of several addresses.
                    is_known = err.errno is not None and err.errno in errno.errorcode
                    reason = os.strerror(err.errno or 0) if is_known else str(err)
                    await asyncio.sleep(_RECONNECT_S)
                else:
                    writer.close()
                    return
    except TimeoutError:
        text = f"nothing answers at {scheme}://{rest} ({reason}); is `ratoon serve` running?"
        raise TransportError(text) from None


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


def channel_credentials(config: ClientConfig) -> grpc.ChannelCredentials:
    """Without `ca_file`: the authorities that gRPC brings. Raises InvalidArgumentError."""
    return grpc.ssl_channel_credentials(
        root_certificates=_read("ca_file", config.ca_file),
        private_key=_read("key_file", config.key_file),
        certificate_chain=_read("cert_file", config.cert_file),
    )


def ssl_context(config: ClientConfig) -> ssl.SSLContext:
    """Without `ca_file`: the authorities that httpx brings. Raises InvalidArgumentError."""
    for name in ("ca_file", "cert_file", "key_file"):
        _read(name, getattr(config, name))
    try:
        context = (
            httpx.create_ssl_context(trust_env=False)
            if config.ca_file is None
            else ssl.create_default_context(cafile=config.ca_file)
        )
    except ssl.SSLError as err:
        raise InvalidArgumentError("ca_file", str(config.ca_file), "certificates in PEM") from err
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if config.cert_file is not None and config.key_file is not None:
        try:
            # Without a password: an encrypted key would otherwise be asked for at the terminal.
            context.load_cert_chain(config.cert_file, config.key_file, password="")
        except ssl.SSLError as err:
            got = f"{config.cert_file} and {config.key_file}"
            raise InvalidArgumentError(
                "cert_file", got, "a certificate and its unencrypted key in PEM"
            ) from err
    return context


def _read(name: str, path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as err:
        raise InvalidArgumentError(name, str(path), "a file that can be read") from err
