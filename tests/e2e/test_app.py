"""What the composition root refuses before it starts anything, and how a start is ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratoon import app
from ratoon.config import RatoonConfig, ServeConfig, TlsConfig
from ratoon.errors import RatoonError
from tests.e2e.own_service import OwnService


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "example.invalid"])
def test_a_public_serve_port_beside_client_certificates_is_refused(host: str) -> None:
    """Serve's port asks for no client certificate, so it would be a weaker way in."""
    tls = TlsConfig(cert_file=Path("c"), key_file=Path("k"), client_ca_file=Path("a"))
    with pytest.raises(RatoonError) as refused:
        app.start(RatoonConfig(tls=tls, serve=ServeConfig(http_host=host)))
    assert refused.value.field == "serve.http_host"


@pytest.mark.parametrize(
    "line", ["starting", pytest.param("gateway answers", marks=pytest.mark.more)]
)
def test_ctrl_c_ends_a_start_in_order(tmp_path: Path, line: str) -> None:
    """Red before: it was a KeyboardInterrupt within Ray's libraries, which one in six did not
    survive (a segmentation fault), and others told in tracebacks."""
    own = OwnService(tmp_path)
    status, said = own.interrupted_start(line)
    assert status == 0, said
    assert "stopping" in said
    assert "Traceback" not in said
    assert "ready  " not in said
    if line != "starting":
        # Nothing is left: the same ports and folder start again.
        with own.running():
            assert any(line.startswith("ready") for line in own.started)
