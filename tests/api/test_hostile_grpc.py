"""Callers that have the gateway keep what they send, or work for it: others notice neither."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator

import grpc.aio
import pytest

from harness.attacks.floods import FLOODS
from harness.attacks.http2 import PREFACE, SETTINGS, frame, withheld_messages
from ratoon.edge.budget import EdgeBounds
from ratoon.edge.h2_frames import MAX_COST
from ratoon_proto.v1 import service_pb2
from ratoon_proto.v1.service_pb2_grpc import PolicyServiceStub
from tests.api.served_process import MIB, ServedProcess, served_process

MOST_GROWTH = 64 * MIB


# A frame of a call's headers, of its message, and of neither.
_FRAMES_OF_ALL_KINDS = ("continuation", "empty_data", "settings")
# What is sent in this time is several times what may be kept.
_ATTACK_S = 1.0


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    """With keys. Its tests leave nothing behind: those that watch its memory want no growth."""
    with served_process(tmp_path_factory.mktemp("keys"), auth={"required": True}) as process:
        yield process


@pytest.fixture(scope="module")
def open_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    """For every process of this machine. The test that lets it grow is the last."""
    with served_process(tmp_path_factory.mktemp("open")) as process:
        yield process


async def _growth(process: ServedProcess, rpcs: list[str], num_streams: int, size: int) -> int:
    """Largest growth of resident memory while one connection withholds a byte of each message."""
    before = most = process.resident_bytes()
    attack = asyncio.create_task(
        withheld_messages(
            process.address,
            rpcs=rpcs,
            num_streams=num_streams,
            message_bytes=size,
            seconds=_ATTACK_S,
        )
    )
    async with grpc.aio.insecure_channel(f"127.0.0.1:{process.port}") as channel:
        stub = PolicyServiceStub(channel)
        while not attack.done():
            most = max(most, process.resident_bytes())
            answer = await stub.Health(service_pb2.HealthRequest(), timeout=5.0)
            assert answer.status == "ok"
            await asyncio.sleep(0.1)
    assert (await attack).num_calls >= num_streams
    return most - before


async def test_health_does_not_read_a_message(gateway: ServedProcess) -> None:
    """64 streams of 16 MiB, each without its last byte, were 500 MiB of the gateway."""
    assert await _growth(gateway, ["Health"], 64, 16 * MIB) < MOST_GROWTH


async def test_a_call_without_a_key_is_not_read(gateway: ServedProcess) -> None:
    rpcs = ["Update", "UploadPart", "GetOperation", "WatchOperation", "FetchWeights"]
    assert await _growth(gateway, rpcs, 64, 16 * MIB) < MOST_GROWTH


async def test_a_call_without_a_batch_is_not_read_beyond_64_kib(
    open_gateway: ServedProcess,
) -> None:
    rpcs = ["GetOperation", "WatchOperation", "OptimStep", "FetchWeights", "CreatePolicy"]
    assert await _growth(open_gateway, rpcs, 64, 16 * MIB) < MOST_GROWTH


async def test_a_length_that_no_message_may_have_is_refused_unread(
    open_gateway: ServedProcess,
) -> None:
    """gRPC's own limit is looked at when the message is whole: 3 GiB were awaited."""
    sent = await withheld_messages(
        open_gateway.address,
        rpcs=["Update"],
        num_streams=4,
        message_bytes=3 * 1024 * MIB,
        seconds=_ATTACK_S,
    )
    assert sent.num_ended >= 4
    assert sent.num_bytes < 4 * MIB + 64 * 1024 * sent.num_calls


async def test_batches_that_do_not_end_share_a_budget(open_gateway: ServedProcess) -> None:
    """One caller's half of it, in gRPC's buffers: 64 calls of 16 MiB were a GiB."""
    growth = await _growth(open_gateway, ["Update", "UploadPart", "Forward"], 64, 16 * MIB)
    assert growth < EdgeBounds().held_bytes // 2 + MOST_GROWTH


async def _health_s(
    process: ServedProcess, name: str, *, num_connections: int
) -> tuple[list[float], list[float]]:
    """Seconds of Health during half a second of a flood of its own address, and after it."""
    during: list[float] = []
    after: list[float] = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{process.port}") as channel:
        stub = PolicyServiceStub(channel)

        async def ask(into: list[float]) -> None:
            begin = time.monotonic()
            assert (await stub.Health(service_pb2.HealthRequest(), timeout=60)).status == "ok"
            into.append(time.monotonic() - begin)
            await asyncio.sleep(0.04)

        await ask([])
        flood = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "harness.attacks.floods", name, "--port", str(process.port),
            "--seconds", "0.5", "--connections", str(num_connections),
        )  # fmt: skip
        ending = asyncio.create_task(flood.wait())
        while not ending.done():
            await ask(during)
        assert await ending == 0
        rests_until = time.monotonic() + 0.5
        while time.monotonic() < rests_until:
            await ask([])
        for _ in range(8):
            await ask(after)
    return during, after


@pytest.mark.parametrize(
    ("name", "num_connections"),
    [
        *(("calls", 1), ("resets", 8)),
        *(pytest.param(*row, marks=pytest.mark.more) for row in (("resets", 1), ("calls", 8))),
        *((name, 8) for name in _FRAMES_OF_ALL_KINDS),
        # Alike for the gateway: frames of a connection, of no call.
        *(
            pytest.param(name, 8, marks=pytest.mark.more)
            for name in sorted({*FLOODS} - {"resets", "calls", *_FRAMES_OF_ALL_KINDS})
        ),
    ],
)
async def test_a_flood_does_not_hold_up_another_connection_of_its_address(
    gateway: ServedProcess, name: str, num_connections: int
) -> None:
    """A second of calls that were reset at once made a Health of the same address take 8 s."""
    during, after = await _health_s(gateway, name, num_connections=num_connections)
    assert len(during) >= 3
    # Most of it for other processes of the machine: benchmarks/service/hostile_callers measures.
    assert max(during) < 2.0
    assert max(after) < 1.0


@pytest.mark.parametrize("name", sorted(set(FLOODS) - {"calls"}))
async def test_a_connection_that_is_a_flood_is_closed_and_told_why(
    gateway: ServedProcess, name: str
) -> None:
    """Frames without end were forwarded without end, each for four microseconds of the loop."""
    reader, writer = await asyncio.open_connection(*gateway.address)
    first, frames_of = FLOODS[name]
    num_frames = 200 if name == "resets" else int(MAX_COST) + 100
    writer.write(PREFACE + frame(SETTINGS, 0, 0, b"") + first)
    writer.write(b"".join(frames_of(number) for number in range(num_frames)))
    answered = b""
    async with asyncio.timeout(10):
        with contextlib.suppress(ConnectionResetError):
            while data := await reader.read(MIB):
                answered += data
    writer.close()
    # gRPC counts pings itself, and closes with bytes unread, which resets the connection.
    assert b"that bring nothing" in answered or name == "ping"
