"""Policies of two ranks on Ray: one update after the other, whichever rank is lost where."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
from safetensors.numpy import load_file

from ratoon.cluster.bootstrap import start_engine, stop_engine
from ratoon.cluster.worker_process import RayWorker
from ratoon.config import CheckpointConfig, RatoonConfig, RayConfig, WorkerConfig
from ratoon.engine.client import EngineClient
from ratoon.engine.commands import Command
from ratoon.engine.crash_points import FOLDER_NAME, CrashPoint
from ratoon.engine.engine import Engine
from ratoon.engine.settings import EngineSettings
from ratoon.engine.types import FailedResult
from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.spec import FolderBase, ModelDtype
from ratoon.rollout.batch import RolloutBatch
from ratoon.stream.manifest import WeightManifest
from ratoon.train.spec import ONE_DEVICE
from ratoon_proto.types import (
    OperationState,
    ParallelLayout,
    PolicyState,
    Recovery,
    Shard,
    StepResult,
)
from tests.conftest import RayCluster
from tests.engine.harness import save, update
from tests.engine.ray_engine import SPEC, RayEngine, done, random_batch, submission
from tests.tiny_models import write_folder
from tests.until import until

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
# Longer than a busy machine makes a process wait.
_SILENCE_S = 6.0
# System call of Linux that copies a descriptor of another process.
_PIDFD_GETFD = 438


@pytest.fixture(scope="module")
def engine(
    ray_cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RayEngine]:
    assert ray_cluster.address, "the namespace below is this module's own"
    config = RatoonConfig(
        data_root=tmp_path_factory.mktemp("engine"),
        ray=RayConfig(namespace=f"ranks-{uuid.uuid4().hex[:8]}"),
        worker=WorkerConfig(device="cpu", num_threads=1, max_silence_s=_SILENCE_S),
        checkpoints=CheckpointConfig(every_operations=2, keep=1),
        crash_points=True,
    )
    ray.get(start_engine(config))
    yield RayEngine(config)
    stop_engine(config)


@pytest.fixture(autouse=True)
def _ended(engine: RayEngine) -> Iterator[None]:
    """Only the undisturbed policy outlives a test."""
    yield

    async def main(client: EngineClient) -> None:
        for policy in await client.call(Engine.policies):
            if policy.spec.policy_id != "undisturbed":
                await done(client, await client.call(Engine.delete_policy, policy.spec.policy_id))

    engine.run(main)


async def _create(client: EngineClient, name: str, **changes: object) -> None:
    created = await client.call(Engine.create_policy, replace(_SPEC, policy_id=name, **changes))
    await done(client, created)


async def _run(
    client: EngineClient, name: str, seq: int, command: Command, batch: RolloutBatch | None
) -> None:
    await done(client, await client.submit(submission(seq, command, batch, name)))


async def _weights(client: EngineClient, name: str) -> tuple[str, Path]:
    """Digest and path of the newest published weights."""
    manifest = await client.call(Engine.weight_manifest, name, None)
    (file,) = (file for file in manifest.files if file.name == "model.safetensors")
    path, _ = await client.weight_file(name, manifest.version, file.name)
    return file.digest, path


@pytest.fixture(scope="module")
def undisturbed(engine: RayEngine) -> list[str]:
    """Digests of the versions of a policy of two ranks to which nothing happens."""

    async def main(client: EngineClient) -> list[str]:
        await _create(client, "undisturbed")
        digests: list[str] = []
        for seq in range(1, _UPDATES + 1):
            await _run(client, "undisturbed", seq, update(0), random_batch(seq, 4))
            digests.append((await _weights(client, "undisturbed"))[0])
        return digests

    return engine.run(main)


def test_two_ranks_train_as_one(engine: RayEngine, undisturbed: list[str]) -> None:
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
def test_two_ranks_that_run_micro_batches_together_train_as_one(engine: RayEngine) -> None:
    """And as others, of which one dies or hangs while the other waits for what it sends."""
    together = ParallelLayout(num_workers=2, sequence_ranks=2)
    harms = {"one-rank": "", "together": "", "parted": "2 SIGKILL", "hung": "2 SIGSTOP"}

    async def main(client: EngineClient) -> None:
        found: list[tuple[str, Path]] = []
        for name, harm in harms.items():
            await _create(client, name, parallel=ONE_DEVICE if name == "one-rank" else together)
            trap = _trap(engine, CrashPoint.RANK_IN_PASS, harm) if harm else None
            for seq in (1, 2):
                await _run(client, name, seq, update(0), random_batch(seq, 4))
            found.append(await _weights(client, name))
            assert trap is None or not trap.exists(), "the rank was lost"
        assert found[1][0] == found[2][0] == found[3][0]
        theirs, ours = (load_file(path) for _, path in found[:2])
        for name, tensor in ours.items():
            gap = np.linalg.norm(tensor - theirs[name])
            assert gap <= 1e-10 * np.linalg.norm(theirs[name]), name

    engine.run(main)


@pytest.mark.more
def test_two_ranks_publish_the_files_of_one(engine: RayEngine, tmp_path: Path) -> None:
    """A model of two files, of which each rank has one."""
    base = FolderBase(folder=str(write_folder(tmp_path / "base", "llama", vocab_size=1_100_000)))
    model = replace(_WIDE, base=base)

    async def main(client: EngineClient) -> None:
        manifests: list[WeightManifest] = []
        for num_workers in (1, 2):
            name = f"files-of-{num_workers}"
            parallel = ParallelLayout(num_workers=num_workers)
            await _create(client, name, model=model, parallel=parallel)
            manifests.append(await client.call(Engine.weight_manifest, name, None))
            await done(client, await client.call(Engine.delete_policy, name))
        assert manifests[0].files == manifests[1].files
        shards = [file.name for file in manifests[0].files if file.name.startswith("model-")]
        assert shards == [f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)]

    engine.run(main)


_LOSSES = [
    *((point, "SIGKILL") for point in CrashPoint if point.startswith("rank-")),
    # While the others copy: the test after this one.
    (CrashPoint.RANK_IN_PASS, "SIGSTOP"),
    (CrashPoint.RANK_BEFORE_CHECKPOINT, "SIGSTOP"),
    (CrashPoint.WORKER_IN_APPLY, "SIGSTOP"),
]
# Where others cannot go on.
_OFTEN = (CrashPoint.RANK_AFTER_STEP, "SIGKILL")
_SELDOM = (CrashPoint.RANK_BEFORE_CHECKPOINT, "SIGSTOP")


def _how_often(loss: tuple[CrashPoint, str]) -> tuple[pytest.MarkDecorator, ...]:
    if loss == _OFTEN:
        return ()
    return (pytest.mark.slow if loss == _SELDOM else pytest.mark.more,)


@pytest.mark.parametrize(
    ("point", "harm"),
    [pytest.param(*loss, marks=_how_often(loss)) for loss in _LOSSES],
)
def test_a_rank_that_is_lost_costs_no_bit_and_leaves_no_process(
    engine: RayEngine, undisturbed: list[str], point: CrashPoint, harm: str
) -> None:
    name = f"{point}-{harm.lower()}"

    async def main(client: EngineClient) -> None:
        others = _processes()
        await _create(client, name)
        first = _processes() - others
        assert len(first) == 2, "its worker and rank"
        trap = _trap(engine, point, f"2 {harm}")
        for seq in range(1, _UPDATES + 1):
            await _run(client, name, seq, update(0), random_batch(seq, 4))
            assert (await _weights(client, name))[0] == undisturbed[seq - 1]
        if point is CrashPoint.RANK_BEFORE_CHECKPOINT:
            trap.write_text(f"1 {harm}")
            await _run(client, name, _UPDATES + 1, save("after"), None)
        assert (await client.call(Engine.policy, name)).state is PolicyState.READY
        assert not trap.exists(), "the process was lost"
        await _gone(first)

    engine.run(main)


@pytest.mark.more
def test_a_policy_whose_rank_hangs_holds_no_other_up(
    engine: RayEngine, undisturbed: list[str]
) -> None:
    """The other runs two updates while the first one's ranks copy and nothing comes."""

    async def main(client: EngineClient) -> None:
        await _create(client, "beside")
        others = _processes()
        await _create(client, "hangs")
        first = _processes() - others
        _trap(engine, CrashPoint.RANK_BEFORE_COPIES, "1 SIGSTOP")
        hung = await client.submit(submission(1, update(0), random_batch(1, 4), "hangs"))
        await _stopped(first)
        for seq in (1, 2):
            await _run(client, "beside", seq, update(0), random_batch(seq, 4))
            assert (await _weights(client, "beside"))[0] == undisturbed[seq - 1]
        assert not (await client.call(Engine.get_operation, hung.operation_id, 0.0)).state.is_final
        await done(client, hung)
        assert (await _weights(client, "hangs"))[0] == undisturbed[0]
        await _gone(first)
        assert others <= _processes(), "no process of another policy was replaced"

    engine.run(main)


