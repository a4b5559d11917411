"""A fault run on the real service: two policies, callers on both wires, kills of every process.

Enter a seed and how many rounds of kills, leave counts and a verdict. Invariant: after each kill
both policies have gone through a whole segment before the next one.
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

from benchmarks.faults_clients import PATIENCE_S, Player
from benchmarks.faults_history import Notes, Verdict, read_journal, read_policy
from benchmarks.faults_oracle import Oracle, judge
from benchmarks.faults_service import Service
from ratoon.engine.crash_points import CrashPoint
from ratoon.engine.files import policy_paths
from ratoon.engine.types import PolicySpec
from ratoon.train.spec import TrainerSpec
from ratoon_client import AsyncRatoonClient

POINTS = tuple(point for point in CrashPoint if point.startswith("ingress-"))
ROLES = ("worker", "controller", "coordinator", "replica", "gateway")
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
            for _ in range(rounds):
                for name, event in self._events(only):
                    await asyncio.sleep(self._rng.uniform(0.0, 0.5))
                    begin = time.monotonic()
                    await event()
                    await self._segment()
                    self.result.seconds[name] = round(time.monotonic() - begin, 2)
        finally:
            stop.set()
            await asyncio.gather(*playing)
        self.result.kills += self.service.num_kills

    def _events(self, only: Collection[str]) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
        events = [(role, self._kill(role)) for role in ROLES]
        events += [(point, self._crash(point)) for point in POINTS]
        events += [("outage", self._pause), ("service", self._kill_all), ("head", self._kill_head)]
        return [(name, event) for name, event in events if not only or name in only]

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

    async def _kill_head(self) -> None:
        """The head node's own process: what is left of the service ends, and is started anew."""
        await asyncio.to_thread(self.service.kill, "head")
        await asyncio.sleep(1.0)
        await self._kill_all()
        self.service.num_kills -= 1

    async def _segment(self) -> None:
        """Until every player has ended a segment that began after this moment."""
        wanted = [player.num_segments + 2 for player in self.players]
        deadline = time.monotonic() + 2 * PATIENCE_S
        while any(p.num_segments < n for p, n in zip(self.players, wanted, strict=True)):
            if time.monotonic() > deadline:
                raise TimeoutError("the policies do not go on")
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
        AsyncRatoonClient(service.http, timeout_s=PATIENCE_S, attempt_timeout_s=10.0) as http,
    ):
        players = (
            Player(grpc, "by-seq", seed, has_seqs=True, notes=Notes()),
            Player(http, "by-request", seed + 1, has_seqs=False, notes=Notes()),
        )
        for client, player in zip((grpc, http), players, strict=True):
            creation = await client.create_policy(
                player.policy_id,
                model_folder=MODEL,
                sequencing="client" if player.policy_id == "by-seq" else "server",
                micro_batch_tokens=24,
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
    return judge(
        player.notes,
        read_journal(database, player.policy_id),
        Oracle(_trainer_spec(spec), player.seed, folder),
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
        canary_every=100,
    )
