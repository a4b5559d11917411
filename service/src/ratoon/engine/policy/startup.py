"""How a controller comes to own its policy, at first and after any crash.

It raises the fencing token on the journal, then on the worker, before it reads either. A worker
that agrees with the journal is kept, and its stored outcome completes the record. Otherwise lost
work is replayed (`policy.recovery`). With `recovery: fail` the policy rolls back to its newest
checkpoint or its initial weights instead, and everything after that fails explicitly.

A policy that is put away gets no worker until something needs one. Its newest checkpoint is its
state, so that its return is a replay of nothing, whatever its `recovery`.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path

from ratoon import metrics
from ratoon.engine.crash_points import CrashPoint
from ratoon.engine.files.paths import (
    Position,
    make_policy_folders,
    policy_leftovers,
    read_position,
)
from ratoon.engine.journal.records import (
    JournalState,
    PolicyHistory,
    RollBack,
    last_in_turn,
    waiting_load,
)
from ratoon.engine.policy import telemetry
from ratoon.engine.policy.checkpointer import Checkpointer
from ratoon.engine.policy.executor import Executor
from ratoon.engine.policy.losses import carry_out, find_loss, find_worker_loss
from ratoon.engine.policy.publisher import Publisher
from ratoon.engine.policy.recovery import (
    Recovered,
    RecoveryStoppedError,
    adopt,
    agrees,
    fail_unsequenced,
    load_newest,
    replay_policy,
    settle_ended,
)
from ratoon.engine.policy.run import PolicyRun, read_run
from ratoon.engine.types import CheckpointInfo
from ratoon.engine.worker.tasks import Numerics, WorkerLostError, WorkerStatus
from ratoon.errors import ErrorCode, RatoonError
from ratoon.log import get_logger
from ratoon.model.spec import FolderBase, ModelInfo
from ratoon.stream.files import remove_folder, remove_paths
from ratoon.stream.versions import list_versions, set_aside, version_folder, whole_version
from ratoon.train.saved_state import read_saved_state
from ratoon.train.spec import OptimizerStates, TrainerSpec
from ratoon.warning_kinds import WarningKind
from ratoon_proto.types import PolicyState, Shard

_LOG = get_logger("startup")


async def start_policy(
    run: PolicyRun,
    executor: Executor,
    publisher: Publisher,
    checkpointer: Checkpointer,
    *,
    is_worker_needed: bool,
) -> None:
    """Make `run` ready to take turns.

    `is_worker_needed`: a policy that is put away is to come back.

    Raises `RatoonError` where the model cannot be loaded, `RecoveryStoppedError`, and
    `NumbersFailedError` where the policy failed for its numbers.
    """
    journal = run.journal
    history, worker = await _take_over(run, is_worker_needed)
    if run.state is PolicyState.ENDED:
        return  # The journal's answer was lost.
    was_away = history.policy.state is PolicyState.RELEASED
    status = worker or _no_worker(history)
    if run.replays:
        await run.archive.restore_bodies({digest for _, digest in await _needed_bodies(run)})
    recovered: Recovered | None = None
    if worker is not None and not (status.is_loaded and agrees(history, status)):
        recovered = await _recover(run, history)
        last_seq, numerics = recovered.last_seq, recovered.loaded.numerics
        status = replace(status, last_seq=last_seq, last_outcome=None, numerics=numerics)
        history = await journal.history(run.policy_id)
        await read_run(run, history.policy.next_seq)
    if worker is not None:
        run.numerics = Numerics.of(status.numerics)
    adopt(run, history, status)
    await settle_ended(run)
    if not was_away:  # No worker has seen those that brought it back.
        fail_unsequenced(run)
    listed, needed = await run.bodies.names(), await _needed_bodies(run)
    await run.check_newest()  # A newer controller's bodies are not in `needed`.
    await run.bodies.reconcile(needed, listed)
    records = [live.record for live in run.ledger.open_operations()]
    run.claims.restore(run.policy_id, records)
    if worker is not None and recovered is None and run.stored_outcome is None:
        # Even an empty window: a cancelled ForwardBackward may have left partial gradients.
        await executor.restore_window()
    is_lost = await _drop_lost_versions(run)
    await publisher.catch_up(has_worker=worker is not None, is_lost=is_lost)
    await checkpointer.start()
    if recovered is not None and recovered.rebased:
        await checkpointer.take_now()
    _note_position(run, history)
    info, known = None, history.policy.info
    if recovered is not None:
        info = replace(recovered.loaded.info, uses_gpu=run.trainer.device != "cpu")
    if was_away and worker is not None:
        run.reach(CrashPoint.ENGINE_IN_RETURN)
    state = PolicyState.RELEASED if worker is None else PolicyState.READY
    await journal.set_policy(run.token, run.policy_id, state, info)
    run.enter(state)
    if recovered is not None:
        await _show(run)
    run.send(telemetry.policy(run.policy_id, run.trainer, info or known))
    run.send(telemetry.versions(run.policy_id, run.version, run.published))


async def _take_over(
    run: PolicyRun, is_worker_needed: bool
) -> tuple[PolicyHistory, WorkerStatus | None]:
    """Fence the policy and its worker, and settle what the journal has lost, if anything.

    The worker's status; None: the policy is put away, and stays so.
    """
    journal, is_first = run.journal, run.state is PolicyState.CREATING
    told = await asyncio.to_thread(read_position, run.paths.position)
    run.position = told or Position()
    run.token = await journal.acquire(run.policy_id, run.position.token)
    history = await journal.history(run.policy_id)
    run.created_at, run.published = history.policy.created_at, history.policy.published
    run.named = history.named
    run.trainer = _with_chosen(run.trainer, history.policy.info)
    if history.policy.state is PolicyState.ENDED:
        run.enter(PolicyState.ENDED, history.policy.failure)
        return history, None
    if history.policy.info is None and history.checkpoints:
        first = history.checkpoints[0].info
        await run.archive.restore_checkpoint(first.checkpoint_id)
        run.trainer = await asyncio.to_thread(_as_saved, run, first)
    await _show(run)
    # Losses are looked for before anything is deleted, and before anything else can fail.
    decided = await find_loss(run, history)
    # The count is read before the worker is started: a policy failed for its numbers gets none.
    await read_run(run, history.policy.next_seq)
    if history.policy.state is PolicyState.RELEASED and not (is_worker_needed or decided):
        # One that an interrupted start, or an interrupted end of it, has left.
        await run.worker.release()
        if is_first:
            await _make_folders(run)
        return history, None
    if isinstance(run.trainer.model.base, FolderBase) and run.trainer.model.base.is_sent:
        await run.archive.restore_model()
    status = await fence_worker(run)
    decided = decided or await find_worker_loss(run, history, status)
    if is_first:
        await _make_folders(run)
    if decided is not None:
        history = await carry_out(run, history, status, decided)
        status = await fence_worker(run)
    return history, status


async def stand_by(run: PolicyRun) -> None:
    """Take over from the journal what needs no worker, for a policy that failed."""
    history = await run.journal.history(run.policy_id)
    adopt(run, history, _no_worker(history))


def _no_worker(history: PolicyHistory) -> WorkerStatus:
    """The status of a worker that would agree with the journal."""
    return WorkerStatus(
        is_loaded=False,
        version=history.policy.version,
        numerics={},
        weights_digest="",
        last_seq=last_in_turn(history),
        last_outcome=None,
    )


async def _show(run: PolicyRun) -> None:
    """Show what the journal has of the newest reports, to a new engine or after a roll-back."""
    records = await run.journal.last_reports(run.policy_id)
    run.send(telemetry.shown_again(run.policy_id, records))


async def _drop_lost_versions(run: PolicyRun) -> bool:
    """List versions that are lost or damaged no more; returns whether the current one is.

    Folders of damaged versions are set aside, those that the journal does not know are removed. A
    worker that may be a step ahead of the journal still has the copy of the current version, which
    is spared.
    """
    listed = run.listed
    spared = None if run.stored_outcome is None else run.version
    there = await asyncio.to_thread(_keep_whole, run.paths.weights, run.policy_id, listed, spared)
    if there != listed:
        _LOG.warning("versions lost", policy_id=run.policy_id, published=listed)
        await run.set_published(tuple(v for v in run.published if v in there))
    return run.version in listed and run.version not in there


def _keep_whole(
    root: Path, policy_id: str, versions: tuple[int, ...], spared: int | None
) -> tuple[int, ...]:
    """Returns the `versions` whose files are whole; all other folders but `spared` are renamed.

    Damaged ones are set aside. A folder of an unknown version is removed: it may be older than the
    journal, and would be taken for the version of that number published next.
    """
    kept: list[int] = []
    for version in dict.fromkeys((*versions, *list_versions(root))):
        try:
            whole_version(root, version, policy_id)
        except RatoonError as error:
            if error.code is not ErrorCode.WEIGHTS_NOT_FOUND:
                _LOG.error("version left", policy_id=policy_id, reason=error.message)
            elif version != spared:
                set_aside(root, version, error.message)
            continue
        if version in versions:
            kept.append(version)
        elif version != spared:
            remove_folder(version_folder(root, version))
    return tuple(kept)


async def _make_folders(run: PolicyRun) -> None:
    """Make the policy's folders, and remove what interrupted writers left there.

    Only after the worker has stopped writing for an earlier controller, and only at the first
    start: later this process may be writing bodies.
    """
    await asyncio.to_thread(make_policy_folders, run.paths)
    leftovers = await asyncio.to_thread(policy_leftovers, run.paths)
    await run.check_newest()  # A newer controller's files would not be in the list.
    await asyncio.to_thread(remove_paths, leftovers)
    await run.archive.start()


def _note_position(run: PolicyRun, history: PolicyHistory) -> None:
    last_seq = last_in_turn(history)
    run.has_come_to(
        history.policy.position,
        max_seq=max((record.seq for record in history.records), default=last_seq),
        last_seq=last_seq,
        version=history.policy.max_version,
    )


def _with_chosen(trainer: TrainerSpec, info: ModelInfo | None) -> TrainerSpec:
    """Keep the optimizer states, the shard and the number of nodes chosen at the policy's first
    load.

    Its checkpoints are of those states, and replay under others gives other bits.
    """
    if info is None:
        return trainer
    if trainer.optimizer_states is None and info.optimizer_states:
        trainer = replace(trainer, optimizer_states=OptimizerStates(info.optimizer_states))
    if trainer.parallel.shard is None and info.shard:
        trainer = replace(trainer, parallel=replace(trainer.parallel, shard=Shard(info.shard)))
    return replace(trainer, num_nodes=info.num_nodes)


def _as_saved(run: PolicyRun, first: CheckpointInfo) -> TrainerSpec:
    """Keep the optimizer states of the checkpoint that the policy is created from."""
    if run.trainer.optimizer_states is not None:
        return run.trainer
    saved = read_saved_state(run.paths.checkpoint(first.checkpoint_id))
    return replace(run.trainer, optimizer_states=OptimizerStates(saved.optimizer_states))


async def fence_worker(run: PolicyRun) -> WorkerStatus:
    """Fence the policy's worker, one in the place of a lost one, or a new one."""
    worker = run.worker
    # The shard of weights is set by name, or was chosen where nodes had as many GPUs each.
    is_even = run.trainer.parallel.shard is Shard.WEIGHTS
    fence = partial(worker.fence, run.token, evenly=is_even, num_nodes=run.trainer.num_nodes)
    try:
        return await fence()
    except WorkerLostError:
        await worker.replace()
        return await fence()


