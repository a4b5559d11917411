"""Processes behind the wires: what they load, count, and keep through a signal or a redeploy."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sqlite3
import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import httpx
import psutil
import pytest
from ray import serve

from ratoon import app
from ratoon.cluster import worker_start
from ratoon.ray_serve import APP_NAME
from ratoon_client import OperationHandle, RatoonApiError, RatoonClient, StepResult
from ratoon_proto.tinker import tinker_pb2
from ratoon_proto.v1 import service_pb2
from ratoon_proto.v1.service_pb2_grpc import PolicyServiceStub
from tests.api import requests
from tests.e2e.conftest import Wires, finished, next_seq
from tests.running_service import Service

pytestmark = pytest.mark.e2e
REPLICA = "ServeReplica:ratoon:Ingress"
# What a redeploy leaves alone: policies are in the memory of the last two.
KEPT = ("ray::Gateway", "ray::Engine", "ray::Worker")


@pytest.fixture(scope="module")
def policy(tiny_policy: Callable[[str], str]) -> str:
    return tiny_policy("e2e")


def _ours(title: str) -> list[psutil.Process]:
    """Processes of this session's Ray whose title says so."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if title in " ".join(child.cmdline())]


def _has_torch(process: psutil.Process) -> bool:
    return any("libtorch" in area.path for area in process.memory_maps())


@pytest.mark.usefixtures("policy")
def test_no_process_of_the_wires_loads_torch(service: Service) -> None:
    """Actors are found by name, and a name brings its class's module along: only thin ones."""
    replicas = _ours(REPLICA)
    assert len(replicas) == service.config.serve.num_replicas
    for process in [*replicas, *_ours("ray::Gateway"), *_ours("ray::ProxyActor")]:
        assert not _has_torch(process), process.cmdline()
    assert any(_has_torch(process) for process in _ours("ray::Worker"))


@pytest.mark.usefixtures("policy")
def test_workers_are_forks_of_one_process() -> None:
    (parent,) = {worker.ppid() for worker in _ours("ray::Worker")}
    assert worker_start.__name__ in psutil.Process(parent).cmdline()


async def test_counters_of_two_replicas_are_the_journals(
    service: Service, wires: Wires, policy: str
) -> None:
    """A scrape reaches any replica: all must show the same totals, and they must be true."""
    # Counters go on where a policy is deleted; its journal goes with it.
    deleted = await _done_updates(wires) - _journaled_updates(service)
    assert deleted >= 0
    seen: list[float] = []
    for _ in range(3):
        seq = await next_seq(wires, policy)
        request = requests.update(seq=seq, policy_id=policy)
        await finished(wires.http, await wires.http.call("Update", request))
        seen += [await _done_updates(wires) for _ in range(8)]
    assert seen == sorted(seen)
    assert seen[-1] - seen[0] >= 2
    count = deleted + _journaled_updates(service)
    while await _done_updates(wires) < count:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    assert [await _done_updates(wires) for _ in range(8)] == [count] * 8


def _journaled_updates(service: Service) -> int:
    database = service.config.data_root / "ratoon.sqlite"
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        ((count,),) = connection.execute(
            "SELECT count(*) FROM operations WHERE kind = 'update' AND state = 'applied'"
        ).fetchall()
    return int(count)


async def _done_updates(wires: Wires) -> float:
    # A connection of its own: Serve picks a replica anew.
    response = await wires.serve_http.client.get("/metrics", headers={"Connection": "close"})
    assert response.status_code == 200
    values = re.findall(
        r'^ratoon_operations_total\{[^}]*kind="update",[^}]*state="done"\} (\S+)$',
        response.text,
        re.MULTILINE,
    )
    return sum(map(float, values))


