"""Answers on the wire: chunks of files, and the throttle of watched operations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import xxhash

from ratoon.api.answers import FileChunk, throttled
from ratoon.engine.types import Operation
from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.types import EmptyResult, OperationKind, OperationState, Progress
from ratoon_proto.v1 import service_pb2


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 2**21 - 1, 2**21, 16 * 2**20])
async def test_a_reader_finds_the_message(size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    chunk = await FileChunk.of(data[:size])
    expected = service_pb2.FetchWeightsResponse(
        data=data[:size], digest=xxhash.xxh3_128_hexdigest(data[:size])
    )
    sent = chunk.SerializeToString()
    assert service_pb2.FetchWeightsResponse.FromString(sent) == expected
    assert len(sent) <= len(expected.SerializeToString()) + 2


def test_no_field_is_left_out() -> None:
    """A field that the message gets has to be sent by `FileChunk` too."""
    fields = service_pb2.FetchWeightsResponse.DESCRIPTOR.fields_by_name
    assert set(fields) == {"data", "digest"}


RUNNING = Operation(
    operation_id="op-1",
    policy_id="p",
    kind=OperationKind.UPDATE,
    seq=1,
    request_id="",
    state=OperationState.RUNNING,
    blocked_by_seq=0,
    progress=Progress(),
    created_at=0.0,
    started_at=0.0,
    finished_at=None,
    result=None,
)
DONE = replace(RUNNING, state=OperationState.DONE, finished_at=1.0, result=EmptyResult())


def _at(done: int) -> Operation:
    return replace(RUNNING, progress=Progress(micro_batches_done=done))


async def _burst(count: int) -> AsyncIterator[Operation]:
    for done in range(count):
        yield _at(done)
        if done % 100 == 0:
            await asyncio.sleep(0)
    yield DONE


async def test_a_burst_of_changes_is_a_few_messages() -> None:
    """Trap 16: a stream without back-pressure must not be fed every change."""
    start = time.monotonic()
    seen = [operation async for operation in throttled(_burst(10_000), interval_s=0.05)]
    intervals = (time.monotonic() - start) / 0.05
    assert seen[-1] == DONE
    assert 2 <= len(seen) <= intervals + 2
    done = [operation.progress.micro_batches_done for operation in seen[:-1]]
    assert done == sorted(set(done))


async def test_a_slow_reader_gets_the_newest() -> None:
    """Trap 16: what waits for a slow reader is one value."""
    all_pulled = asyncio.Event()

    async def changes() -> AsyncIterator[Operation]:
        for done in range(50):
            yield _at(done)
            await asyncio.sleep(0.001)
        all_pulled.set()
        yield DONE

    seen: list[Operation] = []
    async for operation in throttled(changes(), interval_s=0.0):
        seen.append(operation)
        if len(seen) == 1:
            await all_pulled.wait()
            await asyncio.sleep(0.01)
    assert seen == [_at(0), DONE]


async def test_a_failure_comes_after_the_last_value() -> None:
    async def changes() -> AsyncIterator[Operation]:
        yield _at(3)
        raise RatoonError(ErrorCode.UNAVAILABLE, "gone")

    stream = throttled(changes(), interval_s=0.01)
    assert await anext(stream) == _at(3)
    with pytest.raises(RatoonError, match="gone"):
        await anext(stream)


async def test_leaving_ends_the_source() -> None:
    has_ended = asyncio.Event()

    async def changes() -> AsyncIterator[Operation]:
        try:
            while True:
                yield _at(0)
                await asyncio.sleep(10)
        finally:
            has_ended.set()

    stream = throttled(changes(), interval_s=0.01)
    await anext(stream)
    await stream.aclose()
    await asyncio.wait_for(has_ended.wait(), 1)