async def _recover(run: PolicyRun, history: PolicyHistory) -> Recovered:
    """Bring a worker that is new, or disagrees with the journal, to a known state."""
    was_away = history.policy.state is PolicyState.RELEASED
    if not (run.replays or was_away):
        recovered, outcome = await _roll_back(run, history), "rolled_back"
    else:
        try:
            recovered, outcome = await replay_policy(run, history), "replayed"
        except RecoveryStoppedError:
            if not run.replays:
                recovered, outcome = await _roll_back(run, history), "rolled_back"
            else:
                run.send([metrics.RECOVERIES.sample(1, run.policy_id, "stopped")])
                raise
    if recovered.rebased:
        numerics, outcome = Numerics.of(recovered.loaded.numerics), "rebased"
        await run.journal.rebase(run.token, run.policy_id, recovered.rebased, numerics)
    if history.policy.next_seq > 1 and not (was_away and outcome == "replayed"):
        run.send([metrics.RECOVERIES.sample(1, run.policy_id, outcome)])
    return recovered


async def _roll_back(run: PolicyRun, history: PolicyHistory) -> Recovered:
    """Load the newest usable checkpoint, and fail everything past it but a LoadCheckpoint whose
    turn it is.

    A crash in between leaves a worker that disagrees with the journal, unless nothing was lost.
    """
    load = waiting_load(history)
    last_seq = (history.policy.next_seq if load is None else load.seq) - 1
    # Nothing is replayed, so missing bodies do not matter.
    base, loaded = await load_newest(run, history, 1, last_seq)
    roll_back = RollBack(
        seq=base.info.seq,
        replay_from_seq=base.info.replay_from_seq,
        version=base.info.version,
        checkpoint_id=base.info.name or (base.info.checkpoint_id if base.info.seq else ""),
        finished_at=run.now(),
        spared_id="" if load is None else load.operation_id,
    )
    changed = await run.journal.roll_back(run.token, run.policy_id, roll_back)
    for record in changed:
        run.send(telemetry.entered(record, JournalState.FAILED))
        live = run.ledger.find(record.operation_id)
        if live is not None:
            live.set_record(record)
            run.ledger.settle(live)
    if changed:
        run.send([metrics.WARNINGS.sample(1, run.policy_id, WarningKind.ROLLED_BACK)])
        _LOG.warning(
            "policy rolled back",
            policy_id=run.policy_id,
            version=roll_back.version,
            num_failed=len(changed),
        )
    kept = tuple(v for v in history.policy.published if v <= roll_back.version)
    if kept != history.policy.published:
        await run.set_published(kept)
    return Recovered(loaded=loaded, last_seq=last_seq, rebased={})


async def _needed_bodies(run: PolicyRun) -> frozenset[tuple[str, str]]:
    """Operation and digest of each body that recovery, the open window or the queue needs."""
    lives, journaled = tuple(run.ledger.open_operations()), frozenset[tuple[str, str]]()
    if run.replays:
        journaled = await run.journal.bodies_in_use(run.policy_id)
    held = [(live.operation_id, live.bodies) for live in lives]
    held += [(record.operation_id, record.bodies) for record in run.window.records.values()]
    return journaled | {(holder, digest) for holder, digests in held for digest in digests}
