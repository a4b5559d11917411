"""Two hundred callers at once: latency of control calls, growth of memory and descriptors.

Every call is judged as in a fault run. Memory is the summed PSS of all processes of the service.
Latencies are as callers see them, including the lag of their own event loop, which is measured and
reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from harness.service import Service
from ratoon.garbage import freeze_garbage
from ratoon_client import AsyncRatoonClient
from tests.faults.judge.calls import Call, Kind
from tests.faults.judge.history import Notes, Verdict
from tests.faults.venues.clients import PATIENCE_S, Player
from tests.faults.venues.live import MODEL, judge_player

NUM_CLIENTS = 200
MAX_P99_S = 0.5
# Event loops that an answer passes, there and back; on a busy machine each is as late as ours.
_NUM_LOOPS = 10
MAX_PSS_GROWTH = 0.05
MAX_MORE_DESCRIPTORS = 5
# Between two calls of one client.
PAUSE_S = (15.0, 35.0)
_WARM_S = 20.0
_SAMPLE_S = 5.0
_LOOK_S = 0.02
_POLICY = "load"


@dataclass
class LoadResult:
    """Growth: the mean of the last third of the time over, or less, that of the middle third."""

    operations: int = 0
    seconds: float = 0.0
    control_calls: int = 0
    p50_s: float = 0.0
    p99_s: float = 0.0
    # How late the callers' own event loop was.
    callers_late_p99_s: float = 0.0
    callers_late_max_s: float = 0.0
    pss_growth: float = 0.0
    more_descriptors: float = 0.0
    verdict: Verdict = field(default_factory=Verdict)

    @property
    def is_flat(self) -> bool:
        """What falls is no leak, and a machine that is busy otherwise is not slow answers."""
        return (
            self.p99_s < MAX_P99_S + self.callers_late_p99_s * _NUM_LOOPS
            and self.pss_growth <= MAX_PSS_GROWTH
            and self.more_descriptors <= MAX_MORE_DESCRIPTORS
        )


class _Load:
    """The callers' common notes, and what was measured."""

    def __init__(self, seed: int) -> None:
        self.notes = Notes()
        self.numbers: Iterator[int] = itertools.count(1)
        self.latencies: list[float] = []
        self.late: list[float] = []
        # Time, PSS in bytes, descriptors.
        self.samples: list[tuple[float, int, int]] = []
        self.rng = random.Random(seed)


def run_load(model_folder: Path, seed: int, seconds: float) -> LoadResult:
    """One service under load for `seconds` after it has warmed up."""
    with tempfile.TemporaryDirectory(prefix="rt-load-", dir="/tmp") as folder:
        root = Path(folder)
        shutil.copytree(model_folder, root / "models" / MODEL)
        with Service(root) as service:
            return asyncio.run(_run(service, seed, seconds))


async def _run(service: Service, seed: int, seconds: float) -> LoadResult:
    load = _Load(seed)
    freeze_garbage()  # The callers' own pauses are not the service's.
    clients = [
        AsyncRatoonClient(
            service.http if index % 4 == 0 else service.grpc,
            timeout_s=PATIENCE_S,
            attempt_timeout_s=30.0,
        )
        for index in range(NUM_CLIENTS)
    ]
    async with contextlib.AsyncExitStack() as stack:
        for client in clients:
            await stack.enter_async_context(client)
        creation = await clients[0].create_policy(
            _POLICY, model_folder=MODEL, sequencing="server", micro_batch_tokens=64
        )
        await creation.result()
        players = [Player(c, _POLICY, seed, has_seqs=False, notes=load.notes) for c in clients]
        deadline = time.monotonic() + _WARM_S + seconds
        watching = asyncio.gather(_watch(service, load, deadline), _look_at_loop(load, deadline))
        callers = [_calls(load, p, c, deadline) for p, c in zip(players, clients, strict=True)]
        await asyncio.gather(*callers)
        await watching
        final = Call(number=1 << 30, kind=Kind.SAVE_CHECKPOINT, checkpoint_id="final")
        await players[0].play([final])
    result = _summary(load, seconds)
    result.verdict = judge_player(service, players[0])
    return result


async def _calls(load: _Load, player: Player, client: AsyncRatoonClient, deadline: float) -> None:
    await client.get_policy(_POLICY)  # Its connection is no growth.
    await asyncio.sleep(load.rng.uniform(0.0, PAUSE_S[1]))
    while time.monotonic() < deadline:
        call = Call(
            number=next(load.numbers),
            kind=Kind.FORWARD if load.rng.random() < 0.2 else Kind.UPDATE,
            num_groups=load.rng.choice((1, 1, 2, 4, 16)),
        )
        playing = asyncio.create_task(player.play([call]))
        while not playing.done():
            await _ask(load, call, client)
            await asyncio.wait([playing], timeout=1.0)
        await _ask(load, call, client)
        pause_s = load.rng.uniform(*PAUSE_S)
        await asyncio.sleep(min(pause_s, max(deadline - time.monotonic(), 0.0)))


async def _ask(load: _Load, call: Call, client: AsyncRatoonClient) -> None:
    """How the call's operation stands, without waiting for it to end."""
    for name in load.notes.operations.get(call.number, ()):
        begin = time.monotonic()
        await client.get_operation(name)
        if load.samples:
            load.latencies.append(time.monotonic() - begin)


async def _watch(service: Service, load: _Load, deadline: float) -> None:
    """Memory and descriptors, once the service has warmed up."""
    await asyncio.sleep(_WARM_S)
    while time.monotonic() < deadline:
        pss_bytes, descriptors = await asyncio.to_thread(_usage, service)
        load.samples.append((time.monotonic(), pss_bytes, descriptors))
        await asyncio.sleep(_SAMPLE_S)


async def _look_at_loop(load: _Load, deadline: float) -> None:
    """How much later than it asked for this coroutine goes on."""
    while time.monotonic() < deadline:
        begin = time.monotonic()
        await asyncio.sleep(_LOOK_S)
        if load.samples:
            load.late.append(time.monotonic() - begin - _LOOK_S)


def _usage(service: Service) -> tuple[int, int]:
    pss_bytes, descriptors = 0, 0
    for process in service.processes():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            pss_bytes += process.memory_full_info().pss
            descriptors += process.num_fds()
    return pss_bytes, descriptors


def _summary(load: _Load, seconds: float) -> LoadResult:
    samples = np.array(load.samples)
    third = len(samples) // 3
    middle, last = samples[third : 2 * third].mean(0), samples[2 * third :].mean(0)
    return LoadResult(
        operations=len(load.notes.told),
        seconds=seconds,
        control_calls=len(load.latencies),
        p50_s=round(float(np.percentile(load.latencies, 50)), 4),
        p99_s=round(float(np.percentile(load.latencies, 99)), 4),
        callers_late_p99_s=round(float(np.percentile(load.late, 99)), 4),
        callers_late_max_s=round(max(load.late), 4),
        pss_growth=round(float(last[1] / middle[1] - 1), 4),
        more_descriptors=round(float(last[2] - middle[2]), 2),
    )
