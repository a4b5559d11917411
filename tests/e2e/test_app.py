"""What the composition root refuses before it starts anything."""

from __future__ import annotations

import pytest

from ratoon import app
from ratoon.config import GrpcConfig, HttpConfig, RatoonConfig
from ratoon.errors import RatoonError


@pytest.mark.parametrize(
    "config",
    [
        RatoonConfig(http=HttpConfig(host="0.0.0.0")),
        RatoonConfig(grpc=GrpcConfig(host="10.1.2.3")),
        RatoonConfig(http=HttpConfig(host="example.invalid")),
    ],
)
def test_public_bind_beside_the_plaintext_port_is_refused(config: RatoonConfig) -> None:
    with pytest.raises(RatoonError) as refused:
        app.start(config)
    assert refused.value.field == "grpc.serve_proxy"
