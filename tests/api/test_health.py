"""Health, requests as metrics with bounded labels, and when to ask again."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from ratoon.api import service
from ratoon.api.http.errors import error_response
from ratoon.auth import rates
from ratoon.auth.rates import FREE_BURST
from ratoon.engine.types import Operation
from ratoon.errors import ErrorCode, RatoonError, exhausted
from ratoon.metrics import MetricsTotals, Sample
from ratoon_proto.v1 import service_pb2
from ratoon_proto.v1.service_pb2_grpc import PolicyServiceStub
from tests.api import requests
from tests.api.conftest import Api
from tests.api.guarded import Guarded
from tests.api.wires import WireError, http_error
from tests.until import until


async def test_callers_at_once_are_one_question(
    api: Api, wire_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each listed all policies, under the lock that the journal writes with."""
    asked: list[str] = []
    for name in ("policies", "check_taking", "check_well"):
        answer = getattr(api.engine, name, None)
        if answer is None:
            continue

        async def counted(name: str = name, answer: object = answer) -> object:
            asked.append(name)
            return await answer()  # pyright: ignore[reportCallIssue]

        monkeypatch.setattr(api.engine, name, counted)
    wire, request = api.wire(wire_name), service_pb2.HealthRequest()
    answers = await asyncio.gather(*(wire.call("Health", request) for _ in range(40)))
    assert {answer.status for answer in answers} == {"ok"}
    assert asked == ["check_well"]


async def test_an_engine_that_does_not_answer_is_not_waited_for(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(service, "HEALTH_ANSWER_S", 0.1)
    monkeypatch.setattr(api.engine, "check_well", never)
    health = await api.grpc.call("Health", service_pb2.HealthRequest())
    assert health.status == "engine: it does not answer"


async def test_an_answer_is_soon_asked_for_again(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "HEALTH_S", 0.1)
    assert (await api.grpc.call("Health", service_pb2.HealthRequest())).status == "ok"
    api.engine.is_draining = True
    await asyncio.sleep(0.15)
    health = await api.grpc.call("Health", service_pb2.HealthRequest())
    assert health.status == "engine: the service is draining"


async def test_a_host_without_a_key_has_a_rate(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There was none."""
    # However slow this machine is, no more are let in meanwhile.
    monkeypatch.setattr(rates, "FREE_RATE", 1.0)
    answers = [await guarded.client.get("/v1/health") for _ in range(2 * FREE_BURST)]
    assert [answer.status_code for answer in answers[:FREE_BURST]] == [200] * FREE_BURST
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert http_error(refused).detail.details["resource"] == "requests_per_second"
    assert refused.headers["retry-after"] == "1"


def _requests(api: Api) -> list[tuple[str, ...]]:
    samples = [change for change in api.engine.metrics if isinstance(change, Sample)]
    seconds = [sample for sample in samples if sample.metric == "ratoon_request_seconds"]
    assert all((sample.value or 0) > 0 for sample in seconds)
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


def _full() -> RatoonError:
    return exhausted("full", resource="disk", wanted=7, free=-1, limit=5, retry_after_s=12.2)


async def test_both_wires_say_when_to_ask_again(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse() -> None:
        raise _full()

    monkeypatch.setattr(api.engine, "policies", refuse)
    response = await api.http.client.get("/v1/policies")
    assert (response.status_code, response.headers["retry-after"]) == (429, "13")
    expected = {"resource": "disk", "wanted": "7", "free": "0", "limit": "5", "retry_after_s": "13"}
    assert response.json()["error"]["details"] == expected
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await PolicyServiceStub(api.grpc.channel).ListPolicies(service_pb2.ListPoliciesRequest())
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert ("retry-after", "13") in tuple(caught.value.trailing_metadata() or ())


@pytest.mark.parametrize(
    ("code", "header"),
    [
        (ErrorCode.RESOURCE_EXHAUSTED, "1"),
        (ErrorCode.UNAVAILABLE, "1"),
        (ErrorCode.SEQ_GAP, None),
        (ErrorCode.BODY_TOO_LARGE, None),
    ],
)
def test_what_may_pass_elsewhere_names_no_time(code: ErrorCode, header: str | None) -> None:
    assert error_response(RatoonError(code, "no")).headers.get("retry-after") == header
