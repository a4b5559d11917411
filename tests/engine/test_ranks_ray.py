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
from ratoon.engine.types import FailedResult, Operation
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
)
from tests.conftest import RayCluster
from tests.engine.harness import load, save, update
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
_UPDATES = 3
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
    """Only the policies of the module's fixtures outlive a test."""
    yield

    async def main(client: EngineClient) -> None:
        for policy in await client.call(Engine.policies):
            if policy.spec.policy_id not in ("undisturbed", "harmed"):
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


class Undisturbed:
    """A policy of two ranks to which nothing happens; update n has batch n."""

    def __init__(self) -> None:
        self.digests: list[str] = []

    async def digest(self, client: EngineClient, number: int) -> str:
        """Digest of the weights after `number` updates, which are run where they were not yet."""
        while len(self.digests) < number:
            seq = len(self.digests) + 1
            await _run(client, "undisturbed", seq, update(0), random_batch(seq, 4))
            self.digests.append((await _weights(client, "undisturbed"))[0])
        return self.digests[number - 1]


class Harmed:
    """A policy of two ranks that gets the same updates, while its processes are harmed.

    `others`: processes that were there before. `num_updates`: updates that have ended.
    """

    def __init__(self, undisturbed: Undisturbed, others: set[int]) -> None:
        self.undisturbed, self.others = undisturbed, others
        self.num_updates = 0

    async def processes(self) -> set[int]:
        """Its worker and its rank. Those of a deleted policy may take a moment to end."""
        await until(lambda: len(_processes() - self.others) == 2)
        return _processes() - self.others

    async def submit(self, client: EngineClient, command: Command, batch: int) -> Operation:
        seq = (await client.call(Engine.policy, "harmed")).next_seq
        rollouts = random_batch(batch, 4) if batch else None
        return await client.submit(submission(seq, command, rollouts, "harmed"))

    async def begin_update(self, client: EngineClient) -> Operation:
        return await self.submit(client, update(0), self.num_updates + 1)

    async def end_update(self, client: EngineClient, operation: Operation) -> None:
        """Wait for it, and compare the weights with those of the undisturbed policy."""
        await done(client, operation)
        self.num_updates += 1
        expected = await self.undisturbed.digest(client, self.num_updates)
        assert (await _weights(client, "harmed"))[0] == expected

    async def update(self, client: EngineClient) -> None:
        await self.end_update(client, await self.begin_update(client))


@pytest.fixture(scope="module")
def undisturbed(engine: RayEngine) -> Undisturbed:
    engine.run(lambda client: _create(client, "undisturbed"))
    return Undisturbed()


@pytest.fixture(scope="module")
def harmed(engine: RayEngine, undisturbed: Undisturbed) -> Harmed:
    others = _processes()
    engine.run(lambda client: _create(client, "harmed"))
    return Harmed(undisturbed, others)


@pytest.fixture(scope="module")
def alone(engine: RayEngine) -> dict[str, np.ndarray]:
    """Weights of a policy of one rank after as many updates."""

    async def main(client: EngineClient) -> dict[str, np.ndarray]:
        await _create(client, "alone", parallel=ONE_DEVICE)
        for seq in range(1, _UPDATES + 1):
            await _run(client, "alone", seq, update(0), random_batch(seq, 4))
        return load_file((await _weights(client, "alone"))[1])

    return engine.run(main)


def _check_alike(path: Path, theirs: dict[str, np.ndarray]) -> None:
    ours = load_file(path)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        gap = np.linalg.norm(tensor - theirs[name])
        assert gap <= 1e-10 * np.linalg.norm(theirs[name]), name


def test_two_ranks_train_as_one(
    engine: RayEngine, undisturbed: Undisturbed, alone: dict[str, np.ndarray]
) -> None:
    async def main(client: EngineClient) -> None:
        digest = await undisturbed.digest(client, _UPDATES)
        newest, path = await _weights(client, "undisturbed")
        assert newest == digest, "no other test has gone on with it"
        _check_alike(path, alone)

    engine.run(main)


