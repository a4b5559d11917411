"""What the composition root refuses before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratoon import app
from ratoon.config import RatoonConfig, ServeConfig, TlsConfig
from ratoon.errors import RatoonError


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "example.invalid"])
def test_a_public_serve_port_beside_client_certificates_is_refused(host: str) -> None:
    """Serve's port asks for no client certificate, so it would be a weaker way in."""
    tls = TlsConfig(cert_file=Path("c"), key_file=Path("k"), client_ca_file=Path("a"))
    with pytest.raises(RatoonError) as refused:
        app.start(RatoonConfig(tls=tls, serve=ServeConfig(http_host=host)))
    assert refused.value.field == "serve.http_host"
