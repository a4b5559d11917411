"""A policy on two GPUs through Ray: whichever rank dies where, the same bits."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace

import pytest
import ray

from ratoon.config import CheckpointConfig, RatoonConfig, RayConfig, WorkerConfig
from ratoon.engine.client import EngineClient
from ratoon.engine.cluster.bootstrap import start_engine, stop_engine
from ratoon.engine.crash_points import FOLDER_NAME, CrashPoint
from ratoon.engine.types import Recovery
from ratoon.model.spec import ModelDtype, PresetBase
from ratoon.train.config import ParallelLayout, Shard
from tests.conftest import RayCluster
from tests.engine.harness import update
from tests.engine.ray_engine import SPEC, Engine, done, random_batch, submission

pytestmark = pytest.mark.multigpu
DEVICE = "cuda"
_MODEL = replace(SPEC.model, base=PresetBase(name="small"), dtype=ModelDtype.BFLOAT16)
_SPEC = replace(SPEC, model=_MODEL, recovery=Recovery.REPLAY, micro_batch_tokens=32)


@pytest.fixture(scope="module")
def engine(ray_cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    assert ray_cluster.address, "the namespace below is this module's own"
    config = RatoonConfig(
        data_root=tmp_path_factory.mktemp("engine"),
        ray=RayConfig(namespace=f"gpu-ranks-{uuid.uuid4().hex[:8]}"),
        worker=WorkerConfig(device=DEVICE, num_threads=1),
        checkpoints=CheckpointConfig(every_operations=2, keep=1),
        crash_points=True,
    )
    ray.get(start_engine(config))
    yield Engine(config)
    stop_engine(config)


@pytest.mark.parametrize("shard", list(Shard))
def test_a_rank_that_dies_costs_no_bit(engine: Engine, shard: Shard) -> None:
    """One policy after the other, as each takes both GPUs; the first is not disturbed."""
    points = (None, CrashPoint.RANK_IN_PASS, CrashPoint.RANK_AFTER_STEP)
    parallel = ParallelLayout(num_workers=2, shard=shard)

    async def main(client: EngineClient) -> None:
        digests: list[list[str]] = []
        for point in points:
            name = f"{shard}-{point or 'undisturbed'}"
            created = replace(_SPEC, policy_id=name, parallel=parallel)
            await done(client, await client.create_policy(created))
            trap = engine.config.data_root / FOLDER_NAME / str(point)
            if point is not None:
                trap.parent.mkdir(exist_ok=True)
                trap.write_text("2")
            digests.append([])
            for seq in range(1, 4):
                call = submission(seq, update(0), random_batch(seq, 4), name)
                await done(client, await client.submit(call))
                manifest = await client.weight_manifest(name, None)
                digests[-1] += [file.digest for file in manifest.files if "model" in file.name]
            assert not trap.exists(), "the rank was killed"
            await done(client, await client.delete_policy(name))
        assert digests[1:] == [digests[0]] * 2
        assert len(set(digests[0])) == len(digests[0]) > 0

    engine.run(main)