@pytest.mark.more
@pytest.mark.parametrize(
    ("harm", "shard"),
    [
        ("SIGSTOP", Shard.GRADIENTS),
        ("SIGKILL", Shard.WEIGHTS),
        pytest.param("SIGKILL", Shard.GRADIENTS, marks=pytest.mark.slow),
        pytest.param("SIGSTOP", Shard.WEIGHTS, marks=pytest.mark.slow),
    ],
)
def test_where_more_is_sharded_a_rank_that_is_lost_in_the_pass_costs_no_bit(
    engine: RayEngine, harm: str, shard: Shard
) -> None:
    """The other rank waits for what it would have sent, and may be reading its weights."""
    layout = ParallelLayout(num_workers=2, shard=shard)

    async def main(client: EngineClient) -> None:
        lost = f"{shard}-{harm.lower()}"
        digests: dict[str, list[str]] = {f"{lost}-not": [], lost: []}
        trap: Path | None = None
        for name, found in digests.items():
            await _create(client, name, parallel=layout)
            if name == lost:
                trap = _trap(engine, CrashPoint.RANK_IN_PASS, f"2 {harm}")
            for seq in range(1, _UPDATES + 1):
                await _run(client, name, seq, update(0), random_batch(seq, 4))
                found.append((await _weights(client, name))[0])
            policy = await client.call(Engine.policy, name)
            assert policy.state is PolicyState.READY
            assert policy.info is not None
            assert policy.info.shard == shard
        assert trap is not None
        assert not trap.exists(), "the rank was lost"
        assert digests[lost] == digests[f"{lost}-not"]

    engine.run(main)


