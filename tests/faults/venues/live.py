"""A fault run on the real service: two policies, callers of both edges, kills of every process.

One of the policies has two ranks. After each kill both policies complete a whole segment before
the next one.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from harness.service import Service
from ratoon.engine.crash_points import CrashPoint
from ratoon.engine.files.paths import policy_paths
from ratoon.engine.types import PolicySpec
from ratoon.train.spec import TrainerSpec
from ratoon_client import AsyncRatoonClient, Parallel
from tests.faults.judge.history import Notes, Verdict, read_journal, read_policy
from tests.faults.judge.oracle import Oracle, judge
from tests.faults.venues.clients import PATIENCE_S, Player
from tests.train.rank_runs import ranked

POINTS = tuple(point for point in CrashPoint if point.startswith(("ingress-", "rank-")))
# Processes that come back by themselves.
ROLES = ("worker", "rank", "engine", "replica", "proxy", "gateway")
# Ray's own: the service ends with each of them, and whoever watches over it starts it anew.
RAY_ROLES = ("raylet", "head")
EVENTS = (*ROLES, *POINTS, "outage", "service", *RAY_ROLES)
OUTAGE_S = 12.0
MODEL = "tiny-model"


@dataclass
class LiveResult:
    """`seconds`: from each kill until both policies had gone on, by what was killed."""

    kills: int = 0
    points: set[str] = field(default_factory=set[str])
    outages: int = 0
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    operations: int = 0
    verdict: Verdict = field(default_factory=Verdict)


class LiveRun:
    """A service, the players of its two policies and what happens to them."""

    def __init__(self, service: Service, players: tuple[Player, ...], seed: int) -> None:
        self.service, self.players = service, players
        self.result = LiveResult()
        self._rng = random.Random(seed)

    async def run(self, rounds: int, only: Collection[str]) -> None:
        stop = asyncio.Event()
        playing = [asyncio.create_task(player.play_until(stop)) for player in self.players]
        try:
            await self._segment()
            for name in [name for name in EVENTS if not only or name in only] * rounds:
                await asyncio.sleep(self._rng.uniform(0.0, 0.5))
                begin = time.monotonic()
                await self._event(name)()
                await self._segment()
                self.result.seconds[name] = round(time.monotonic() - begin, 2)
        finally:
            stop.set()
            await asyncio.gather(*playing)
            self.result.kills += self.service.num_kills

    def _event(self, name: str) -> Callable[[], Awaitable[None]]:
        if name in POINTS:
            return self._crash(CrashPoint(name))
        if name in ROLES:
            return self._kill(name)
        if name in RAY_ROLES:
            return self._kill_ray(name)
        return {"outage": self._pause, "service": self._kill_all}[name]

    def _kill(self, role: str) -> Callable[[], Awaitable[None]]:
        async def kill() -> None:
            await asyncio.to_thread(self.service.kill, role)

        return kill

    def _crash(self, point: CrashPoint) -> Callable[[], Awaitable[None]]:
        async def crash() -> None:
            self.service.arm(point, self._rng.randint(1, 3))
            if await asyncio.to_thread(self.service.wait_for_crash, point, PATIENCE_S):
                self.result.points.add(point)
                self.result.kills += 1

        return crash

    async def _pause(self) -> None:
        """Nobody answers for 12 s while callers wait."""
        await asyncio.to_thread(self.service.pause, OUTAGE_S)
        self.result.outages += 1

    async def _kill_all(self) -> None:
        await asyncio.to_thread(self.service.kill_all)
        await asyncio.to_thread(self.service.start)

    def _kill_ray(self, role: str) -> Callable[[], Awaitable[None]]:
        """A process of Ray's own. The service is to end by itself; then it is started anew."""

        async def kill() -> None:
            await asyncio.to_thread(self.service.kill, role)
            await asyncio.to_thread(self.service.restart_once_it_ends)

        return kill

    async def _segment(self) -> None:
        """Until every player has ended a segment that began after this moment."""
        wanted = [player.num_segments + 2 for player in self.players]
        deadline = time.monotonic() + 2 * PATIENCE_S
        while behind := [
            player.policy_id
            for player, num in zip(self.players, wanted, strict=True)
            if player.num_segments < num
        ]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{behind} do not go on; before: {self.result.seconds}")
            await asyncio.sleep(0.05)


def run_live(model_folder: Path, seed: int, rounds: int, only: Collection[str] = ()) -> LiveResult:
    """One service from its first start to the verdict on both policies.

    `only`: these events alone; empty: all.
    """
    with tempfile.TemporaryDirectory(prefix="rt-live-", dir="/tmp") as folder:
        root = Path(folder)
        shutil.copytree(model_folder, root / "models" / MODEL)
        with Service(root, limits={"gap_wait_s": 20.0}) as service:
            return asyncio.run(_play(service, seed, rounds, only))


async def _play(service: Service, seed: int, rounds: int, only: Collection[str]) -> LiveResult:
    async with (
        AsyncRatoonClient(service.grpc, timeout_s=PATIENCE_S, attempt_timeout_s=10.0) as grpc,
        AsyncRatoonClient(service.serve, timeout_s=PATIENCE_S, attempt_timeout_s=10.0) as http,
    ):
        folder = service.root / "models" / MODEL
        players = (
            Player(grpc, "by-seq", seed, folder, has_seqs=True, notes=Notes()),
            Player(http, "by-request", seed + 1, folder, has_seqs=False, notes=Notes()),
        )
        for client, player in zip((grpc, http), players, strict=True):
            creation = await client.create_policy(
                player.policy_id,
                model_folder=MODEL,
                sequencing="client" if player.policy_id == "by-seq" else "server",
                micro_batch_tokens=24,
                parallel=Parallel(num_workers=1 if player.policy_id == "by-seq" else 2),
            )
            await creation.result()
        run = LiveRun(service, players, seed)
        await run.run(rounds, only)
    for player in players:
        run.result.verdict.add(judge_player(service, player))
        run.result.operations += len(player.notes.told)
    return run.result


def judge_player(service: Service, player: Player) -> Verdict:
    """On everything that the player's policy was asked; its last call saved a checkpoint."""
    database = service.data_root / "ratoon.sqlite"
    spec = read_policy(database, player.policy_id)
    folder = service.root / "oracle" / player.policy_id
    with ranked(_trainer_spec(spec), spec.parallel.num_workers) as (trainer, _):
        return judge(
            player.notes,
            read_journal(database, player.policy_id),
            Oracle(trainer, player.seed, folder),
            policy_paths(service.data_root, player.policy_id),
        )


def _trainer_spec(spec: PolicySpec) -> TrainerSpec:
    """As the service's fleet makes it on a CPU, with the config of `Service`."""
    return TrainerSpec(
        model=spec.model,
        optimizer=spec.optimizer,
        deterministic=spec.deterministic,
        micro_batch_tokens=spec.micro_batch_tokens,
        keep_reference=False,
        attention_backend=spec.attention_backend,
        device="cpu",
        num_threads=1,
        self_check_every=100,
    )
