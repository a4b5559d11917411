"""TLS of the gateway's ports: certificates from files that may change, and contexts that use them.

Files that do not match or have expired are refused by name at start; later they are ignored. Each
handshake uses the certificates current at that time; open connections continue.
"""

from __future__ import annotations

import ssl
import stat
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from ratoon.config import RatoonConfig
from ratoon.errors import RatoonError, invalid
from ratoon.log import get_logger

ENDS_SOON = timedelta(days=14)
# Key file modes that are refused: any access by others, writing by the group. Group reading is
# allowed, as Kubernetes secret volumes set it.
_TOO_OPEN = stat.S_IRWXO | stat.S_IWGRP
_log = get_logger("tls")


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFiles:
    """Paths of PEM files. `client_ca` None: clients need no certificate."""

    cert: Path
    key: Path
    client_ca: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """PEM texts, and the `context` made from them. `ends_at` is the earliest expiry."""

    chain: bytes
    key: bytes = field(repr=False)
    client_ca: bytes | None
    context: ssl.SSLContext
    ends_at: datetime


class CertificateStore:
    """Keeps the current certificates, for each handshake. Thread-safe.

    A changed file is read at the next handshake. If it is not valid, that is logged once per
    change, and the old certificates stay.
    """

    def __init__(self, files: CertificateFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        # Before the files are read, so that a replacement in between is noticed.
        self._signature = _signature(files)
        self._current = load_certificates(files)

    def current(self) -> Certificates:
        """Return the certificates to use now. Never raises."""
        with self._lock:
            signature = _signature(self._files)
            if signature != self._signature:
                self._signature = signature
                self._reload()
            return self._current

    def _reload(self) -> None:
        try:
            self._current = load_certificates(self._files)
        except RatoonError as err:
            _log.error("certificate not reloaded", reason=err.message)
            return
        _log.info("certificate reloaded", ends_at=self._current.ends_at.isoformat())


def files_of(config: RatoonConfig) -> CertificateFiles | None:
    """Return the configured files, with absolute paths; None without TLS."""
    tls = config.tls
    if tls.cert_file is None or tls.key_file is None:
        return None
    return CertificateFiles(
        cert=tls.cert_file.absolute(),
        key=tls.key_file.absolute(),
        client_ca=None if tls.client_ca_file is None else tls.client_ca_file.absolute(),
    )


def load_certificates(files: CertificateFiles) -> Certificates:
    """Read and check all files. Raises INVALID_ARGUMENT naming the setting."""
    key_pem = _read("tls.key_file", files.key)
    key = _private_key(files.key, key_pem)
    chain_pem = _read("tls.cert_file", files.cert)
    chain = _certificates("tls.cert_file", files.cert, chain_pem)
    if chain[0].public_key() != key.public_key():
        raise invalid("tls.key_file", files.key, f"the key of the certificate in {files.cert}")
    client_ca = None if files.client_ca is None else _read("tls.client_ca_file", files.client_ca)
    authorities: list[x509.Certificate] = []
    if files.client_ca is not None and client_ca is not None:
        authorities = _certificates("tls.client_ca_file", files.client_ca, client_ca)
    ends_at = min(certificate.not_valid_after_utc for certificate in (*chain, *authorities))
    if ends_at - datetime.now(UTC) < ENDS_SOON:
        _log.warning("a certificate ends soon", ends_at=ends_at.isoformat())
    return Certificates(
        chain=chain_pem,
        key=key_pem,
        client_ca=client_ca,
        context=_context(files, client_ca),
        ends_at=ends_at,
    )


def _context(files: CertificateFiles, client_ca: bytes | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # A resumed session would skip the certificate check.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    try:
        context.load_cert_chain(files.cert, files.key)
        if client_ca is not None:
            context.load_verify_locations(cadata=client_ca.decode("ascii", "replace"))
            context.verify_mode = ssl.CERT_REQUIRED
    except ssl.SSLError as err:
        raise invalid("tls.cert_file", files.cert, f"what OpenSSL takes ({err.reason})") from err
    return context


def _certificates(name: str, path: Path, pem: bytes) -> list[x509.Certificate]:
    """Return the certificates of a PEM text, all valid now. Raises INVALID_ARGUMENT."""
    try:
        found = x509.load_pem_x509_certificates(pem)
    except ValueError as err:
        raise invalid(name, path, "certificates in PEM") from err
    now = datetime.now(UTC)
    for certificate in found:
        subject = certificate.subject.rfc4514_string()
        if certificate.not_valid_after_utc <= now:
            ended = f"{path}: {subject} ended at {certificate.not_valid_after_utc.isoformat()}"
            raise invalid(name, ended, "certificates that have not expired")
        if certificate.not_valid_before_utc > now:
            begins = f"{path}: {subject} begins at {certificate.not_valid_before_utc.isoformat()}"
            raise invalid(name, begins, "certificates that are valid already")
    return found


def _private_key(path: Path, pem: bytes) -> PrivateKeyTypes:
    mode = path.stat().st_mode
    if mode & _TOO_OPEN:
        got = f"{path} of mode {stat.S_IMODE(mode):04o}"
        raise invalid("tls.key_file", got, "a file closed to other users (chmod 600, or 640)")
    try:
        return load_pem_private_key(pem, password=None)
    except (ValueError, TypeError):
        # The cause may quote the key.
        raise invalid("tls.key_file", path, "a private key in PEM, not encrypted") from None


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as err:
        raise invalid(name, path, f"a file that can be read ({err.strerror})") from err


def _signature(files: CertificateFiles) -> tuple[tuple[int, int, int] | None, ...]:
    paths = (files.cert, files.key, *([] if files.client_ca is None else [files.client_ca]))
    return tuple(_stamp(path) for path in paths)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return inode, change time and size of a file; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def server_context(store: CertificateStore, *, protocols: Sequence[str] = ()) -> ssl.SSLContext:
    """Return a context whose handshakes use the store's current certificates.

    Clients need a certificate if the store has authorities for them. `protocols` are the ALPN
    protocols to offer.
    """
    context = store.current().context
    if protocols:
        context.set_alpn_protocols(list(protocols))

    def take_current(
        connection: ssl.SSLSocket | ssl.SSLObject, _: str | None, first: ssl.SSLContext
    ) -> None:
        now = store.current().context
        if now is not first:
            if protocols:
                now.set_alpn_protocols(list(protocols))
            connection.context = now

    # OpenSSL calls it in every handshake, with a server name or without.
    context.sni_callback = take_current
    return context
