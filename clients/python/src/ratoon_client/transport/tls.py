"""TLS of both wires; the service's certificate and name are always verified."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc
import httpx

from ratoon_client.config import ClientConfig
from ratoon_client.errors import InvalidArgumentError, TlsError, TransportError

_NOT_VERIFIED = "the service's certificate does not verify"
_NOT_TLS = "no certificate: the service, or what answers there, speaks no TLS"
# What OpenSSL, and gRPC with its own build of it, say.
_FLAWS = (
    ("CERTIFICATE_VERIFY_FAILED", _NOT_VERIFIED),
    ("Hostname Verification Check failed", _NOT_VERIFIED),
    ("WRONG_VERSION_NUMBER", _NOT_TLS),
    ("record layer failure", _NOT_TLS),
)


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


def no_answer(text: str) -> TransportError:
    """The error where no answer came: TlsError where a library says that TLS failed for good.

    A service that hangs up looks the same for want of a client's certificate and in a restart.
    """
    for sign, flaw in _FLAWS:
        if sign in text:
            return TlsError(f"{flaw}: {text}")
    return TransportError(text)


def _read(name: str, path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as err:
        raise InvalidArgumentError(name, str(path), "a file that can be read") from err