async def test_the_gateway_drains_on_sigterm_and_comes_back(
    service: Service, wires: Wires, policy: str
) -> None:
    """A call under way is answered, by the engine's own word, before the process ends."""
    seq = await next_seq(wires, policy)
    late = await wires.gateway.call("Update", requests.update(seq=seq + 1, policy_id=policy))
    request = service_pb2.GetOperationRequest(operation_id=late.operation_id, wait_s=1.6)
    edges = (wires.gateway, wires.http)
    polls = [asyncio.create_task(edge.call("GetOperation", request)) for edge in edges]
    # Calls begin in the order in which they arrive, so that the polls have begun with these.
    for edge in edges:
        at_once = service_pb2.GetOperationRequest(operation_id=late.operation_id)
        await edge.call("GetOperation", at_once)
    (gateway,) = _ours("ray::Gateway")
    os.kill(gateway.pid, signal.SIGTERM)
    for poll in polls:
        assert (await poll).blocked_by_seq == seq
    await asyncio.to_thread(gateway.wait, 10)
    async with grpc.aio.insecure_channel(service.addresses.grpc) as channel:
        health = await PolicyServiceStub(channel).Health(
            service_pb2.HealthRequest(), wait_for_ready=True, timeout=30
        )
    assert health.status == "ok"
    # On its own HTTP port again too, which Serve has kept from nobody.
    await wires.http.call("Update", requests.update(seq=seq, policy_id=policy))
    await finished(wires.serve_http, late)


@pytest.mark.more
async def test_a_sample_whose_process_is_killed_is_begun_anew(service: Service) -> None:
    """Its future is answered as if nothing had been, and so is the next sample."""
    url, headers = str(service.addresses.http), {"X-API-Key": "tml-none-is-asked-for"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60.0) as client:

        async def post(call: str, **body: object) -> httpx.Response:
            response = await client.post(f"/api/v1/{call}", json=body)
            assert response.status_code == 200, response.text
            return response

        session = (await post("create_session")).json()["session_id"]
        made = await post("create_sampling_session", session_id=session, base_model="tiny")

        async def sampled(max_tokens: int) -> int:
            begun = await post(
                "asample",
                sampling_session_id=made.json()["sampling_session_id"],
                prompt={"chunks": [{"tokens": [5, 6, 7]}]},
                sampling_params={"max_tokens": max_tokens, "stop": []},
            )
            request_id = begun.json()["request_id"]
            while True:
                answer = await post("retrieve_future", request_id=request_id)
                if "json" not in answer.headers["content-type"]:
                    (sequence,) = tinker_pb2.SampleResponse.FromString(answer.content).sequences
                    return len(sequence.tokens) // 4
                assert answer.json()["type"] == "try_again", answer.text

        assert await sampled(2) == 2
        (process,) = _ours("ray::SamplerActor")
        long = asyncio.create_task(sampled(3000))
        await asyncio.sleep(0.5)
        assert not long.done()
        os.kill(process.pid, signal.SIGKILL)
        assert await long == 3000
        assert await sampled(2) == 2
        assert process.pid not in {each.pid for each in _ours("ray::SamplerActor")}


@pytest.mark.more
async def test_a_redeploy_from_a_serve_config_keeps_policies_and_loses_no_operation(
    service: Service, wires: Wires, policy: str
) -> None:
    """`app_builder` is what deploy/serve.yaml names; it finds engine and gateway running."""
    kept = {process.pid for name in KEPT for process in _ours(name)}
    assert len(kept) >= len(KEPT)
    replicas = {process.pid for process in _ours(REPLICA)}
    seq = await next_seq(wires, policy)
    late = await wires.serve_http.call("Update", requests.update(seq=seq + 1, policy_id=policy))
    assert service.addresses.serve_http is not None
    client = RatoonClient(service.addresses.serve_http)
    waiting = asyncio.create_task(
        asyncio.to_thread(_result_behind_a_gap, client.operation(late.operation_id))
    )
    args = service.config.model_dump(mode="json")
    await asyncio.to_thread(
        lambda: serve.run(app.app_builder(args), name=APP_NAME, route_prefix="/")
    )
    # A worker that is started ahead for the next policy may come meanwhile.
    assert {process.pid for name in KEPT for process in _ours(name)} >= kept
    assert replicas.isdisjoint(process.pid for process in _ours(REPLICA))
    assert not waiting.done()
    request = requests.update(seq=seq, policy_id=policy)
    operation = await finished(wires.serve_http, await wires.serve_http.call("Update", request))
    assert operation.seq == seq
    # The client that waits all the while sees a longer operation, and nothing else.
    ended = await waiting
    assert isinstance(ended, StepResult)
    assert ended.version == operation.step.version + 1
    client.close()


def _result_behind_a_gap(handle: OperationHandle[Any]) -> object:
    """Result of an operation behind a gap: until it is filled, a caller learns only that the gap
    exists."""
    deadline = time.monotonic() + 280.0
    while True:
        try:
            return handle.result(max(0.0, deadline - time.monotonic()))
        except RatoonApiError as error:
            if error.code != "SEQ_GAP":
                raise
