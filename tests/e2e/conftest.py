"""The real service, started once a session: engine, Serve with two replicas, gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import httpx
import pytest

from ratoon import app
from ratoon.config import (
    GrpcConfig,
    HttpConfig,
    LimitsConfig,
    RatoonConfig,
    RayConfig,
    WorkerConfig,
)
from ratoon_proto.v1 import operation_pb2, service_pb2
from tests.api import requests
from tests.api.wires import GrpcWire, HttpWire, Wire
from tests.conftest import RayCluster

MIB = 2**20
GAP_WAIT_S = 1.0
MAX_BODY_BYTES = 4 * MIB
MAX_MESSAGE_BYTES = 8 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A running service; its policies are shared, so a test names its own."""

    addresses: app.ServiceAddresses
    config: RatoonConfig


@pytest.fixture(scope="session")
def service(ray_cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Two ingress replicas, a CPU worker a policy, all ports free ones."""
    root: Path = tmp_path_factory.mktemp("service")
    config = RatoonConfig(
        data_root=root / "data",
        models_root=root / "models",
        http=HttpConfig(port=0, num_replicas=2),
        grpc=GrpcConfig(gateway_port=0, serve_port=0, max_message_bytes=MAX_MESSAGE_BYTES),
        limits=LimitsConfig(
            max_body_bytes=MAX_BODY_BYTES, gap_wait_s=GAP_WAIT_S, max_fetch_bytes=MIB
        ),
        worker=WorkerConfig(device="cpu", num_threads=1),
        ray=RayConfig(namespace=ray_cluster.namespace),
        log_level="WARNING",
    )
    with app.running(config) as addresses:
        yield Service(addresses=addresses, config=config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wires:
    """The three ways in: the gateway, Serve's gRPC proxy, HTTP."""

    gateway: GrpcWire
    serve: GrpcWire
    http: HttpWire

    def named(self, name: str) -> Wire:
        return {"gateway": self.gateway, "serve": self.serve, "http": self.http}[name]


@pytest.fixture
async def wires(service: Service) -> AsyncIterator[Wires]:
    addresses = service.addresses
    assert addresses.serve_grpc is not None
    options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
    async with (
        grpc.aio.insecure_channel(addresses.grpc, options=options) as gateway,
        grpc.aio.insecure_channel(addresses.serve_grpc, options=options) as serve,
        httpx.AsyncClient(base_url=addresses.http, trust_env=False, timeout=60) as client,
    ):
        yield Wires(
            gateway=GrpcWire(channel=gateway),
            serve=GrpcWire(channel=serve),
            http=HttpWire(client=client),
        )


async def finished(wire: Wire, operation: operation_pb2.Operation) -> operation_pb2.Operation:
    """The operation once it is done; fails with its error."""
    request = service_pb2.GetOperationRequest(operation_id=operation.operation_id, wait_s=30)
    for _ in range(4):
        operation = await wire.call("GetOperation", request)
        if operation.finished_at.seconds:
            break
    assert operation.state == operation_pb2.OPERATION_STATE_DONE, operation
    return operation


@pytest.fixture(scope="session")
def tiny_policy(service: Service) -> Callable[[str], str]:
    """Creates a `tiny` policy of the given id, and waits until it is ready."""

    async def create(policy_id: str) -> None:
        async with grpc.aio.insecure_channel(service.addresses.grpc) as channel:
            wire = GrpcWire(channel=channel)
            request = service_pb2.CreatePolicyRequest(spec=requests.spec(policy_id))
            await finished(wire, await wire.call("CreatePolicy", request))

    def run(policy_id: str) -> str:
        asyncio.run(create(policy_id))
        return policy_id

    return run
