"""Two hundred callers at once: latency of control calls, growth of memory and descriptors.

Every call is judged as in a fault run. Memory is the summed PSS of all processes of the service.
Latencies are as callers see them, of the time in which few other programs computed beside.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from harness.service import Service
from ratoon_client import AsyncRatoonClient
from tests.faults.judge.calls import Call, Kind
from tests.faults.judge.history import Notes, Verdict
from tests.faults.venues.clients import PATIENCE_S, Player
from tests.faults.venues.live import MODEL, judge_player

NUM_CLIENTS = 200
MAX_P99_S = 0.5
# While other programs take more of the machine's CPU time, and for one sample after, latencies are
# theirs.
MAX_OTHERS = 0.25
MAX_PSS_GROWTH = 0.05
MAX_MORE_DESCRIPTORS = 5
# Between two calls of one client.
PAUSE_S = (15.0, 35.0)
_WARM_S = 20.0
_SAMPLE_S = 5.0
_POLICY = "load"


@dataclass
class LoadResult:
    """Growth: the mean of the last third of the time over, or less, that of the middle third."""

    operations: int = 0
    seconds: float = 0.0
    control_calls: int = 0
    # Percentiles within the quiet time, and the quiet share of all time.
    p50_s: float = 0.0
    p99_s: float = 0.0
    quiet: float = 1.0
    pss_growth: float = 0.0
    more_descriptors: float = 0.0
    verdict: Verdict = field(default_factory=Verdict)

    @property
    def is_flat(self) -> bool:
        """What falls is no leak, and a machine that is busy otherwise is not slow answers."""
        return (
            self.p99_s < MAX_P99_S
            and self.pss_growth <= MAX_PSS_GROWTH
            and self.more_descriptors <= MAX_MORE_DESCRIPTORS
        )


class _Load:
    """The callers' common notes, and what was measured."""

    def __init__(self, seed: int) -> None:
        self.notes = Notes()
        self.numbers: Iterator[int] = itertools.count(1)
        # Time, and seconds until the answer.
        self.latencies: list[tuple[float, float]] = []
        # Time, PSS in bytes, descriptors.
        self.samples: list[tuple[float, int, int]] = []
        # Time, CPU seconds of the whole machine, and of the service and its callers.
        self.cpu: list[tuple[float, float, float]] = []
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
    gc.freeze()  # The callers' own pauses are not the service's.
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
        folder = service.root / "models" / MODEL
        players = [
            Player(c, _POLICY, seed, folder, has_seqs=False, notes=load.notes) for c in clients
        ]
        deadline = time.monotonic() + _WARM_S + seconds
        watching = asyncio.create_task(_watch(service, load, deadline))
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
            load.latencies.append((begin, time.monotonic() - begin))


async def _watch(service: Service, load: _Load, deadline: float) -> None:
    """Memory and descriptors, once the service has warmed up."""
    await asyncio.sleep(_WARM_S)
    while time.monotonic() < deadline:
        pss_bytes, descriptors = await asyncio.to_thread(_usage, service)
        load.samples.append((time.monotonic(), pss_bytes, descriptors))
        load.cpu.append((time.monotonic(), *await asyncio.to_thread(_cpu_seconds, service)))
        await asyncio.sleep(_SAMPLE_S)


def _usage(service: Service) -> tuple[int, int]:
    """PSS in bytes; descriptors but for those of the callers' connections, which come and go."""
    callers = psutil.Process().net_connections("tcp")
    pss_bytes = 0
    descriptors = -sum(one.status == psutil.CONN_ESTABLISHED for one in callers)
    for process in service.processes():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            pss_bytes += process.memory_full_info().pss
            descriptors += process.num_fds()
    return pss_bytes, descriptors


def _cpu_seconds(service: Service) -> tuple[float, float]:
    """CPU seconds of the whole machine since it started, and of the service and this process since
    they did."""
    ours = 0.0
    for process in [psutil.Process(), *service.processes()]:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            times = process.cpu_times()
            ours += times.user + times.system
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0), ours


def quiet_latencies(
    latencies: Sequence[tuple[float, float]],
    cpu: Sequence[tuple[float, float, float]],
    num_cpus: int,
) -> tuple[list[float], float]:
    """Latencies of the quiet time, and its share of all, between the samples of `cpu`."""
    times, everything, ours = np.array(cpu).T
    lengths = np.diff(times)
    is_busy = (np.diff(everything) - np.diff(ours)) / (num_cpus * lengths) > MAX_OTHERS
    is_quiet = ~is_busy
    is_quiet[1:] &= ~is_busy[:-1]
    quiet = [
        seconds
        for begin, seconds in latencies
        if times[0] <= begin < times[-1] and is_quiet[np.searchsorted(times, begin, "right") - 1]
    ]
    return quiet, float(lengths[is_quiet].sum() / lengths.sum())


def _summary(load: _Load, seconds: float) -> LoadResult:
    samples = np.array(load.samples)
    third = len(samples) // 3
    middle, last = samples[third : 2 * third].mean(0), samples[2 * third :].mean(0)
    quiet, share = quiet_latencies(load.latencies, load.cpu, psutil.cpu_count() or 1)
    p50_s, p99_s = np.percentile(quiet, (50, 99)).tolist() if quiet else (0.0, 0.0)
    return LoadResult(
        operations=len(load.notes.told),
        seconds=seconds,
        control_calls=len(load.latencies),
        p50_s=round(p50_s, 4),
        p99_s=round(p99_s, 4),
        quiet=round(share, 3),
        pss_growth=round(float(last[1] / middle[1] - 1), 4),
        more_descriptors=round(float(last[2] - middle[2]), 2),
    )
