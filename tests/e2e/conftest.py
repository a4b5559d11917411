"""The wires of the real service, and policies on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc.aio
import httpx
import pytest

from ratoon_proto.v1 import operation_pb2, service_pb2
from tests.api import requests
from tests.api.wires import GrpcWire, HttpWire, Wire
from tests.running_service import MAX_MESSAGE_BYTES, Service


@dataclass(frozen=True, slots=True, kw_only=True)
class Wires:
    """The three ways in: gRPC and HTTP of the gateway, and HTTP of Serve."""

    gateway: GrpcWire
    http: HttpWire
    serve_http: HttpWire

    def named(self, name: str) -> Wire:
        return {"gateway": self.gateway, "http": self.http, "serve_http": self.serve_http}[name]


WIRES = ("gateway", "http", "serve_http")


@pytest.fixture
async def wires(service: Service) -> AsyncIterator[Wires]:
    addresses = service.addresses
    assert addresses.serve_http is not None
    options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
    async with (
        grpc.aio.insecure_channel(addresses.grpc, options=options) as gateway,
        httpx.AsyncClient(base_url=addresses.http, trust_env=False, timeout=60) as http,
        httpx.AsyncClient(base_url=addresses.serve_http, trust_env=False, timeout=60) as serve_http,
    ):
        yield Wires(
            gateway=GrpcWire(channel=gateway),
            http=HttpWire(client=http),
            serve_http=HttpWire(client=serve_http),
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


async def next_seq(wires: Wires, policy_id: str) -> int:
    request = service_pb2.GetPolicyRequest(policy_id=policy_id)
    return (await wires.gateway.call("GetPolicy", request)).next_seq


@pytest.fixture(scope="session")
def tiny_policy(service: Service) -> Callable[[str], str]:
    """Creates a `tiny` policy of the given id, or finds it, and waits until it is ready."""

    async def create(policy_id: str) -> None:
        async with grpc.aio.insecure_channel(service.addresses.grpc) as channel:
            wire = GrpcWire(channel=channel)
            request = service_pb2.CreatePolicyRequest(spec=requests.spec(policy_id))
            await finished(wire, await wire.call("CreatePolicy", request))

    def run(policy_id: str) -> str:
        asyncio.run(create(policy_id))
        return policy_id

    return run
