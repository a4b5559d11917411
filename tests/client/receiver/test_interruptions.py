"""Bytes that went bad and calls that end midway: an engine never samples with half a version."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ratoon_client import (
    EngineError,
    IntegrityError,
    RatoonApiError,
    RatoonClient,
    VllmAdapter,
)
from tests.client.fake_engine import FILE, START, FakeEngine
from tests.client.fake_service import CHUNK_BYTES, Fault, LostAnswerError
from tests.client.receiver.conftest import (
    NUM_CHUNKS,
    SIZE_BYTES,
    WAIT_S,
    Rig,
    honest,
    model,
)

LOAD_CALLS = ("/pause?mode=wait", "/collective_rpc", "/reset_prefix_cache", "/resume")


@pytest.mark.parametrize("kind", ["cut", "bit"])
async def test_bytes_that_are_not_the_versions_keep_the_old_one(rig: Rig, kind: str):
    """A cut or a flipped bit at every eleventh byte of the file, each met by a pull."""
    receiver = rig.receiver()
    await receiver.sync_once()
    rig.publish(2)
    for place in range(0, SIZE_BYTES, 11):

        def spoil(data: bytes, offset: int, place: int = place) -> bytes:
            at = place - offset
            if data == b"{}" or not 0 <= at < len(data):
                return data
            if kind == "cut":
                return data[:at]
            return data[:at] + bytes([data[at] ^ (1 << place % 8)]) + data[at + 1 :]

        rig.service.tamper = spoil
        with pytest.raises(IntegrityError):
            await receiver.sync_once()
        for path in (rig.root / ".partial").iterdir():
            path.unlink()
    assert (rig.engine.sample(), rig.engine.paths().count("/collective_rpc")) == (model(1), 1)
    assert (rig.root / "latest" / FILE).read_bytes() == model(1)
    rig.service.tamper = honest
    await receiver.sync_once()
    assert rig.engine.sample() == model(2)


async def test_a_receiver_that_ends_at_any_step_leaves_a_whole_engine(rig: Rig):
    """It is cancelled at each call that it makes, of the service or the engine, in turn."""
    loop = asyncio.get_running_loop()
    await rig.receiver().sync_once()
    step, version = 0, 1
    while True:
        version += 1
        rig.publish(version)
        task = asyncio.create_task(rig.receiver().sync_once())
        num_calls = 0

        def count(*_: object, task: asyncio.Task[Any] = task, last: int = step) -> None:
            nonlocal num_calls
            if num_calls == last:
                loop.call_soon_threadsafe(task.cancel)
            num_calls += 1

        def count_chunk(data: bytes, *_: int, count: Callable[..., None] = count) -> bytes:
            count()
            return data

        rig.engine.on_call, rig.service.tamper = count, count_chunk
        is_done = False
        with suppress(asyncio.CancelledError):
            is_done = await task is not None
        rig.engine.on_call, rig.service.tamper = lambda _: None, honest
        assert rig.engine.sample() in (model(version - 1), model(version))
        await rig.receiver().sync_once()
        assert rig.engine.sample() == model(version)
        if is_done and num_calls <= step:
            break
        step += 1
    # A call of the service for each chunk, and seven of the engine.
    assert step == NUM_CHUNKS + 7
    assert rig.engine.sampled == {model(number) for number in range(1, version + 1)}


@pytest.mark.parametrize("num_rounds", [30, pytest.param(300, marks=pytest.mark.more)])
async def test_interruptions_at_random_end_on_the_newest_version(rig: Rig, num_rounds: int):
    """Service, wire, engine and receiver fail at random; no half version is ever sampled with."""
    rng = random.Random(19)
    loop = asyncio.get_running_loop()
    version = 1
    num_failed = 0
    for _ in range(num_rounds):
        if rng.random() < 0.6:
            version += 1
            rig.publish(version)
            rig.service.policies["p"].weights.pop(version - 2, None)
        receiver = rig.receiver()
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

        rig.service.tamper = spoil if rng.random() < 0.5 else honest
        rig.engine.on_call = stop if rng.random() < 0.4 else lambda _: None
        if rng.random() < 0.3:
            rig.engine.faults[rng.choice(LOAD_CALLS)] = [
                rng.choice([500, ConnectionError()]) for _ in range(rng.randrange(1, 3))
            ]
        if rng.random() < 0.1:
            rig.service.faults = [Fault(name="GetWeightManifest", error=LostAnswerError())]
        if rng.random() < 0.1:
            rig.engine.start()
        try:
            await task
        except (asyncio.CancelledError, IntegrityError, EngineError, RatoonApiError):
            num_failed += 1
        rig.engine.sample()
    rig.engine.on_call, rig.service.tamper = lambda _: None, honest
    rig.engine.faults.clear()
    await rig.receiver().sync_once()
    assert num_failed > num_rounds / 3
    assert rig.engine.sample() == model(version)
    assert (rig.root / "latest" / FILE).read_bytes() == model(version)
    assert rig.engine.sampled <= {START, *map(model, range(1, version + 1))}


def test_a_client_that_is_closed_in_mid_load_waits_for_its_end(
    url: str, root: Path, engine: FakeEngine, vllm: VllmAdapter
):
    loading, may_end = threading.Event(), threading.Event()

    def hold(path: str) -> None:
        if path == "/collective_rpc":
            loading.set()
            may_end.wait(WAIT_S)

    engine.on_call = hold
    client = RatoonClient(url, timeout_s=WAIT_S)
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