_KILLED, _HUNG = ("SIGKILL",), ("SIGSTOP",)
_GRADIENTS = ParallelLayout(num_workers=2, shard=Shard.GRADIENTS)
_WEIGHTS = ParallelLayout(num_workers=2, shard=Shard.WEIGHTS)
_SEQUENCE = ParallelLayout(num_workers=2, sequence_ranks=2)


@pytest.mark.parametrize(
    ("parallel", "harms"),
    [
        pytest.param(_WEIGHTS, _KILLED + _HUNG, id="weights", marks=pytest.mark.more),
        # Ranks that share weights wait for one another as these do, and may be read besides.
        pytest.param(_GRADIENTS, _KILLED + _HUNG, id="gradients", marks=pytest.mark.slow),
        pytest.param(_SEQUENCE, _KILLED + _HUNG, id="sequence", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_share_more_train_as_one_and_their_loss_in_the_pass_costs_no_bit(
    engine: RayEngine,
    alone: dict[str, np.ndarray],
    parallel: ParallelLayout,
    harms: tuple[str, ...],
) -> None:
    """The other rank waits for what the lost one would have sent, and may be reading its weights.

    The policy trains from one checkpoint several times: whole, then once for each harm, with a rank
    that dies or hangs.
    """

    async def main(client: EngineClient) -> None:
        await _create(client, "sharing", parallel=parallel)
        found: list[list[str]] = []
        await _run(client, "sharing", 1, save("begin"), None)
        seq = 1
        for harm in ("", *harms):
            if harm:
                seq += 1
                await _run(client, "sharing", seq, load("begin"), None)
            trap = _trap(engine, CrashPoint.RANK_IN_PASS, f"2 {harm}") if harm else None
            found.append([])
            for number in range(1, _UPDATES + 1):
                seq += 1
                await _run(client, "sharing", seq, update(0), random_batch(number, 4))
                found[-1].append((await _weights(client, "sharing"))[0])
            assert trap is None or not trap.exists(), "the rank was lost"
            if not harm:
                _check_alike((await _weights(client, "sharing"))[1], alone)
        assert all(digests == found[0] for digests in found)
        assert len(found) == 1 + len(harms)
        policy = await client.call(Engine.policy, "sharing")
        assert policy.state is PolicyState.READY
        assert policy.info is not None
        # Ranks that share a micro-batch are asked for nothing more.
        assert parallel.shard is None or policy.info.shard == parallel.shard

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
_ALWAYS = (CrashPoint.RANK_AFTER_STEP, "SIGKILL")
# Ranks that share weights lose one that hangs in the pass, and these one that hangs as they copy; a
# rank that is killed while it copies or publishes is lost as one in the pass or at a checkpoint.
_SELDOM = (
    (CrashPoint.RANK_BEFORE_COPIES, "SIGKILL"),
    (CrashPoint.RANK_BEFORE_PUBLISH, "SIGKILL"),
    (CrashPoint.RANK_IN_PASS, "SIGSTOP"),
    (CrashPoint.RANK_BEFORE_CHECKPOINT, "SIGSTOP"),
)


def _how_often(loss: tuple[CrashPoint, str]) -> tuple[pytest.MarkDecorator, ...]:
    if loss == _ALWAYS:
        return ()
    return (pytest.mark.slow if loss in _SELDOM else pytest.mark.more,)


@pytest.mark.parametrize(
    ("point", "harm"),
    [pytest.param(*loss, marks=_how_often(loss)) for loss in _LOSSES],
)
def test_a_rank_that_is_lost_costs_no_bit_and_leaves_no_process(
    engine: RayEngine, harmed: Harmed, point: CrashPoint, harm: str
) -> None:
    async def main(client: EngineClient) -> None:
        first = await harmed.processes()
        # In the middle of a pass.
        trap = _trap(engine, point, f"{1 + (point is CrashPoint.RANK_IN_PASS)} {harm}")
        await harmed.update(client)
        if point is CrashPoint.RANK_BEFORE_CHECKPOINT:
            # Unless it was in a checkpoint that the engine took by itself.
            await done(client, await harmed.submit(client, save(f"after-{harm.lower()}"), 0))
        await harmed.update(client)
        assert (await client.call(Engine.policy, "harmed")).state is PolicyState.READY
        assert not trap.exists(), "the process was lost"
        await _gone(first)

    engine.run(main)


@pytest.mark.more
def test_a_policy_whose_rank_hangs_holds_no_other_up(engine: RayEngine, harmed: Harmed) -> None:
    """The other runs two updates while the first one's ranks copy and nothing comes."""

    async def main(client: EngineClient) -> None:
        first = await harmed.processes()
        others, undisturbed = _processes() - first, harmed.undisturbed
        _trap(engine, CrashPoint.RANK_BEFORE_COPIES, "1 SIGSTOP")
        hung = await harmed.begin_update(client)
        await _stopped(first)
        for _ in range(2):
            await undisturbed.digest(client, len(undisturbed.digests) + 1)
        assert not (await client.call(Engine.get_operation, hung.operation_id, 0.0)).state.is_final
        await harmed.end_update(client, hung)
        await _gone(first)
        assert others <= _processes(), "no process of another policy was replaced"

    engine.run(main)


@pytest.mark.more
def test_a_slow_rank_is_waited_for_and_one_without_memory_costs_its_operation_alone(
    engine: RayEngine, harmed: Harmed
) -> None:
    async def main(client: EngineClient) -> None:
        first = await harmed.processes()
        _trap(engine, CrashPoint.RANK_IN_PASS, "1 SIGSTOP")
        slow = await harmed.begin_update(client)
        stopped = await _stopped(first)
        await asyncio.sleep(_SILENCE_S * 0.6)
        os.kill(stopped, signal.SIGCONT)
        await harmed.end_update(client, slow)
        _trap(engine, CrashPoint.RANK_IN_PASS, "1 MemoryError")
        refused = await harmed.submit(client, update(0), 999)
        ended = await client.call(Engine.get_operation, refused.operation_id, 60.0)
        assert isinstance(ended.result, FailedResult)
        assert ended.result.error["code"] == ErrorCode.RESOURCE_EXHAUSTED
        await harmed.update(client)
        assert first <= _processes(), "nothing was replaced"

    engine.run(main)


@pytest.mark.more
def test_a_network_that_is_cut_between_ranks_costs_no_bit(
    engine: RayEngine, harmed: Harmed
) -> None:
    async def main(client: EngineClient) -> None:
        first = await harmed.processes()
        # They have connections to each other once they have stepped.
        await harmed.update(client)
        _trap(engine, CrashPoint.RANK_BEFORE_COPIES, "1 SIGSTOP")
        cut = await harmed.begin_update(client)
        stopped = await _stopped(first)
        assert _cut(stopped, *(first - {stopped})) > 0
        os.kill(stopped, signal.SIGCONT)
        await harmed.end_update(client, cut)
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


def test_a_cancelled_update_of_two_ranks_changes_nothing(engine: RayEngine, harmed: Harmed) -> None:
    async def main(client: EngineClient) -> None:
        before = await _weights(client, "harmed")
        policy = await client.call(Engine.policy, "harmed")
        operation = submission(policy.next_seq, update(0), random_batch(11, 60), "harmed")
        large = await client.submit(operation)
        await client.call(Engine.cancel_operation, large.operation_id)
        ended = await client.call(Engine.get_operation, large.operation_id, 60.0)
        assert ended.state is OperationState.CANCELLED
        assert await _weights(client, "harmed") == before
        await harmed.update(client)

    engine.run(main)
