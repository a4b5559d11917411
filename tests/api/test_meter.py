"""Requests as metrics, with bounded labels."""

from __future__ import annotations

import asyncio

import pytest

from ratoon.engine.types import Operation
from ratoon.metrics import MetricsTotals, Sample
from ratoon_proto.v1 import service_pb2
from ratoon_proto.v1.service_pb2_grpc import PolicyServiceStub
from tests.api import requests
from tests.api.conftest import Api
from tests.api.wires import WireError
from tests.until import until


def _requests(api: Api) -> list[tuple[str, ...]]:
    samples = [change for change in api.engine.metrics if isinstance(change, Sample)]
    seconds = [sample for sample in samples if sample.metric == "ratoon_request_seconds"]
    assert all(sample.value > 0 for sample in seconds)
    counted = [sample.labels for sample in samples if sample.metric == "ratoon_requests_total"]
    assert [labels[:2] for labels in counted] == [sample.labels for sample in seconds]
    MetricsTotals().send(api.engine.metrics)
    return counted


async def test_requests_are_counted_by_call_and_outcome(api: Api) -> None:
    await api.create_policy()
    for wire in (api.grpc, api.http):
        await wire.call("GetPolicy", service_pb2.GetPolicyRequest(policy_id=requests.POLICY))
        with pytest.raises(WireError):
            await wire.call("GetPolicy", service_pb2.GetPolicyRequest(policy_id="absent"))
    await api.http.client.get("/v1/some/where")
    await api.http.client.get("/v1/some/where/else")
    assert _requests(api) == [
        ("grpc", "get_policy", "OK"),
        ("grpc", "get_policy", "NOT_FOUND"),
        ("http", "get_policy", "200"),
        ("http", "get_policy", "404"),
        ("http", "unknown", "404"),
        ("http", "unknown", "404"),
    ]


async def test_a_caller_that_left_is_counted_as_such(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    await api.create_policy()
    api.engine.hold = True
    operation = await api.grpc.call("Update", requests.update())
    asked, get_operation = asyncio.Event(), api.engine.get_operation

    async def note(operation_id: str, wait_s: float) -> Operation:
        asked.set()
        return await get_operation(operation_id, wait_s)

    monkeypatch.setattr(api.engine, "get_operation", note)
    stub = PolicyServiceStub(api.grpc.channel)
    poll = stub.GetOperation(
        service_pb2.GetOperationRequest(operation_id=operation.operation_id, wait_s=30.0)
    )
    await asked.wait()
    poll.cancel()
    await until(lambda: _requests(api)[-1] == ("grpc", "get_operation", "CANCELLED"))
