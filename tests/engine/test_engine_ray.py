"""The engine on Ray with the real tiny trainer, through `EngineClient` alone.

One cluster, one engine, one policy for the whole module: its tests run in order of seq.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest
import ray
from ray.exceptions import WorkerCrashedError
from sqlalchemy import create_engine, text

from ratoon.cluster.bootstrap import connect, start_engine, stop_engine
from ratoon.cluster.ray_calls import ask, find_actor
from ratoon.cluster.worker_places import find_place
from ratoon.config import CheckpointConfig, RatoonConfig, RayConfig, WorkerConfig
from ratoon.engine.client import EngineClient
from ratoon.engine.commands import Command, Submission
from ratoon.engine.crash_points import CrashPoint
from ratoon.engine.engine import Engine
from ratoon.engine.settings import ENGINE_NAME
from ratoon.engine.types import (
    CheckpointInfo,
    FailedResult,
    ForwardResult,
    Operation,
    PolicyResult,
    PolicySpec,
)
from ratoon.engine.worker.worker import WorkerCore
from ratoon.errors import ErrorCode, RatoonError
from ratoon.method_call import MethodCall
from ratoon_proto.codec import decode_tensor
from ratoon_proto.types import (
    BackendInfo,
    LossConfig,
    LossKind,
    OperationState,
    PhaseSeconds,
    PolicyState,
    Recovery,
    StepReport,
    StepResult,
    ValueLossConfig,
)
from ratoon_proto.v1.training_pb2 import ForwardOutput
from tests.conftest import RayCluster
from tests.engine.harness import (
    DISCARD,
    forward,
    forward_backward,
    from_forward,
    load,
    optim_step,
    save,
    update,
)
from tests.engine.ray_engine import (
    POLICY,
    SPEC,
    RayEngine,
    done,
    manifest_digest,
    random_batch,
    submission,
)


@pytest.fixture(scope="module")
def engine(
    ray_cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RayEngine]:
    assert ray_cluster.address, "the namespace below is this module's own"
    config = RatoonConfig(
        data_root=tmp_path_factory.mktemp("engine"),
        ray=RayConfig(namespace=f"engine-{uuid.uuid4().hex[:8]}"),
        worker=WorkerConfig(device="cpu", num_threads=1),
        checkpoints=CheckpointConfig(every_operations=3, keep=1),
        crash_points=True,
    )
    ray.get([start_engine(config), start_engine(config)])
    yield RayEngine(config)
    stop_engine(config)


def journal_url(engine: RayEngine) -> str:
    return f"sqlite:///{engine.config.data_root / 'ratoon.sqlite'}"


def test_a_policy_is_created_once(engine: RayEngine) -> None:
    async def main(client: EngineClient) -> None:
        with pytest.raises(RatoonError) as caught:
            await client.call(Engine.policy, POLICY)
        assert caught.value.code is ErrorCode.POLICY_NOT_FOUND
        created = await client.call(Engine.create_policy, SPEC)
        seen = [operation.state async for operation in client.watch_operation(created.operation_id)]
        assert seen[-1] is OperationState.DONE
        ended = await client.call(Engine.create_policy, SPEC)
        assert ended.operation_id == created.operation_id
        assert isinstance(ended.result, PolicyResult)
        assert (await client.call(Engine.weight_manifest, POLICY, None)).version == 0
        policy = await client.call(Engine.policy, POLICY)
        assert (policy.state, policy.version, policy.published_version) == (PolicyState.READY, 0, 0)
        assert policy.info is not None
        assert policy.info.vocab_size == 260
        assert await client.call(Engine.policies) == (policy,)
        spare = find_actor("ratoon-spare-worker", engine.config.ray.namespace)
        assert spare is not None
        assert await ask(spare.tenants.remote()) == (POLICY,)

    engine.run(main)


def test_updates_change_the_weights_that_readers_fetch(engine: RayEngine) -> None:
    async def main(client: EngineClient) -> None:
        before = await manifest_digest(client)
        last = await client.submit(submission(2, update(0), random_batch(2)))
        assert last.blocked_by_seq == 1
        first = await client.submit(submission(1, update(0), random_batch(1)))
        again = await client.submit(submission(1, update(0), random_batch(1)))
        assert again.operation_id == first.operation_id
        ended = await done(client, last)
        assert isinstance(ended.result, StepResult)
        assert ended.result.version == 2
        assert ended.result.report.seconds.publish > 0
        version, digest = await manifest_digest(client)
        assert version == 2
        assert digest != before[1]
        manifest = await client.call(Engine.weight_manifest, POLICY, 2)
        model = next(file for file in manifest.files if file.digest == digest)
        path, described = await client.weight_file(POLICY, 2, model.name)
        assert described == model
        start = await client.fetch_chunk(POLICY, digest, 100, 5000)
        assert start == path.read_bytes()[100:5100]

    engine.run(main)


def test_what_answers_looks_at_old_garbage_no_more(engine: RayEngine) -> None:
    """A full collection of the modules held all calls for 0.2 s, again and again."""
    actor = ray.get_actor(ENGINE_NAME, engine.config.ray.namespace)
    num_frozen = ray.get(actor.__ray_call__.remote(lambda _: gc.get_freeze_count()))
    assert cast(int, num_frozen) > 50_000


def test_parts_equal_the_update_bit_for_bit(engine: RayEngine) -> None:
    """ForwardBackward and OptimStep of a batch, from a checkpoint, give the Update's weights."""

    async def main(client: EngineClient) -> None:
        saved = await done(client, await client.submit(submission(3, save("two"), None)))
        assert isinstance(saved.result, CheckpointInfo)
        assert (saved.result.version, saved.result.replay_from_seq) == (2, 4)
        assert await client.call(Engine.list_checkpoints, POLICY) == (saved.result,)
        await done(client, await client.submit(submission(4, update(0), random_batch(4))))
        updated = await manifest_digest(client)
        assert updated[0] == 3
        loading = await client.submit(submission(5, load("two"), None))
        assert (await done(client, loading)).result == saved.result
        assert (await client.call(Engine.policy, POLICY)).version == 2
        await client.submit(submission(6, forward_backward(0), random_batch(4)))
        stepped = await done(client, await client.submit(submission(7, optim_step(), None)))
        assert isinstance(stepped.result, StepResult)
        assert stepped.result.version == 4, "3 names other weights"
        assert await manifest_digest(client) == (4, updated[1])

    engine.run(main)


