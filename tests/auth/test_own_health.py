"""The service's question to itself, which the image's health check asks."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ratoon.cli import cli
from ratoon.edge.tls import CertificateFiles
from ratoon.sole_service import free_port
from tests.certificates import make_authority
from tests.client.real_wires import serving_wires


def _health(port: int, monkeypatch: pytest.MonkeyPatch, files: CertificateFiles | None) -> int:
    monkeypatch.setenv("RATOON_HTTP__PORT", str(port))
    # As the image binds.
    monkeypatch.setenv("RATOON_HTTP__HOST", "0.0.0.0")
    if files is not None:
        monkeypatch.setenv("RATOON_TLS__CERT_FILE", str(files.cert))
        monkeypatch.setenv("RATOON_TLS__KEY_FILE", str(files.key))
        if files.client_ca is not None:
            monkeypatch.setenv("RATOON_TLS__CLIENT_CA_FILE", str(files.client_ca))
    return CliRunner().invoke(cli, ["health"]).exit_code


@pytest.mark.parametrize("asks_clients", [False, True])
def test_a_service_with_tls_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks_clients: bool
) -> None:
    """The image asked in plain text: a container with TLS was never healthy."""
    cert, key, client_ca = (tmp_path / name for name in ("cert.pem", "key.pem", "clients.pem"))
    make_authority("servers").issue(cert, key, "ratoon.example", addresses=())
    client_ca.write_bytes(make_authority("clients").pem)
    files = CertificateFiles(cert=cert, key=key, client_ca=client_ca if asks_clients else None)
    with serving_wires(tmp_path, files=files) as service:
        assert _health(service.port("http"), monkeypatch, files) == 0
        # What speaks no TLS is not this service.
        assert _health(service.port("http") + 1, monkeypatch, files) == 1


def test_nobody_is_not_well(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _health(free_port(), monkeypatch, None) == 1
