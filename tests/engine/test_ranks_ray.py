"""Policies of two ranks on Ray: one update after the other, whichever rank dies where."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray
from safetensors.numpy import load_file

from ratoon.config import CheckpointConfig, RatoonConfig, RayConfig, WorkerConfig
from ratoon.engine.client import EngineClient
from ratoon.engine.cluster.bootstrap import start_engine, stop_engine
from ratoon.engine.crash_points import FOLDER_NAME, CrashPoint
from ratoon.engine.types import Command, OperationState, PolicyState, Recovery, StepResult
from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.spec import ModelDtype
from ratoon.rollout.batch import RolloutBatch
from ratoon.train.config import ONE_DEVICE, ParallelLayout
from tests.conftest import RayCluster
from tests.engine.harness import save, update
from tests.engine.ray_engine import SPEC, Engine, done, random_batch, submission

_WIDE = replace(SPEC.model, dtype=ModelDtype.FLOAT64)
# Few tokens: several micro-batches, so that both ranks have some.
_SPEC = replace(
    SPEC,
    model=_WIDE,
    recovery=Recovery.REPLAY,
    parallel=ParallelLayout(num_workers=2),
    micro_batch_tokens=32,
    keep_versions=9,
)
_UPDATES = 4


@pytest.fixture(scope="module")
def engine(ray_cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    assert ray_cluster.address, "the namespace below is this module's own"
    config = RatoonConfig(
        data_root=tmp_path_factory.mktemp("engine"),
        ray=RayConfig(namespace=f"ranks-{uuid.uuid4().hex[:8]}"),
        worker=WorkerConfig(device="cpu", num_threads=1),
        checkpoints=CheckpointConfig(every_operations=2, keep=1),
        crash_points=True,
    )
    ray.get(start_engine(config))
    yield Engine(config)
    stop_engine(config)


async def _create(client: EngineClient, name: str, **changes: object) -> None:
    created = await client.create_policy(replace(_SPEC, policy_id=name, **changes))
    await done(client, created)


async def _run(
    client: EngineClient, name: str, seq: int, command: Command, batch: RolloutBatch | None
) -> None:
    await done(client, await client.submit(submission(seq, command, batch, name)))


async def _weights(client: EngineClient, name: str) -> tuple[str, Path]:
    """Digest and path of the newest published weights."""
    manifest = await client.weight_manifest(name, None)
    (file,) = (file for file in manifest.files if file.name == "model.safetensors")
    path, _ = await client.weight_file(name, manifest.version, file.name)
    return file.digest, path


@pytest.fixture(scope="module")
def undisturbed(engine: Engine) -> list[str]:
    """Digests of the versions of a policy of two ranks to which nothing happens."""

    async def main(client: EngineClient) -> list[str]:
        await _create(client, "undisturbed")
        digests: list[str] = []
        for seq in range(1, _UPDATES + 1):
            await _run(client, "undisturbed", seq, update(0), random_batch(seq, 4))
            digests.append((await _weights(client, "undisturbed"))[0])
        return digests

    return engine.run(main)


def test_two_ranks_train_as_one(engine: Engine, undisturbed: list[str]) -> None:
    async def main(client: EngineClient) -> None:
        await _create(client, "alone", parallel=ONE_DEVICE)
        for seq in range(1, _UPDATES + 1):
            await _run(client, "alone", seq, update(0), random_batch(seq, 4))
        alone, two = await _weights(client, "alone"), await _weights(client, "undisturbed")
        assert two[0] == undisturbed[-1] != alone[0]
        ours, theirs = load_file(two[1]), load_file(alone[1])
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            gap = np.linalg.norm(tensor - theirs[name])
            assert gap <= 1e-10 * np.linalg.norm(theirs[name]), name

    engine.run(main)


@pytest.mark.more
def test_two_ranks_that_run_micro_batches_together_train_as_one(engine: Engine) -> None:
    """And as others, of which one dies while the other waits for what it sends."""
    together = ParallelLayout(num_workers=2, sequence_ranks=2)
    layouts = {"one-rank": ONE_DEVICE, "together": together, "parted": together}

    async def main(client: EngineClient) -> None:
        trap = engine.config.data_root / FOLDER_NAME / CrashPoint.RANK_IN_PASS
        found: list[tuple[str, Path]] = []
        for name, parallel in layouts.items():
            await _create(client, name, parallel=parallel)
            if name == "parted":
                trap.parent.mkdir(exist_ok=True)
                trap.write_text("2")
            for seq in (1, 2):
                await _run(client, name, seq, update(0), random_batch(seq, 4))
            found.append(await _weights(client, name))
        assert not trap.exists(), "the rank was killed"
        assert found[1][0] == found[2][0]
        theirs, ours = (load_file(path) for _, path in found[:2])
        for name, tensor in ours.items():
            gap = np.linalg.norm(tensor - theirs[name])
            assert gap <= 1e-10 * np.linalg.norm(theirs[name]), name

    engine.run(main)


# One in the pass, where others can go on, and one in the step, where they cannot, with every run.
_OFTEN = (CrashPoint.RANK_IN_PASS, CrashPoint.RANK_AFTER_STEP)
_POINTS = [
    pytest.param(point, marks=() if point in _OFTEN else pytest.mark.more)
    for point in CrashPoint
    if point.startswith("rank-")
]


@pytest.mark.parametrize("point", _POINTS)
def test_a_rank_that_dies_costs_no_bit(
    engine: Engine, undisturbed: list[str], point: CrashPoint
) -> None:
    name = f"dies-{point.removeprefix('rank-')}"
    trap = engine.config.data_root / FOLDER_NAME / point

    async def main(client: EngineClient) -> None:
        await _create(client, name)
        trap.parent.mkdir(exist_ok=True)
        trap.write_text("2")
        for seq in range(1, _UPDATES + 1):
            await _run(client, name, seq, update(0), random_batch(seq, 4))
            assert (await _weights(client, name))[0] == undisturbed[seq - 1]
        if point is CrashPoint.RANK_BEFORE_CHECKPOINT:
            trap.write_text("1")
            await _run(client, name, _UPDATES + 1, save("after"), None)
        assert (await client.get_policy(name)).state is PolicyState.READY
        assert not trap.exists(), "the rank was killed"

    engine.run(main)


def test_more_ranks_than_cores_are_refused_with_both(engine: Engine) -> None:
    async def main(client: EngineClient) -> None:
        with pytest.raises(RatoonError) as caught:
            await client.create_policy(
                replace(_SPEC, policy_id="many", parallel=ParallelLayout(num_workers=4096))
            )
        assert caught.value.code is ErrorCode.INVALID_ARGUMENT
        assert (caught.value.field, caught.value.got) == ("parallel.num_workers", "4096")
        assert "cores" in caught.value.message

    engine.run(main)


def test_a_cancelled_update_of_two_ranks_changes_nothing(engine: Engine) -> None:
    async def main(client: EngineClient) -> None:
        await _create(client, "cancelled")
        before = await _weights(client, "cancelled")
        large = await client.submit(submission(1, update(0), random_batch(11, 60), "cancelled"))
        await client.cancel_operation(large.operation_id)
        ended = await client.get_operation(large.operation_id, 60.0)
        assert ended.state is OperationState.CANCELLED
        assert await _weights(client, "cancelled") == before
        operation = await client.submit(submission(2, update(0), random_batch(1, 4), "cancelled"))
        assert isinstance((await done(client, operation)).result, StepResult)

    engine.run(main)
