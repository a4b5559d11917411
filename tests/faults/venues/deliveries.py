"""Versions on their way into an inference engine while worker, edge and receiver are killed.

Callers go through the edge too. After each kill the engine must come to the newest version.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ratoon_client import AsyncRatoonClient, ClientConfig
from tests.client.fake_engine import START, FakeEngine, serving_engine
from tests.faults.judge.calls import WEIGHTS_FILE, Call, Kind
from tests.faults.judge.history import Verdict
from tests.faults.judge.oracle import judge_served
from tests.faults.venues.clients import PATIENCE_S, Player
from tests.faults.venues.light import POLICY, LightOptions, LightRun, light_run

ROLES = ("worker", "edge", "receiver")
# Each call of the engine takes up to so long, so that kills find it within a commit.
_CALL_S = 0.02
_WARM_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryResult:
    """`kills` by role; `versions` that the engine sampled with, of those that were made."""

    kills: Counter[str]
    versions: int
    operations: int
    verdict: Verdict


def run_deliveries(model_folder: Path, seed: int, num_kills: int) -> DeliveryResult:
    """At least `num_kills`, and the verdict on the calls and on what the engine sampled with."""
    sampler = Sampler(seed)
    with serving_engine(sampler) as url:
        options = LightOptions(seed=seed, model_folder=model_folder, inference_url=url)
        with light_run(options) as run:
            asyncio.run(_Deliveries(run, sampler).run(num_kills))
            verdict = run.finish()
            if verdict.is_good:
                verdict.add(judge_served(sampler.served, run.oracle.digests))
            verdict.lost += sampler.faults_seen
            return DeliveryResult(
                kills=run.pair.kills,
                versions=len(sampler.served),
                operations=len(run.notes.told),
                verdict=verdict,
            )


class Sampler(FakeEngine):
    """`served`: digests of the weights that it sampled with, in order."""

    def __init__(self, seed: int) -> None:
        self.served: list[str] = []
        self.faults_seen: list[str] = []
        super().__init__()
        rng = random.Random(seed)
        self.on_call = lambda _: time.sleep(rng.uniform(0.0, _CALL_S))

    def sample(self) -> bytes | None:
        with self.lock:
            try:
                weights = super().sample()
            except AssertionError as error:
                self.faults_seen.append(str(error))
                return None
            if weights is not None and weights != START:
                digest = xxhash.xxh3_128_hexdigest(weights)
                if digest not in self.served[-1:]:
                    self.served.append(digest)
            return weights


class _Deliveries:
    """The callers of a light run whose versions are received, and its kills."""

    def __init__(self, run: LightRun, sampler: Sampler) -> None:
        self._run, self._sampler = run, sampler
        self._model = run.paths.models_root / "model"
        shutil.copytree(run.options.model_folder, self._model)
        self._numbers = itertools.count(1)

    async def run(self, num_kills: int) -> None:
        run, rng = self._run, self._run.rng
        url, seed = run.settings.url, run.options.seed
        # The edge is still starting.
        config = ClientConfig(
            timeout_s=PATIENCE_S, attempt_timeout_s=10.0, connect_timeout_s=PATIENCE_S
        )
        async with AsyncRatoonClient(url, config=config) as client:
            player = Player(client, POLICY, seed, self._model, has_seqs=True, notes=run.notes)
            begin = time.monotonic()
            for _ in range(_WARM_ROUNDS):
                await self._play(player)
                await self._until_served(client)
            round_s = (time.monotonic() - begin) / _WARM_ROUNDS
            roles = self._roles()
            while run.pair.num_kills < num_kills:
                playing = asyncio.create_task(self._play(player))
                for role in itertools.islice(roles, rng.choice((1, 1, 2))):
                    await asyncio.sleep(rng.uniform(0.0, round_s))
                    await asyncio.to_thread(run.pair.kill, role)
                    self._sampler.sample()
                await playing
                await self._until_served(client)

    def _roles(self) -> Iterator[str]:
        """Each as often, in any order."""
        while True:
            yield from self._run.rng.sample(ROLES, len(ROLES))

    async def _play(self, player: Player) -> None:
        """One version or a few, some of them imported."""
        rng = self._run.rng
        kinds = rng.choices((Kind.UPDATE, Kind.IMPORT_WEIGHTS), (3, 1), k=rng.randint(1, 3))
        calls = [
            Call(number=next(self._numbers), kind=kind, replaces=rng.random() < 0.5)
            for kind in kinds
        ]
        # The player counts by itself; the last call is the run's own.
        self._run.take_seqs(len(calls))
        await player.play(calls)

    async def _until_served(self, client: AsyncRatoonClient) -> None:
        """Until the engine samples with the newest version, and readers of the folder see it."""
        notes = self._run.notes
        versions = [one.version for one in notes.told.values() if one.version is not None]
        assert versions, (
            f"no version was made: {notes.errors}, {self._run.pair.failures}, {notes.told}"
        )
        newest = await client.weight_manifest(POLICY, max(versions), wait_s=60.0)
        digest = next(file.digest for file in newest.files if file.name == WEIGHTS_FILE)
        latest = self._run.settings.mirror / "latest"
        deadline = time.monotonic() + PATIENCE_S
        while not self._sampler.faults_seen and (
            self._sampler.served[-1:] != [digest]
            or latest.readlink().name != f"version-{newest.version}"
        ):
            if time.monotonic() > deadline:
                raise TimeoutError(f"version {newest.version} is not served")
            await asyncio.sleep(0.01)