def test_a_forward_serves_the_updates_that_name_it(engine: RayEngine) -> None:
    async def main(client: EngineClient) -> None:
        batch = random_batch(8)
        read = await done(client, await client.submit(submission(None, forward(0), batch)))
        assert isinstance(read.result, ForwardResult)
        data = await client.fetch_chunk(POLICY, read.result.digest, 0, read.result.size_bytes)
        logprobs = decode_tensor(ForwardOutput.FromString(data).logprobs, max_bytes=len(data))
        assert logprobs.shape == batch.response_tokens.shape
        assert np.less(logprobs[batch.loss_mask], 0).all()
        step = update(0, loss=from_forward(read))
        reports = []
        for seq in (8, 9):
            ended = await done(client, await client.submit(submission(seq, step, batch)))
            assert isinstance(ended.result, StepResult)
            reports.append(ended.result.report)
        assert reports[0].ratio_max == 1.0
        assert reports[1].ratio_max != 1.0

    engine.run(main)


def submit_and_die(namespace: str, operation: Submission) -> None:
    """A caller whose process is killed with 9 as soon as it has the handle."""

    async def main() -> None:
        client = await connect(namespace)
        await client.submit(operation)
        os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(main())


def test_the_caller_that_is_killed_does_not_stop_its_update(engine: RayEngine) -> None:
    """Trap 15: a request coroutine owning the update: Serve cancels it when the caller leaves."""
    operation = submission(10, update(0), random_batch(10, 12))
    caller = ray.remote(num_cpus=0, max_retries=0)(submit_and_die)
    with pytest.raises(WorkerCrashedError):
        ray.get(caller.remote(engine.config.ray.namespace, operation))

    async def main(client: EngineClient) -> None:
        assert (await client.call(Engine.policy, POLICY)).next_seq == 11, "it was accepted"
        before = (await client.call(Engine.policy, POLICY)).version
        ended = await done(client, await client.submit(operation))
        assert isinstance(ended.result, StepResult)
        assert ended.result.version == (await client.call(Engine.policy, POLICY)).version
        assert ended.result.version - before in (0, 1)

    engine.run(main)


