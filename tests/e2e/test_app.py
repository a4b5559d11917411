"""What the composition root refuses before it starts anything."""

from __future__ import annotations

import pytest

from ratoon import app
from ratoon.config import GrpcConfig, HttpConfig, RatoonConfig, ServeConfig
from ratoon.errors import RatoonError

GRPC = ServeConfig(grpc=True)


@pytest.mark.parametrize(
    "config",
    [
        RatoonConfig(http=HttpConfig(host="0.0.0.0"), serve=GRPC),
        RatoonConfig(grpc=GrpcConfig(host="10.1.2.3"), serve=GRPC),
        RatoonConfig(http=HttpConfig(host="example.invalid"), serve=GRPC),
    ],
)
def test_public_bind_beside_the_plaintext_port_is_refused(config: RatoonConfig) -> None:
    with pytest.raises(RatoonError) as refused:
        app.start(config)
    assert refused.value.field == "serve.grpc"
