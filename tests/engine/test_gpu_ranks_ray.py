"""A policy on all GPUs through Ray: whichever rank dies where, the same bits."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace

import pytest
import ray
import torch

from ratoon.cluster.bootstrap import start_engine, stop_engine
from ratoon.config import CheckpointConfig, RatoonConfig, RayConfig, WorkerConfig
from ratoon.engine.client import EngineClient
from ratoon.engine.crash_points import FOLDER_NAME, CrashPoint
from ratoon.engine.engine import Engine
from ratoon.engine.types import Recovery
from ratoon.model.spec import ModelDtype, PresetBase
from ratoon.train.config import ParallelLayout, Shard
from tests.conftest import RayCluster
from tests.engine.harness import update
from tests.engine.ray_engine import SPEC, RayEngine, done, random_batch, submission

pytestmark = pytest.mark.multigpu
DEVICE = "cuda"
_MODEL = replace(SPEC.model, base=PresetBase(name="small"), dtype=ModelDtype.BFLOAT16)
_SPEC = replace(SPEC, model=_MODEL, recovery=Recovery.REPLAY, micro_batch_tokens=32)


@pytest.fixture(scope="module")
def engine(
    ray_cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RayEngine]:
    assert ray_cluster.address, "the namespace below is this module's own"
    config = RatoonConfig(
        data_root=tmp_path_factory.mktemp("engine"),
        ray=RayConfig(namespace=f"gpu-ranks-{uuid.uuid4().hex[:8]}"),
        worker=WorkerConfig(device=DEVICE, num_threads=1),
        checkpoints=CheckpointConfig(every_operations=2, keep=1),
        crash_points=True,
    )
    ray.get(start_engine(config))
    yield RayEngine(config)
    stop_engine(config)


@pytest.mark.parametrize("shard", list(Shard))
def test_ranks_that_die_cost_no_bit(engine: RayEngine, shard: Shard) -> None:
    """One in its pass and one behind its step; the policy before it, as each takes all GPUs, is
    not disturbed."""
    traps = {2: CrashPoint.RANK_IN_PASS, 3: CrashPoint.RANK_AFTER_STEP}
    parallel = ParallelLayout(num_workers=torch.cuda.device_count(), shard=shard)

    async def digests(client: EngineClient, name: str, traps: dict[int, CrashPoint]) -> list[str]:
        created = replace(_SPEC, policy_id=name, parallel=parallel)
        await done(client, await client.call(Engine.create_policy, created))
        found: list[str] = []
        for seq in range(1, 4):
            trap = None
            if seq in traps:
                trap = engine.config.data_root / FOLDER_NAME / traps[seq]
                trap.parent.mkdir(exist_ok=True)
                trap.write_text("1")
            call = submission(seq, update(0), random_batch(seq, 4), name)
            await done(client, await client.submit(call))
            assert trap is None or not trap.exists(), "the rank was killed"
            manifest = await client.call(Engine.weight_manifest, name, None)
            found += [file.digest for file in manifest.files if "model" in file.name]
        await done(client, await client.call(Engine.delete_policy, name))
        return found

    async def main(client: EngineClient) -> None:
        undisturbed = await digests(client, f"{shard}-undisturbed", {})
        assert await digests(client, f"{shard}-disturbed", traps) == undisturbed
        assert len(set(undisturbed)) == len(undisturbed) > 0

    engine.run(main)
