"""What a receiver fetches, keeps and tells, with an engine or without."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import Callable
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
    VllmAdapter,
)
from tests.client.conftest import versions
from tests.client.fake_engine import FILE, FakeEngine
from tests.client.fake_service import FakePolicy, FakeService, Fault, RefusalError
from tests.client.receiver.conftest import SIZE_BYTES, WAIT_S, Rig, follow, model, publish


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


async def test_a_folder_follows_the_newest_version(rig: Rig):
    receiver = rig.mirror()
    first = await receiver.sync_once()
    assert first is not None
    assert (first.version, first.size_bytes) == (1, SIZE_BYTES + 2)
    assert first.fetched_bytes == SIZE_BYTES + 2
    assert first.fetch_s > 0
    assert first.verify_s > 0
    assert await receiver.sync_once() is None
    for version in (2, 3, 4):
        rig.publish(version)
    second = await receiver.sync_once()
    assert second is not None
    # config.json is linked, versions in between are not fetched.
    assert (second.version, second.fetched_bytes) == (4, SIZE_BYTES)
    assert (rig.root / "latest" / FILE).read_bytes() == model(4)
    rig.publish(5)
    await receiver.sync_once()
    assert versions(rig.root) == {"version-4", "version-5"}
    rig.publish(6)
    await rig.client.weight_receiver("p", rig.root, keep=3).sync_once()
    assert versions(rig.root) == {"version-4", "version-5", "version-6"}
    with pytest.raises(InvalidArgumentError, match="2 or more"):
        rig.client.weight_receiver("p", rig.root, keep=1)


async def test_the_service_hears_what_is_served_and_what_is_fetched(rig: Rig):
    def said() -> list[tuple[int | None, int | None]]:
        acks, rig.service.acks = rig.service.acks, []
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

    await rig.mirror().sync_once()
    assert said() == [(None, 1), (1, None)]
    rig.publish(2)
    await rig.client.weight_receiver("p", rig.root, receiver_id="mine").sync_once()
    assert said() == [(1, 2), (2, None)]


async def test_a_version_is_served_where_the_service_hears_nothing(rig: Rig):
    error = RefusalError("RESOURCE_EXHAUSTED", field="holds_version")
    rig.service.faults = [Fault(name="AckWeights", error=error) for _ in range(2)]
    received = await rig.mirror().sync_once()
    assert received is not None
    assert rig.service.faults == []


async def test_a_receiver_waits_for_a_version(rig: Rig):
    rig.service.long_poll_s = WAIT_S
    receiver = rig.mirror()
    await receiver.sync_once()
    waiting = asyncio.create_task(receiver.sync_once(WAIT_S))
    rig.publish(2)
    received = await waiting
    assert received is not None
    assert received.version == 2


async def test_nothing_is_received_where_nothing_is_published(rig: Rig):
    rig.service.policies["p"] = FakePolicy()
    assert await rig.mirror().sync_once() is None


async def test_a_manifest_of_another_policy_is_refused(rig: Rig):
    receiver = rig.receiver()
    await receiver.sync_once()
    rig.publish(2)
    ours: Any = rig.service._get_weight_manifest

    def other(request: Any) -> Any:
        manifest = ours(request)
        manifest.policy_id = "q"
        return manifest

    rig.service._get_weight_manifest = other
    with pytest.raises(IntegrityError, match="asked for p version 2, got 'q'"):
        await receiver.sync_once()
    assert rig.engine.sample() == model(1)


async def test_a_version_that_goes_during_its_pull_gives_way_to_the_newest(rig: Rig):
    def retire(data: bytes, _: int) -> bytes:
        if rig.service.policies["p"].weights.pop(1, None) is not None:
            rig.publish(2)
        return data

    rig.service.tamper = retire
    received = await rig.mirror().sync_once()
    assert received is not None
    assert received.version == 2
    assert (rig.root / "latest" / FILE).read_bytes() == model(2)


async def test_a_policy_made_anew_is_received_under_its_old_number(rig: Rig):
    receiver = rig.mirror()
    await receiver.sync_once()
    rig.service.policies["p"] = FakePolicy()
    rig.service.publish(1, {FILE: model(9)})
    assert await receiver.sync_once() is not None
    assert (rig.root / "latest" / FILE).read_bytes() == model(9)


async def test_two_receivers_in_one_folder_are_refused(rig: Rig):
    rig.service.long_poll_s = WAIT_S
    events = Events()
    following = asyncio.create_task(
        rig.client.weight_receiver("p", rig.root, on_event=events).follow()
    )
    await events.until(lambda: events.versions == [1])
    with pytest.raises(InvalidArgumentError, match="another receiver's"):
        await rig.mirror().sync_once()
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following
    assert await rig.mirror().sync_once() is None


async def test_failures_are_told_and_the_next_version_does_not_wait(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    """The first retry would come after a minute."""
    monkeypatch.setattr("ratoon_client.weights.receiver._FIRST_RETRY_S", 600.0)
    monkeypatch.setattr("random.uniform", lambda _, high: high)
    rig.service.long_poll_s = WAIT_S
    events = Events()
    rig.engine.faults["/collective_rpc"] = [500]
    following = asyncio.create_task(
        rig.client.weight_receiver("p", rig.root, rig.vllm, on_event=events).follow()
    )
    await events.until(lambda: len(events.failures) == 1)
    (failure,) = events.failures
    assert (failure.policy_id, failure.version, failure.retry_s) == ("p", 1, 60.0)
    assert "answered 500" in str(failure.error)
    rig.publish(2)
    await events.until(lambda: events.versions == [2])
    assert rig.engine.sample() == model(2)
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following


async def test_following_goes_on_where_the_service_has_no_room(rig: Rig):
    """As for the copy that is published: a call ends with that, but room may come."""
    refused = RefusalError("RESOURCE_EXHAUSTED", retryable=True)
    rig.service.faults = [Fault(name="GetWeightManifest", error=refused)]
    events = Events()
    following = asyncio.create_task(
        rig.client.weight_receiver("p", rig.root, on_event=events).follow()
    )
    await events.until(lambda: events.versions == [1])
    assert len(events.failures) == 1
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following


async def test_following_ends_with_its_policy(client: AsyncRatoonClient, root: Path):
    with pytest.raises(RatoonApiError, match="POLICY_NOT_FOUND"):
        await client.weight_receiver("nobody", root).follow()


def test_the_blocking_receiver_does_the_same(
    service: FakeService, url: str, root: Path, engine: FakeEngine, vllm: VllmAdapter
):
    with RatoonClient(url, timeout_s=WAIT_S) as client:
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