def test_a_cancelled_update_leaves_the_weights(engine: RayEngine) -> None:
    async def main(client: EngineClient) -> None:
        before = await manifest_digest(client)
        # An update of 200 groups was sometimes done before it could be cancelled.
        large = await client.submit(submission(11, update(0), random_batch(11, 1000)))
        queued = await client.submit(submission(12, update(0), random_batch(12)))
        cancelled = await client.call(Engine.cancel_operation, queued.operation_id)
        assert cancelled.state is OperationState.CANCELLED
        await client.call(Engine.cancel_operation, large.operation_id)
        ended = await client.call(Engine.get_operation, large.operation_id, 60.0)
        assert ended.state is OperationState.CANCELLED
        await done(client, await client.submit(submission(13, DISCARD, None)))
        assert await manifest_digest(client) == before

    engine.run(main)


def test_uploaded_parts_are_kept_for_retries(engine: RayEngine) -> None:
    async def main(client: EngineClient) -> None:
        await client.call(Engine.put_upload_part, POLICY, "u", 0, b"first")
        await client.call(Engine.put_upload_part, POLICY, "u", 1, b"second")
        for _ in range(2):
            assert await client.call(Engine.get_upload_parts, POLICY, "u", 2) == [
                b"first",
                b"second",
            ]
        with pytest.raises(RatoonError) as caught:
            await client.call(Engine.get_upload_parts, POLICY, "u", 3)
        assert caught.value.code is ErrorCode.UPLOAD_NOT_FOUND

    engine.run(main)


def test_counters_equal_the_journal(engine: RayEngine) -> None:
    with create_engine(journal_url(engine)).connect() as connection:
        rows = connection.execute(
            text("SELECT kind, state, count(*) FROM operations GROUP BY kind, state")
        ).all()
    names = {"applied": "done", "failed": "failed", "cancelled": "cancelled"}
    journal = {(kind, names[state]): count for kind, state, count in rows}

    async def main(client: EngineClient) -> None:
        shown: dict[tuple[str, str], float] = {}
        for line in (await client.call(Engine.metrics_text)).decode().splitlines():
            if line.startswith("ratoon_operations_total{"):
                labels, value = line.split("{")[1].split("} ")
                kind, _, state = (part.split('"')[1] for part in labels.split(","))
                if state in names.values():
                    shown[kind, state] = shown.get((kind, state), 0) + float(value)
        assert shown == journal
        assert shown["update", "cancelled"] == 2

    engine.run(main)


def test_backends_are_those_of_the_worker(engine: RayEngine) -> None:
    async def main(client: EngineClient) -> None:
        found: tuple[BackendInfo, ...] = ()
        while not found:  # Its worker may still import torch.
            found = await client.call(Engine.backends)
        backends = {(backend.op, backend.name): backend for backend in found}
        assert backends["tree_attention", "reference"].available
        assert backends["tree_attention", "reference"].unavailable_reason == ""

    engine.run(main)


