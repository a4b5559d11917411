"""The real service as the tests start it: engine, gateway, Serve with two replicas.

In: a Ray namespace and a folder. Out: a running service. Invariant: there is one Serve a Ray
cluster, so a session starts one service, through the fixture `service`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ratoon import app
from ratoon.config import (
    GrpcConfig,
    HttpConfig,
    LimitsConfig,
    RatoonConfig,
    RayConfig,
    ServeConfig,
    TinkerConfig,
    WorkerConfig,
)

MIB = 2**20
GAP_WAIT_S = 2.0
MAX_BODY_BYTES = 4 * MIB
MAX_MESSAGE_BYTES = 8 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A running service; its policies are shared, so a test names its own."""

    addresses: app.ServiceAddresses
    config: RatoonConfig


@contextmanager
def running_service(namespace: str, root: Path) -> Iterator[Service]:
    """Two ingress replicas, a CPU worker a policy or for 16 with equal adapters, all ports free."""
    config = RatoonConfig(
        data_root=root / "data",
        models_root=root / "models",
        weights_root=root / "weights",
        http=HttpConfig(port=0),
        grpc=GrpcConfig(port=0, max_message_bytes=MAX_MESSAGE_BYTES),
        serve=ServeConfig(num_replicas=2, http_port=0),
        limits=LimitsConfig(
            max_body_bytes=MAX_BODY_BYTES,
            max_body_pause_s=5.0,
            gap_wait_s=GAP_WAIT_S,
            max_fetch_bytes=MIB,
            max_policies=64,
        ),
        worker=WorkerConfig(device="cpu", num_threads=1, max_tenants=16),
        ray=RayConfig(namespace=namespace),
        tinker=TinkerConfig(enabled=True),
        log_level="WARNING",
    )
    with app.running(config) as addresses:
        yield Service(addresses=addresses, config=config)
