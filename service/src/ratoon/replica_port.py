"""Closes the port that Serve opens in each replica, on all interfaces, for pickles.

Proxies reach replicas as Ray actors, so the port has no callers, but Serve has no option to turn it
off. Serve reads Ray's TLS variables when it opens the port, after the replica's constructor. They
are set to demand a client certificate of an authority whose key nobody has.
"""

from __future__ import annotations

import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ratoon.config import is_ray_tls, ray_tls_files

_LIFE = timedelta(days=3650)


@contextmanager
def closed_replica_port() -> Generator[None, None, None]:
    """A port that Serve opens within the block completes no handshake.

    Where Ray itself has TLS, the port demands a certificate of Ray's authority instead.
    """
    if is_ray_tls():
        yield
        return
    with tempfile.TemporaryDirectory(prefix="ratoon-") as name:
        folder = Path(name)
        cert, key, authority = folder / "cert.pem", folder / "key.pem", folder / "authority.pem"
        own, own_key = _self_signed()
        cert.write_bytes(own)
        key.write_bytes(own_key)
        # The authority's key is discarded here, so it can never sign a client certificate.
        authority.write_bytes(_self_signed()[0])
        with ray_tls_files(cert=cert, key=key, authority=authority):
            yield


def _self_signed() -> tuple[bytes, bytes]:
    """A certificate and its key, in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ratoon replica")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + _LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM), key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
