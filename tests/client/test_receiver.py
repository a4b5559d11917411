"""Versions into engines: whole and verified, or the version before them."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ratoon_client import (
    AsyncRatoonClient,
    EngineError,
    IntegrityError,
    InvalidArgumentError,
    RatoonApiError,
    RatoonClient,
    Received,
    ReceiveFailure,
    ReceiverEvent,
    SglangAdapter,
    VllmAdapter,
)
from ratoon_client.results import WeightFile, WeightManifest
from ratoon_client.weights.committed import COMMITTED_NAME
from tests.client.fake_engine import FILE, ROOT, START, FakeEngine, HangError, serving_engine
from tests.client.fake_service import (
    CHUNK_BYTES,
    FakePolicy,
    FakeService,
    Fault,
    LostAnswerError,
    RefusalError,
)

NUM_CHUNKS = 4
SIZE_BYTES = (NUM_CHUNKS - 1) * CHUNK_BYTES + 7
WAIT_S = 20.0
LOAD_CALLS = ("/pause?mode=wait", "/collective_rpc", "/reset_prefix_cache", "/resume")


def model(version: int) -> bytes:
    return random.Random(version).randbytes(SIZE_BYTES)


def publish(service: FakeService, version: int) -> None:
    service.publish(version, {FILE: model(version), "config.json": b"{}"})


def honest(data: bytes, _: int) -> bytes:
    return data


@pytest.fixture
def wire() -> str:
    return "http"


@pytest.fixture(autouse=True)
def _published(service: FakeService) -> None:
    publish(service, 1)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "mirror"


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncRatoonClient]:
    async with AsyncRatoonClient(url, timeout_s=5.0) as client:
        yield client


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def engine_url(engine: FakeEngine) -> Iterator[str]:
    with serving_engine(engine) as url:
        yield url


@pytest.fixture
def vllm(engine_url: str) -> Iterator[VllmAdapter]:
    with VllmAdapter(engine_url, drain_s=2.0, load_s=2.0, call_s=2.0) as adapter:
        yield adapter


@pytest.fixture
def sglang(engine_url: str) -> Iterator[SglangAdapter]:
    with SglangAdapter(engine_url, load_s=2.0, call_s=2.0) as adapter:
        yield adapter


class Events:
    """What a receiver told, and a way to wait for more of it."""

    def __init__(self) -> None:
        self.all: list[ReceiverEvent] = []
        self._more = asyncio.Event()

    def __call__(self, event: ReceiverEvent) -> None:
        self.all.append(event)
        self._more.set()

    @property
    def versions(self) -> list[int]:
        return [event.version for event in self.all if isinstance(event, Received)]

    @property
    def failures(self) -> list[ReceiveFailure]:
        return [event for event in self.all if isinstance(event, ReceiveFailure)]

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not is_so():
                self._more.clear()
                await self._more.wait()


def versions(root: Path) -> set[str]:
    return {path.name for path in root.glob("version-*")}


async def test_a_folder_follows_the_newest_version(
    service: FakeService, client: AsyncRatoonClient, root: Path
):
    receiver = client.weight_receiver("p", root)
    first = await receiver.sync_once()
    assert first is not None
    assert (first.version, first.size_bytes) == (1, SIZE_BYTES + 2)
    assert first.fetched_bytes == SIZE_BYTES + 2
    assert first.fetch_s > 0
    assert first.verify_s > 0
    assert await receiver.sync_once() is None
    for version in (2, 3, 4):
        publish(service, version)
    second = await receiver.sync_once()
    assert second is not None
    # config.json is linked, versions in between are not fetched.
    assert (second.version, second.fetched_bytes) == (4, SIZE_BYTES)
    assert (root / "latest" / FILE).read_bytes() == model(4)
    publish(service, 5)
    await receiver.sync_once()
    assert versions(root) == {"version-4", "version-5"}
    publish(service, 6)
    await client.weight_receiver("p", root, keep=3).sync_once()
    assert versions(root) == {"version-4", "version-5", "version-6"}
    with pytest.raises(InvalidArgumentError, match="2 or more"):
        client.weight_receiver("p", root, keep=1)


async def test_the_service_hears_what_is_served_and_what_is_fetched(
    service: FakeService, client: AsyncRatoonClient, root: Path
):
    def said() -> list[tuple[int | None, int | None]]:
        acks, service.acks = service.acks, []
        (name,) = {ack.receiver_id for ack in acks}
        assert re.fullmatch(r"[a-zA-Z0-9._-]{1,64}", name)
        assert name == "mine" or len(name) > 17
        return [
            (
                ack.version if ack.HasField("version") else None,
                ack.holds_version if ack.HasField("holds_version") else None,
            )
            for ack in acks
        ]

    await client.weight_receiver("p", root).sync_once()
    assert said() == [(None, 1), (1, None)]
    publish(service, 2)
    await client.weight_receiver("p", root, receiver_id="mine").sync_once()
    assert said() == [(1, 2), (2, None)]


async def test_a_version_is_served_where_the_service_hears_nothing(
    service: FakeService, client: AsyncRatoonClient, root: Path
):
    error = RefusalError("RESOURCE_EXHAUSTED", field="holds_version")
    service.faults = [Fault(name="AckWeights", error=error) for _ in range(2)]
    received = await client.weight_receiver("p", root).sync_once()
    assert received is not None
    assert service.faults == []


async def test_a_receiver_waits_for_a_version(
    service: FakeService, client: AsyncRatoonClient, root: Path
):
    service.long_poll_s = WAIT_S
    receiver = client.weight_receiver("p", root)
    await receiver.sync_once()
    waiting = asyncio.create_task(receiver.sync_once(WAIT_S))
    publish(service, 2)
    received = await waiting
    assert received is not None
    assert received.version == 2


async def test_nothing_is_received_where_nothing_is_published(
    service: FakeService, client: AsyncRatoonClient, root: Path
):
    service.policies["p"] = FakePolicy()
    assert await client.weight_receiver("p", root).sync_once() is None


async def test_an_engine_gets_the_version_in_one_pause(
    client: AsyncRatoonClient,
    root: Path,
    engine: FakeEngine,
    vllm: VllmAdapter,
):
    receiver = client.weight_receiver("p", root, vllm)
    received = await receiver.sync_once()
    assert received is not None
    assert received.pause_s > 0
    assert engine.sample() == model(1)
    load = {"method": "reload_weights", "kwargs": {"weights_path": str(root / "version-1")}}
    reads = ("/metrics", "/v1/models", "/is_paused")
    assert [call for call in engine.calls if call[0] not in reads] == [
        ("/pause?mode=wait", None),
        ("/collective_rpc", load),
        ("/reset_prefix_cache", None),
        ("/resume", None),
    ]


@pytest.mark.parametrize("kind", ["cut", "bit"])
async def test_bytes_that_are_not_the_versions_keep_the_old_one(
    service: FakeService,
    client: AsyncRatoonClient,
    root: Path,
    engine: FakeEngine,
    vllm: VllmAdapter,
    kind: str,
):
    """A cut or a flipped bit at every eleventh byte of the file, each met by a pull."""
    receiver = client.weight_receiver("p", root, vllm)
    await receiver.sync_once()
    publish(service, 2)
    for place in range(0, SIZE_BYTES, 11):

        def spoil(data: bytes, offset: int, place: int = place) -> bytes:
            at = place - offset
            if data == b"{}" or not 0 <= at < len(data):
                return data
            if kind == "cut":
                return data[:at]
            return data[:at] + bytes([data[at] ^ (1 << place % 8)]) + data[at + 1 :]

        service.tamper = spoil
        with pytest.raises(IntegrityError):
            await receiver.sync_once()
        for path in (root / ".partial").iterdir():
            path.unlink()
    assert (engine.sample(), engine.paths().count("/collective_rpc")) == (model(1), 1)
    assert (root / "latest" / FILE).read_bytes() == model(1)
    service.tamper = honest
    await receiver.sync_once()
    assert engine.sample() == model(2)


async def test_a_manifest_of_another_policy_is_refused(
    service: FakeService,
    client: AsyncRatoonClient,
    root: Path,
    engine: FakeEngine,
    vllm: VllmAdapter,
):
    receiver = client.weight_receiver("p", root, vllm)
    await receiver.sync_once()
    publish(service, 2)
    ours: Any = service._get_weight_manifest

    def other(request: Any) -> Any:
        manifest = ours(request)
        manifest.policy_id = "q"
        return manifest

    service._get_weight_manifest = other
    with pytest.raises(IntegrityError, match="asked for p version 2, got 'q'"):
        await receiver.sync_once()
    assert engine.sample() == model(1)


async def test_a_version_that_goes_during_its_pull_gives_way_to_the_newest(
    service: FakeService, client: AsyncRatoonClient, root: Path
):
    def retire(data: bytes, _: int) -> bytes:
        if service.policies["p"].weights.pop(1, None) is not None:
            publish(service, 2)
        return data

    service.tamper = retire
    received = await client.weight_receiver("p", root).sync_once()
    assert received is not None
    assert received.version == 2
    assert (root / "latest" / FILE).read_bytes() == model(2)


@pytest.mark.parametrize(("path", "times"), [("/collective_rpc", 1), ("/reset_prefix_cache", 4)])
async def test_a_load_that_fails_is_undone(
    service: FakeService,
    client: AsyncRatoonClient,
    root: Path,
    engine: FakeEngine,
    vllm: VllmAdapter,
    path: str,
    times: int,
):
    """The engine has half of the new weights then."""
    receiver = client.weight_receiver("p", root, vllm)
    await receiver.sync_once()
    publish(service, 2)
    engine.faults[path] = [500] * times
    with pytest.raises(EngineError, match=r"answered 500: .*version-1 is loaded again"):
        await receiver.sync_once()
    assert engine.sample() == model(1)
    assert (root / "latest" / FILE).read_bytes() == model(1)
    again = await receiver.sync_once()
    assert again is not None
    assert again.fetched_bytes == 0
    assert engine.sample() == model(2)
    assert engine.sampled == {model(1), model(2)}


async def test_a_first_load_that_fails_gives_back_the_engines_own_model(
    client: AsyncRatoonClient, root: Path, engine: FakeEngine, vllm: VllmAdapter
):
    engine.faults["/collective_rpc"] = [500]
    with pytest.raises(EngineError, match=f"{ROOT} is loaded again"):
        await client.weight_receiver("p", root, vllm).sync_once()
    assert engine.sample() == START


async def test_an_engine_that_takes_neither_version_stays_paused(
    service: FakeService,
    client: AsyncRatoonClient,
    root: Path,
    engine: FakeEngine,
    vllm: VllmAdapter,
):
    receiver = client.weight_receiver("p", root, vllm)
    await receiver.sync_once()
    publish(service, 2)
    engine.faults["/collective_rpc"] = [500, 500]
    with pytest.raises(EngineError, match="the engine is left paused"):
        await receiver.sync_once()
    assert engine.sample() is None
    # It has half of a version: a pause that fails does not end it.
    engine.faults["/pause?mode=wait"] = [500]
    with pytest.raises(EngineError, match="/pause"):
        await receiver.sync_once()
    assert engine.sample() is None
    await receiver.sync_once()
    assert engine.sample() == model(2)


async def test_an_engine_whose_commit_failed_gets_the_old_version_where_it_is_the_newest(
    service: FakeService,
    client: AsyncRatoonClient,
    root: Path,
    engine: FakeEngine,
    vllm: VllmAdapter,
):
    """As after a LoadCheckpoint: what was committed last is no longer what the engine has."""
    receiver = client.weight_receiver("p", root, vllm)
    await receiver.sync_once()
    publish(service, 2)
    engine.faults["/collective_rpc"] = [500, 500]
    with pytest.raises(EngineError, match="left paused"):
        await receiver.sync_once()
    publish(service, 1)
    assert await receiver.sync_once() is not None
    assert engine.sample() == model(1)


async def test_a_reset_or_resume_that_fails_at_first_is_sent_again(
    client: AsyncRatoonClient, root: Path, engine: FakeEngine, vllm: VllmAdapter
):
    engine.faults["/reset_prefix_cache"] = [503]
    engine.faults["/resume"] = [500, ConnectionError()]
    await client.weight_receiver("p", root, vllm).sync_once()
    assert engine.sample() == model(1)


@pytest.mark.parametrize("path", ["/pause?mode=wait", "/collective_rpc"])
async def test_an_engine_that_never_answers_is_given_up(
    service: FakeService,
    client: AsyncRatoonClient,
    root: Path,
    engine: FakeEngine,
    engine_url: str,
    path: str,
):
    with VllmAdapter(engine_url, drain_s=0.2, load_s=0.2, call_s=2.0) as vllm:
        receiver = client.weight_receiver("p", root, vllm)
        await receiver.sync_once()
        publish(service, 2)
        engine.faults[path] = [HangError()]
        with pytest.raises(EngineError, match=r"no answer to .*ReadTimeout"):
            await receiver.sync_once()
        assert engine.sample() == model(1)
        await receiver.sync_once()
    assert engine.sample() == model(2)


async def test_an_engine_that_dies_gets_the_version_when_it_is_back(
    client: AsyncRatoonClient, root: Path, engine: FakeEngine
):
    with serving_engine(engine) as url:
        vllm = VllmAdapter(url, call_s=2.0)
        receiver = client.weight_receiver("p", root, vllm)
        engine.faults["/collective_rpc"] = [ConnectionError(), ConnectionError()]
        with pytest.raises(EngineError, match="left paused"):
            await receiver.sync_once()
    with pytest.raises(EngineError, match="no answer to /metrics"):
        await receiver.sync_once()
    engine.start()
    with serving_engine(engine, int(url.rpartition(":")[2])), vllm:
        await receiver.sync_once()
        assert engine.sample() == model(1)


async def test_an_engine_that_restarted_gets_the_version_again(
    client: AsyncRatoonClient, root: Path, engine: FakeEngine, vllm: VllmAdapter
):
    receiver = client.weight_receiver("p", root, vllm)
    await receiver.sync_once()
    engine.start()
    again = await receiver.sync_once()
    assert again is not None
    assert (again.version, again.fetched_bytes) == (1, 0)
    assert engine.sample() == model(1)


async def test_a_receiver_that_restarted_commits_where_it_has_to(
    client: AsyncRatoonClient, root: Path, engine: FakeEngine, vllm: VllmAdapter
):
    await client.weight_receiver("p", root, vllm).sync_once()
    assert await client.weight_receiver("p", root, vllm).sync_once() is None
    # An engine whose metrics are off cannot tell.
    engine.has_metrics = False
    assert await client.weight_receiver("p", root, vllm).sync_once() is not None
    engine.has_metrics = True
    (root / COMMITTED_NAME).write_text("[]")
    assert await client.weight_receiver("p", root, vllm).sync_once() is not None


async def test_a_policy_made_anew_is_received_under_its_old_number(
    service: FakeService, client: AsyncRatoonClient, root: Path
):
    receiver = client.weight_receiver("p", root)
    await receiver.sync_once()
    service.policies["p"] = FakePolicy()
    service.publish(1, {FILE: model(9)})
    assert await receiver.sync_once() is not None
    assert (root / "latest" / FILE).read_bytes() == model(9)


async def test_refused_versions_do_not_push_out_the_served_one(
    service: FakeService,
    client: AsyncRatoonClient,
    root: Path,
    engine: FakeEngine,
    vllm: VllmAdapter,
):
    receiver = client.weight_receiver("p", root, vllm)
    await receiver.sync_once()
    for version in (2, 3, 4):
        publish(service, version)
        engine.faults["/collective_rpc"] = [500]
        with pytest.raises(EngineError, match="version-1 is loaded again"):
            await receiver.sync_once()
    assert versions(root) == {"version-1", "version-4"}
    assert engine.sample() == model(1)


def test_two_receivers_on_one_engine_are_refused(engine_url: str):
    port = engine_url.rpartition(":")[2]
    with VllmAdapter(engine_url):
        for url in (engine_url, f"http://localhost:{port}/", f"http://0.0.0.0:{port}"):
            with pytest.raises(EngineError, match="another receiver"):
                VllmAdapter(url)
        with pytest.raises(EngineError, match="another receiver"):
            SglangAdapter(engine_url)
    SglangAdapter(engine_url).close()


async def test_two_receivers_in_one_folder_are_refused(
    service: FakeService, client: AsyncRatoonClient, root: Path
):
    service.long_poll_s = WAIT_S
    events = Events()
    following = asyncio.create_task(client.weight_receiver("p", root, on_event=events).follow())
    await events.until(lambda: events.versions == [1])
    with pytest.raises(InvalidArgumentError, match="another receiver's"):
        await client.weight_receiver("p", root).sync_once()
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following
    assert await client.weight_receiver("p", root).sync_once() is None


@pytest.mark.parametrize("url", ["grpc://127.0.0.1:1", "127.0.0.1:1", "http://"])
def test_an_engine_needs_an_address(url: str):
    with pytest.raises(InvalidArgumentError, match="http://host:port"):
        VllmAdapter(url)


async def test_failures_are_told_and_the_next_version_does_not_wait(
    service: FakeService,
    client: AsyncRatoonClient,
    root: Path,
    engine: FakeEngine,
    vllm: VllmAdapter,
    monkeypatch: pytest.MonkeyPatch,
):
    """The first retry would come after a minute."""
    monkeypatch.setattr("ratoon_client.weights.receiver._FIRST_RETRY_S", 600.0)
    monkeypatch.setattr("random.uniform", lambda _, high: high)
    service.long_poll_s = WAIT_S
    events = Events()
    engine.faults["/collective_rpc"] = [500]
    following = asyncio.create_task(
        client.weight_receiver("p", root, vllm, on_event=events).follow()
    )
    await events.until(lambda: len(events.failures) == 1)
    (failure,) = events.failures
    assert (failure.policy_id, failure.version, failure.retry_s) == ("p", 1, 60.0)
    assert "answered 500" in str(failure.error)
    publish(service, 2)
    await events.until(lambda: events.versions == [2])
    assert engine.sample() == model(2)
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following


async def test_following_ends_with_its_policy(client: AsyncRatoonClient, root: Path):
    with pytest.raises(RatoonApiError, match="POLICY_NOT_FOUND"):
        await client.weight_receiver("nobody", root).follow()


async def test_a_receiver_that_ends_at_any_step_leaves_a_whole_engine(
    service: FakeService,
    client: AsyncRatoonClient,
    root: Path,
    engine: FakeEngine,
    vllm: VllmAdapter,
):
    """It is cancelled at each call that it makes, of the service or the engine, in turn."""
    loop = asyncio.get_running_loop()
    await client.weight_receiver("p", root, vllm).sync_once()
    step, version = 0, 1
    while True:
        version += 1
        publish(service, version)
        task = asyncio.create_task(client.weight_receiver("p", root, vllm).sync_once())
        num_calls = 0

        def count(*_: object, task: asyncio.Task[Any] = task, last: int = step) -> None:
            nonlocal num_calls
            if num_calls == last:
                loop.call_soon_threadsafe(task.cancel)
            num_calls += 1

        def count_chunk(data: bytes, *_: int, count: Callable[..., None] = count) -> bytes:
            count()
            return data

        engine.on_call, service.tamper = count, count_chunk
        is_done = False
        with suppress(asyncio.CancelledError):
            is_done = await task is not None
        engine.on_call, service.tamper = lambda _: None, honest
        assert engine.sample() in (model(version - 1), model(version))
        await client.weight_receiver("p", root, vllm).sync_once()
        assert engine.sample() == model(version)
        if is_done and num_calls <= step:
            break
        step += 1
    # A call of the service for each chunk, and seven of the engine.
    assert step == NUM_CHUNKS + 7
    assert engine.sampled == {model(number) for number in range(1, version + 1)}


async def test_lora_versions_have_a_name_each(
    engine: FakeEngine, vllm: VllmAdapter, tmp_path: Path
):
    def lora(version: int, policy_id: str = "p") -> WeightManifest:
        file = WeightFile(name="adapter_model.safetensors", size_bytes=0, digest="0" * 32)
        return WeightManifest(
            policy_id=policy_id,
            version=version,
            kind="adapter",
            deltas=(),
            files=(file,),
            created_at=datetime.now(UTC),
        )

    for policy_id in ("p-v1", "p"):
        for version in (1, 2):
            folder = tmp_path / f"version-{version}"
            manifest = lora(version, policy_id)
            assert await vllm.commit(folder, manifest, previous=None) == 0.0
    assert engine.loras == {
        "p-v1-v2": str(tmp_path / "version-2"),
        "p-v2": str(tmp_path / "version-2"),
    }
    # Again, as after a restart of the receiver: what was cached under the name goes too.
    await vllm.commit(tmp_path / "again", lora(2), previous=None)
    assert engine.loras["p-v2"] == str(tmp_path / "again")
    assert "/reset_prefix_cache" in engine.paths()
    assert "/pause?mode=wait" not in engine.paths()
    # One that is not taken leaves the one before it.
    engine.faults["/v1/load_lora_adapter"] = [500]
    with pytest.raises(EngineError, match="answered 500"):
        await vllm.commit(tmp_path / "bad", lora(3), previous=None)
    assert engine.loras["p-v2"] == str(tmp_path / "again")


async def test_sglang_is_told_of_the_folder_and_says_success(
    service: FakeService,
    client: AsyncRatoonClient,
    root: Path,
    engine: FakeEngine,
    sglang: SglangAdapter,
):
    receiver = client.weight_receiver("p", root, sglang)
    await receiver.sync_once()
    body = {"model_path": str(root / "version-1"), "weight_version": "1"}
    assert ("/update_weights_from_disk", body) in engine.calls
    assert await receiver.sync_once() is None
    publish(service, 2)
    engine.faults["/update_weights_from_disk"] = [400]
    with pytest.raises(EngineError, match=r"answered 400: .*version-1 is loaded again"):
        await receiver.sync_once()
    assert (engine.sample(), engine.weight_version) == (model(1), "1")
    # 200 is not enough: the body tells.
    engine.faults["/update_weights_from_disk"] = [200, 200]
    with pytest.raises(EngineError, match="what the engine serves is unknown"):
        await receiver.sync_once()
    await receiver.sync_once()
    assert engine.sample() == model(2)
    engine.start()
    await receiver.sync_once()
    assert engine.sample() == model(2)


@pytest.mark.parametrize("num_rounds", [30, pytest.param(300, marks=pytest.mark.more)])
async def test_interruptions_at_random_end_on_the_newest_version(
    service: FakeService,
    client: AsyncRatoonClient,
    root: Path,
    engine: FakeEngine,
    vllm: VllmAdapter,
    num_rounds: int,
):
    """Service, wire, engine and receiver fail at random; no half version is ever sampled with."""
    rng = random.Random(19)
    loop = asyncio.get_running_loop()
    version = 1
    num_failed = 0
    for _ in range(num_rounds):
        if rng.random() < 0.6:
            version += 1
            publish(service, version)
            service.policies["p"].weights.pop(version - 2, None)
        receiver = client.weight_receiver("p", root, vllm)
        task = asyncio.create_task(receiver.sync_once())
        at = rng.randrange(0, SIZE_BYTES)
        calls = [rng.randrange(1, 9)]
        lost = {at % CHUNK_BYTES: True}

        def spoil(
            data: bytes,
            offset: int,
            at: int = at,
            kind: int = rng.randrange(4),
            lost: dict[int, bool] = lost,
        ) -> bytes:
            here = at - offset
            if not 0 <= here < len(data) or data == b"{}":
                return data
            match kind:
                case 0:
                    return data[:here]
                case 1:
                    return data[:here] + bytes([data[here] ^ 1]) + data[here + 1 :]
                case 2 if lost.pop(here, False):
                    raise LostAnswerError
                case _:
                    return data

        def stop(_: str, task: asyncio.Task[Any] = task, calls: list[int] = calls) -> None:
            calls[0] -= 1
            if calls[0] == 0:
                loop.call_soon_threadsafe(task.cancel)

        service.tamper = spoil if rng.random() < 0.5 else honest
        engine.on_call = stop if rng.random() < 0.4 else lambda _: None
        if rng.random() < 0.3:
            engine.faults[rng.choice(LOAD_CALLS)] = [
                rng.choice([500, ConnectionError()]) for _ in range(rng.randrange(1, 3))
            ]
        if rng.random() < 0.1:
            service.faults = [Fault(name="GetWeightManifest", error=LostAnswerError())]
        if rng.random() < 0.1:
            engine.start()
        try:
            await task
        except (asyncio.CancelledError, IntegrityError, EngineError, RatoonApiError):
            num_failed += 1
        engine.sample()
    engine.on_call, service.tamper = lambda _: None, honest
    engine.faults.clear()
    await client.weight_receiver("p", root, vllm).sync_once()
    assert num_failed > num_rounds / 3
    assert engine.sample() == model(version)
    assert (root / "latest" / FILE).read_bytes() == model(version)
    assert engine.sampled <= {START, *map(model, range(1, version + 1))}


def test_the_blocking_receiver_does_the_same(
    service: FakeService, url: str, root: Path, engine: FakeEngine, vllm: VllmAdapter
):
    with RatoonClient(url, timeout_s=5.0) as client:
        receiver = client.weight_receiver("p", root, vllm)
        received = receiver.sync_once()
        assert received is not None
        assert receiver.sync_once() is None
        publish(service, 2)
        engine.faults["/collective_rpc"] = [500]
        with pytest.raises(EngineError):
            receiver.sync_once()
        assert engine.sample() == model(1)
        with pytest.raises(RatoonApiError, match="POLICY_NOT_FOUND"):
            client.weight_receiver("nobody", root).follow()


def test_a_client_that_is_closed_in_mid_load_waits_for_its_end(
    url: str, root: Path, engine: FakeEngine, vllm: VllmAdapter
):
    loading, may_end = threading.Event(), threading.Event()

    def hold(path: str) -> None:
        if path == "/collective_rpc":
            loading.set()
            may_end.wait(WAIT_S)

    engine.on_call = hold
    client = RatoonClient(url, timeout_s=5.0)
    with ThreadPoolExecutor(2) as pool:
        following = pool.submit(client.weight_receiver("p", root, vllm).follow)
        assert loading.wait(WAIT_S)
        closing = pool.submit(client.close)
        with pytest.raises(TimeoutError):
            closing.result(0.1)
        may_end.set()
        closing.result(WAIT_S)
        assert isinstance(following.exception(WAIT_S), CancelledError)
    assert engine.sample() == model(1)


def follow(url: str, *options: str) -> subprocess.Popen[str]:
    code = "from ratoon_client.cli import main; main()"
    command = [sys.executable, "-c", code, "--url", url, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_ratoonctl_loads_versions_until_it_is_told_to_end(
    service: FakeService, url: str, root: Path, engine: FakeEngine, engine_url: str
):
    service.long_poll_s = WAIT_S
    engine.faults["/collective_rpc"] = [500]
    options = ("weights", "follow", "p", "--root", str(root), "--vllm", engine_url)
    with follow(url, "--json", *options) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        lines = [json.loads(process.stdout.readline())]
        publish(service, 2)
        lines.append(json.loads(process.stdout.readline()))
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
        errors = process.stderr.read()
    assert [line["version"] for line in lines] == [1, 2]
    assert lines[0]["size_bytes"] == SIZE_BYTES + 2
    assert errors.startswith("ratoonctl: version 1: ")
    assert "answered 500" in errors
    assert errors.count("\n") == 1
    assert engine.sample() == model(2)


def test_ratoonctl_follows_into_a_folder(service: FakeService, url: str, root: Path):
    service.long_poll_s = WAIT_S
    with follow(url, "weights", "follow", "p", "--root", str(root)) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0
    pattern = r"version 1  (\d+) bytes  fetched \1 in \S+ s  verified in \S+ s  paused 0\.00 s\n"
    assert re.fullmatch(pattern, line)
    assert (root / "latest" / FILE).read_bytes() == model(1)
