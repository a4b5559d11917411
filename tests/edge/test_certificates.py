"""Certificate files: what is refused by name, and what a change of them does."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from pydantic import ValidationError

from ratoon import app
from ratoon.config import GrpcConfig, RatoonConfig, TlsConfig
from ratoon.doctor import Status, run_checks
from ratoon.edge.tls import (
    CertificateFiles,
    Certificates,
    CertificateStore,
    load_certificates,
)
from ratoon.errors import RatoonError
from ratoon.log import configure_logging
from tests.certificates import Authority, make_authority


@pytest.fixture(scope="module")
def authority() -> Authority:
    return make_authority("ours")


@pytest.fixture(autouse=True)
def _log() -> None:
    configure_logging("INFO")


@pytest.fixture
def files(tmp_path: Path, authority: Authority) -> CertificateFiles:
    made = CertificateFiles(
        cert=tmp_path / "cert.pem", key=tmp_path / "key.pem", client_ca=tmp_path / "ca.pem"
    )
    authority.issue(made.cert, made.key)
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    return made


def _serial(certificates: Certificates) -> int:
    return x509.load_pem_x509_certificates(certificates.chain)[0].serial_number


def _other_key(files: CertificateFiles, authority: Authority) -> None:
    authority.issue(files.cert.with_name("other.pem"), files.key)


def _encrypted(files: CertificateFiles, authority: Authority) -> None:
    del authority
    files.key.write_text(files.key.read_text().replace("BEGIN PRIVATE", "BEGIN ENCRYPTED PRIVATE"))


@pytest.mark.parametrize(
    ("name", "damage", "expected"),
    [
        ("tls.cert_file", lambda f, _: f.cert.unlink(), "can be read"),
        ("tls.cert_file", lambda f, _: f.cert.write_text("no"), "certificates in PEM"),
        (
            "tls.cert_file",
            lambda f, a: a.issue(f.cert, f.key, days=(-9, -1)),
            "have not expired",
        ),
        ("tls.cert_file", lambda f, a: a.issue(f.cert, f.key, days=(1, 9)), "valid already"),
        ("tls.key_file", lambda f, _: f.key.unlink(), "can be read"),
        ("tls.key_file", lambda f, _: f.key.write_text("no"), "private key"),
        ("tls.key_file", _encrypted, "not encrypted"),
        ("tls.key_file", _other_key, "the key of the certificate"),
        ("tls.key_file", lambda f, _: f.key.chmod(0o604), "closed to other users"),
        ("tls.key_file", lambda f, _: f.key.chmod(0o620), "closed to other users"),
        ("tls.client_ca_file", lambda f, _: f.client_ca.write_text(""), "certificates in PEM"),
        (
            "tls.client_ca_file",
            lambda f, _: f.client_ca.write_bytes(make_authority("old", days=(-9, -1)).pem),
            "have not expired",
        ),
    ],
)
def test_a_bad_file_is_refused_by_name(
    files: CertificateFiles,
    authority: Authority,
    name: str,
    damage: Callable[[CertificateFiles, Authority], object],
    expected: str,
) -> None:
    load_certificates(files)
    damage(files, authority)
    with pytest.raises(RatoonError) as refused:
        load_certificates(files)
    assert refused.value.field == name
    assert expected in refused.value.message
    assert "BEGIN" not in refused.value.message


def test_a_key_that_the_group_may_read_is_taken(files: CertificateFiles) -> None:
    """Volumes of secrets in clusters are."""
    files.key.chmod(0o640)
    load_certificates(files)


def test_a_change_is_seen_and_a_bad_one_is_not_taken(
    files: CertificateFiles, authority: Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    store = CertificateStore(files)
    first = store.current()
    assert store.current() is first
    # As a renewal that writes one file after the other is seen in between.
    fresh = files.cert.with_name("fresh.pem"), files.key.with_name("fresh-key.pem")
    serial = authority.issue(*fresh)
    fresh[0].replace(files.cert)
    assert store.current() is first
    assert store.current() is first
    assert capsys.readouterr().err.count("certificate not reloaded") == 1
    fresh[1].replace(files.key)
    second = store.current()
    assert _serial(second) == serial != _serial(first)
    files.cert.unlink()
    assert store.current() is second


def test_a_link_that_is_turned_is_a_change(files: CertificateFiles, authority: Authority) -> None:
    """Clusters renew a volume of secrets by turning one link to another folder."""
    folder = files.cert.parent
    (folder / "1").mkdir()
    (folder / "2").mkdir()
    serials = [authority.issue(folder / n / "c.pem", folder / n / "k.pem") for n in ("1", "2")]
    (folder / "now").symlink_to("1")
    linked = CertificateFiles(cert=folder / "now/c.pem", key=folder / "now/k.pem", client_ca=None)
    store = CertificateStore(linked)
    assert _serial(store.current()) == serials[0]
    (folder / "next").symlink_to("2")
    os.replace(folder / "next", folder / "now")  # noqa: PTH105
    assert _serial(store.current()) == serials[1]


def test_a_certificate_that_ends_soon_is_said(
    files: CertificateFiles, authority: Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    load_certificates(files)
    assert "ends soon" not in capsys.readouterr().err
    authority.issue(files.cert, files.key, days=(-1, 13))
    load_certificates(files)
    assert "ends soon" in capsys.readouterr().err


def test_the_service_does_not_start_with_a_bad_file(
    files: CertificateFiles, tmp_path: Path
) -> None:
    files.key.chmod(0o644)
    config = RatoonConfig(
        data_root=tmp_path, tls=TlsConfig(cert_file=files.cert, key_file=files.key)
    )
    with pytest.raises(RatoonError) as refused:
        app.start(config)
    assert refused.value.field == "tls.key_file"
    assert _doctor(config) == Status.FAIL
    files.key.chmod(0o600)
    assert _doctor(config) == Status.OK


def _doctor(config: RatoonConfig) -> Status:
    return next(check.status for check in run_checks(config) if check.name == "tls")


@pytest.mark.parametrize("given", [{"cert_file": "a"}, {"key_file": "a"}, {"client_ca_file": "a"}])
def test_half_of_the_files_is_no_setting(given: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        TlsConfig.model_validate(given)


def test_a_public_bind_without_tls_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    config = RatoonConfig(grpc=GrpcConfig(host="10.1.2.3"))
    app.check_tls(config)
    assert "served without TLS" in capsys.readouterr().err
    app.check_tls(RatoonConfig())
    assert "served without TLS" not in capsys.readouterr().err