@pytest.mark.more
def test_a_slow_rank_is_waited_for_and_one_without_memory_costs_its_operation_alone(
    engine: RayEngine, undisturbed: list[str]
) -> None:
    async def main(client: EngineClient) -> None:
        others = _processes()
        await _create(client, "slow")
        first = _processes() - others
        _trap(engine, CrashPoint.RANK_IN_PASS, "1 SIGSTOP")
        slow = await client.submit(submission(1, update(0), random_batch(1, 4), "slow"))
        stopped = await _stopped(first)
        await asyncio.sleep(_SILENCE_S * 0.6)
        os.kill(stopped, signal.SIGCONT)
        await done(client, slow)
        _trap(engine, CrashPoint.RANK_IN_PASS, "1 MemoryError")
        refused = await client.submit(submission(2, update(0), random_batch(9, 4), "slow"))
        ended = await client.call(Engine.get_operation, refused.operation_id, 60.0)
        assert isinstance(ended.result, FailedResult)
        assert ended.result.error["code"] == ErrorCode.RESOURCE_EXHAUSTED
        await _run(client, "slow", 3, update(0), random_batch(2, 4))
        assert (await _weights(client, "slow"))[0] == undisturbed[1]
        assert first <= _processes(), "nothing was replaced"

    engine.run(main)


