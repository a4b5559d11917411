"""Throwaway authorities, and certificates for loopback, in PEM files."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

DAY = timedelta(days=1)


@dataclass(frozen=True, kw_only=True)
class Authority:
    """Signs what it is asked to; `pem` is its own certificate."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    def issue(
        self,
        cert: Path,
        key: Path,
        name: str = "localhost",
        *,
        addresses: tuple[str, ...] = ("127.0.0.1", "::1"),
        days: tuple[float, float] = (-1, 90),
    ) -> int:
        """Write a certificate for a name and addresses, and its key; gives the serial."""
        own = ec.generate_private_key(ec.SECP256R1())
        alternative = x509.SubjectAlternativeName(
            [x509.DNSName(name), *(x509.IPAddress(ip_address(text)) for text in addresses)]
        )
        made = (
            _builder(name, self.certificate.subject, own.public_key(), days)
            .add_extension(alternative, critical=False)
            .sign(self.key, hashes.SHA256())
        )
        cert.write_bytes(made.public_bytes(Encoding.PEM))
        key.touch(mode=0o600)
        key.write_bytes(own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return made.serial_number


def make_authority(name: str, *, days: tuple[float, float] = (-1, 90)) -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    certificate = (
        _builder(name, subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Authority(certificate=certificate, key=key)


def _builder(
    name: str, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: tuple[float, float]
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + days[0] * DAY)
        .not_valid_after(now + days[1] * DAY)
    )