def test_killed_processes_come_back_at_the_checkpoint(engine: RayEngine) -> None:
    """The worker's loss fails what is past the checkpoint; the engine goes on by itself."""

    async def main(client: EngineClient) -> None:
        namespace = engine.config.ray.namespace
        ray.kill(ray.get_actor(ENGINE_NAME, namespace), no_restart=False)
        step = await done(client, await client.submit(submission(14, update(0), random_batch(14))))
        assert isinstance(step.result, StepResult)
        retired = step.result.version
        # Or its publication finds the worker lost, and 15 runs after that.
        assert (await client.call(Engine.weight_manifest, POLICY, None)).version == retired
        place = await find_place(POLICY, namespace)
        assert place is not None
        ray.kill(cast("Any", place.worker))
        lost = await client.submit(submission(15, update(0), random_batch(15)))
        ended = await client.call(Engine.get_operation, lost.operation_id, 60.0)
        assert isinstance(ended.result, FailedResult)
        assert ended.result.error["code"] == ErrorCode.WORKER_LOST
        rolled_back = await client.call(Engine.get_operation, step.operation_id, 0.0)
        assert rolled_back.state is OperationState.FAILED
        after = await done(client, await client.submit(submission(16, update(0), random_batch(4))))
        assert isinstance(after.result, StepResult)
        assert after.result.version == retired + 1
        first = await manifest_digest(client)
        await client.submit(submission(17, load("two"), None))
        again = await done(client, await client.submit(submission(18, update(0), random_batch(4))))
        assert isinstance(again.result, StepResult)
        second = await manifest_digest(client)
        assert (first[0], second[0]) == (after.result.version, again.result.version)
        assert first[1] == second[1], "the same step from the same checkpoint"

    engine.run(main)


@dataclass(frozen=True, kw_only=True)
class Life:
    """A policy's spec, its calls, and the points at which a process is killed, by seq."""

    spec: PolicySpec
    calls: tuple[Command, ...]
    points: Mapping[int, CrashPoint]


def _timeless(report: StepReport) -> StepReport:
    """The report without what the machine's speed and memory decide."""
    check = report.self_check
    return replace(
        report,
        seconds=PhaseSeconds(),
        self_check=None if check is None else replace(check, seconds=0.0),
        rank_seconds=(),
        rank_gap=None,
        tokens_per_second=None,
        hardware_mfu=None,
        logical_mfu=None,
        peak_memory_bytes=0,
    )


_VALUE = LossConfig(kind=LossKind.VALUE, value=ValueLossConfig(clip=0.2))
_LIVES = {
    "policy": Life(
        spec=SPEC,
        calls=(update(0),) * 6,
        points={
            2: CrashPoint.ENGINE_AFTER_END,
            3: CrashPoint.ENGINE_BEFORE_END,
            4: CrashPoint.WORKER_IN_APPLY,
        },
    ),
    "critic": Life(
        spec=replace(SPEC, model=replace(SPEC.model, value_head=True)),
        calls=(
            update(0, loss=_VALUE),
            update(0, loss=_VALUE),
            forward_backward(0, loss=_VALUE),
            forward_backward(0, loss=_VALUE),
            optim_step(),
            update(0, loss=_VALUE),
            # Values of all tokens.
            forward(0),
        ),
        points={
            1: CrashPoint.WORKER_AFTER_APPLY,
            2: CrashPoint.WORKER_IN_APPLY,
            3: CrashPoint.WORKER_AFTER_APPLY,
            4: CrashPoint.WORKER_IN_APPLY,
            5: CrashPoint.WORKER_AFTER_APPLY,
            6: CrashPoint.WORKER_BEFORE_APPLY,
        },
    ),
}


