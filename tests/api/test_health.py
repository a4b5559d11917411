"""Health needs no key, so it costs the engine next to nothing however often it is asked."""

from __future__ import annotations

import asyncio

import pytest

from ratoon.api import service
from ratoon.auth.rates import FREE_BURST
from ratoon_proto.v1 import service_pb2
from tests.api.conftest import Api
from tests.api.guarded import Guarded
from tests.api.wires import http_error


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


async def test_a_host_without_a_key_has_a_rate(guarded: Guarded) -> None:
    """There was none."""
    answers = [await guarded.client.get("/v1/health") for _ in range(2 * FREE_BURST)]
    assert [answer.status_code for answer in answers[:FREE_BURST]] == [200] * FREE_BURST
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert http_error(refused).detail.details["resource"] == "requests_per_second"
    assert refused.headers["retry-after"] == "1"