@pytest.mark.more
def test_a_network_that_is_cut_between_ranks_costs_no_bit(
    engine: RayEngine, undisturbed: list[str]
) -> None:
    async def main(client: EngineClient) -> None:
        others = _processes()
        await _create(client, "cut")
        first = _processes() - others
        _trap(engine, CrashPoint.RANK_BEFORE_COPIES, "2 SIGSTOP")
        await _run(client, "cut", 1, update(0), random_batch(1, 4))
        second = await client.submit(submission(2, update(0), random_batch(2, 4), "cut"))
        stopped = await _stopped(first)
        assert _cut(stopped, *(first - {stopped})) > 0
        os.kill(stopped, signal.SIGCONT)
        await done(client, second)
        assert (await _weights(client, "cut"))[0] == undisturbed[1]
        await _gone(first)

    engine.run(main)


@pytest.mark.more
def test_ranks_start_beside_their_worker_and_end_with_it(engine: RayEngine) -> None:
    """Before there is a model to load."""
    settings = EngineSettings.from_config(engine.config)

    async def main(_client: EngineClient) -> None:
        others = _processes()
        worker = RayWorker("ahead", settings, 2, on_gpus=False)
        await worker.fence(1)
        await until(lambda: len(_processes() - others) == 2)
        both = _processes() - others
        await worker.release()
        await _gone(both)

    engine.run(main)


def _processes() -> set[int]:
    """Workers and ranks of this test session's Ray."""
    found: set[int] = set()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            line = " ".join(child.cmdline())
            if "ray::WorkerActor" in line or "ray::RankActor" in line:
                found.add(child.pid)
    return found


async def _gone(processes: set[int]) -> None:
    """Wait until none of them lives. Ray gives one that hangs 5 s."""
    await until(lambda: not any(map(psutil.pid_exists, processes)))


async def _stopped(processes: set[int]) -> int:
    """The one of them that stands still, once one does."""

    def find() -> list[int]:
        return [pid for pid in processes if psutil.Process(pid).status() == psutil.STATUS_STOPPED]

    await until(find)
    return find()[0]


def _trap(engine: RayEngine, point: CrashPoint, text: str) -> Path:
    trap = engine.config.data_root / FOLDER_NAME / point
    trap.parent.mkdir(exist_ok=True)
    trap.write_text(text)
    return trap


def _cut(one: int, other: int) -> int:
    """Shut down all TCP connections between two processes; returns how many there were."""
    far = {each.laddr for each in psutil.Process(other).net_connections("tcp")}
    near = [each for each in psutil.Process(one).net_connections("tcp") if each.raddr in far]
    process, libc = os.pidfd_open(one), ctypes.CDLL(None)
    for each in near:
        number = libc.syscall(_PIDFD_GETFD, process, each.fd, 0)
        with socket.socket(fileno=number) as connection:
            connection.shutdown(socket.SHUT_RDWR)
    os.close(process)
    return len(near)


def test_more_ranks_than_cores_are_refused_with_both(engine: RayEngine) -> None:
    async def main(client: EngineClient) -> None:
        with pytest.raises(RatoonError) as caught:
            await client.call(
                Engine.create_policy,
                replace(_SPEC, policy_id="many", parallel=ParallelLayout(num_workers=4096)),
            )
        assert caught.value.code is ErrorCode.INVALID_ARGUMENT
        assert (caught.value.field, caught.value.got) == ("parallel.num_workers", "4096")
        assert "cores" in caught.value.message

    engine.run(main)


def test_a_cancelled_update_of_two_ranks_changes_nothing(engine: RayEngine) -> None:
    async def main(client: EngineClient) -> None:
        await _create(client, "cancelled")
        before = await _weights(client, "cancelled")
        large = await client.submit(submission(1, update(0), random_batch(11, 60), "cancelled"))
        await client.call(Engine.cancel_operation, large.operation_id)
        ended = await client.call(Engine.get_operation, large.operation_id, 60.0)
        assert ended.state is OperationState.CANCELLED
        assert await _weights(client, "cancelled") == before
        operation = await client.submit(submission(2, update(0), random_batch(1, 4), "cancelled"))
        assert isinstance((await done(client, operation)).result, StepResult)

    engine.run(main)