@pytest.mark.more
@pytest.mark.parametrize("life", _LIVES)
def test_kills_at_crash_points_change_nothing_of_a_policy_that_replays(
    engine: RayEngine, life: str
) -> None:
    """Every process but the ingress, whose caller this is; beside a policy that nothing happens to.

    At the fourth operation a checkpoint has freed the bodies of the first three. Before the fifth
    its worker is lost, unless it is killed there, and before the sixth the policy is put away.
    """
    folder = engine.config.data_root / "crash-points"
    spec, calls, points = _LIVES[life].spec, _LIVES[life].calls, _LIVES[life].points

    async def ended(client: EngineClient, operation: Operation) -> Operation:
        while True:
            now = await client.call(Engine.get_operation, operation.operation_id, 10.0)
            if now.state.is_final:
                return now
            await asyncio.sleep(0.05)

    async def lose_worker(policy_id: str) -> None:
        """What it is asked fails in a way of its own, after which it refuses everything."""
        query = text("SELECT token FROM policies WHERE policy_id = :policy_id")
        with create_engine(journal_url(engine)).connect() as connection:
            token = connection.execute(query, {"policy_id": policy_id}).scalar_one()
        place = await find_place(policy_id, engine.config.ray.namespace)
        assert place is not None
        with pytest.raises(RatoonError, match="AttributeError"):
            await ask(
                place.worker.compute.remote(
                    policy_id, MethodCall.of(WorkerCore.load, token, policy_id, cast("Any", None))
                )
            )

    async def run(
        client: EngineClient, policy_id: str, kills: bool
    ) -> tuple[list[object], dict[str, str]]:
        own = replace(spec, policy_id=policy_id, recovery=Recovery.REPLAY)
        await ended(client, await client.call(Engine.create_policy, own))
        told: list[object] = []
        for seq, command in enumerate(calls, 1):
            if kills and seq in points:
                (folder / points[seq]).write_text("1")
            if kills and seq == 5 and seq not in points:
                await lose_worker(policy_id)
            if kills and seq == 6:
                away = await client.call(Engine.release_policy, policy_id)
                assert away.state is PolicyState.RELEASED
                assert await find_place(policy_id, engine.config.ray.namespace) is None
            batch = random_batch(seq, with_returns=own.model.value_head)
            body = batch if command.body_digest else None
            submitted = submission(seq, command, body, policy_id)
            result = (await ended(client, await client.submit(submitted))).result
            assert isinstance(result, StepResult | ForwardResult), result
            told.append(replace(result, report=_timeless(result.report)))
        assert list(folder.iterdir()) == [], "a point was not reached"
        policy = await client.call(Engine.policy, policy_id)
        assert policy.next_seq == len(calls) + 1
        manifest = await client.call(Engine.weight_manifest, policy_id, policy.version)
        files = {file.name: file.digest for file in manifest.files}
        await ended(client, await client.call(Engine.delete_policy, policy_id))
        return told, files

    async def main(client: EngineClient) -> None:
        folder.mkdir(exist_ok=True)
        whole = await run(client, "whole", kills=False)
        assert await run(client, "killed", kills=True) == whole

    engine.run(main)


def test_a_restarted_engine_brings_its_policies_back(engine: RayEngine) -> None:
    stop_engine(engine.config)
    ray.get(start_engine(engine.config))

    async def main(client: EngineClient) -> None:
        while (await client.call(Engine.policy, POLICY)).version != 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        step = await client.submit(submission(19, update(0), random_batch(4)))
        ended = await done(client, step)
        assert isinstance(ended.result, StepResult)
        policy = await client.call(Engine.policy, POLICY)
        assert (policy.version, policy.next_seq) == (ended.result.version, 20)

    engine.run(main)


def test_a_deleted_policy_leaves_nothing(engine: RayEngine) -> None:
    async def main(client: EngineClient) -> None:
        deletion = await client.call(Engine.delete_policy, POLICY)
        await done(client, deletion)
        assert await client.call(Engine.policies) == ()
        with pytest.raises(RatoonError) as caught:
            await client.submit(submission(20, DISCARD, None))
        assert caught.value.code is ErrorCode.POLICY_NOT_FOUND
        assert (await client.call(Engine.get_operation, deletion.operation_id, 0.0)).state.is_final
        assert POLICY not in (await client.call(Engine.metrics_text)).decode()
        folder = engine.config.data_root / "policies"
        assert [path for path in folder.iterdir() if path.is_dir()] == []

    engine.run(main)
