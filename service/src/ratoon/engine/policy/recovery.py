"""How a starting controller brings worker, memory and journal to the same state.

A worker that agrees with the journal is adopted: operations below the current turn are past, the
others are queued.

Any other worker loads the newest usable checkpoint, or the initial weights, and replays the
policy's operations to the same bits. It restores the open window's ForwardBackwards, then runs
every applied operation in seq order with its journaled choices. Failed and cancelled ones, and
those that changed no weights, are skipped. Replay changes neither the journal nor the disk. A
digest that differs from the journal's stops the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ratoon import metrics
from ratoon.engine.commands import LoadCheckpointCommand, OptimStepCommand
from ratoon.engine.crash_points import CrashPoint
from ratoon.engine.journal.records import (
    Checkpoint,
    JournalState,
    OperationRecord,
    PolicyHistory,
)
from ratoon.engine.policy.queue import Sequencer, Window
from ratoon.engine.policy.run import PolicyRun
from ratoon.engine.types import CheckpointInfo, FailedResult, version_of
from ratoon.engine.worker.tasks import (
    CheckpointWeights,
    InitialWeights,
    Loaded,
    LoadRequest,
    Numerics,
    Outcome,
    UnusableCheckpointError,
    WorkerStatus,
    differences,
)
from ratoon.engine.worker.worker import WorkerCore
from ratoon.errors import ErrorCode, RatoonError
from ratoon.log import get_logger
from ratoon_proto.types import (
    EmptyResult,
    OnChangedNumerics,
    OperationState,
)

_LOG = get_logger("recovery")
# The policy before its first operation: the weights of the model spec.
INITIAL = Checkpoint(
    info=CheckpointInfo(
        checkpoint_id="", version=0, seq=0, replay_from_seq=1, created_at=0.0, size_bytes=0
    ),
    weights_digest="",
)


def agrees(history: PolicyHistory, status: WorkerStatus) -> bool:
    """Whether a worker's state matches the journal, except for how its last seq ended. Pure."""
    closed, is_pending = history.closed, False
    if history.policy.info is None:
        return False  # Its first load did not finish, so the model info is lost.
    if closed is not None and closed.seq > status.last_seq:
        return False  # A recovery did not finish.
    if not _has_journaled_seqs(history, status):
        return False
    for record in history.records:
        is_last = record.seq == status.last_seq and status.last_outcome is not None
        if is_last and record.state.is_final and not _ended_alike(record, status):
            return False
        if record.seq <= status.last_seq and not record.state.is_final:
            if not is_last:
                return False
            is_pending = True
        if record.seq > status.last_seq and record.state is JournalState.APPLIED:
            return False
    if status.last_seq >= history.policy.next_seq:
        return False
    return is_pending or _has_journaled_state(history, status)


def adopt(run: PolicyRun, history: PolicyHistory, status: WorkerStatus) -> None:
    """Take over versions, window and queue from the journal."""
    policy = history.policy
    run.version, run.max_version = policy.version, policy.max_version
    run.published = policy.published
    by_seq = {record.seq: record for record in history.records}
    last = by_seq.get(status.last_seq)
    run.stored_outcome, turn = None, status.last_seq + 1
    if last is not None and not last.state.is_final:
        assert status.last_outcome is not None
        run.stored_outcome, turn = status.last_outcome, last.seq
    run.window = Window()
    run.sequencer = Sequencer(turn=turn)
    for record in history.records:
        if record.seq < turn:
            _adopt_past(run, record)
        else:
            _adopt_open(run, record)


async def settle_ended(run: PolicyRun) -> None:
    """Settle open operations that have ended in the journal, whose answer was lost.

    One that the journal lost altogether fails; the caller may submit it again.
    """
    for live in run.ledger.open_operations():
        record = await run.journal.find_operation(live.operation_id)
        if record is None and live.record.seq:
            error = RatoonError(ErrorCode.UNAVAILABLE, "the journal has lost it: submit it again")
            live.fail(error, run.now())
            run.settle(live)
        elif record is not None and record.state.is_final:
            live.set_record(record)
            run.settle(live)


def fail_unsequenced(run: PolicyRun) -> None:
    """Fail open Forwards without a key: they are not journaled, so they are lost."""
    for live in run.ledger.open_operations():
        if live.record.seq == 0:
            error = RatoonError(ErrorCode.WORKER_LOST, "the worker was lost; submit it again")
            live.fail(error, run.now())
            run.settle(live)


def _has_journaled_seqs(history: PolicyHistory, status: WorkerStatus) -> bool:
    """Whether every operation that the worker has seen is in the journal, the last one by its id.

    A database that failed over may have lost some.
    """
    seen = [record for record in history.records if record.seq <= status.last_seq]
    closed_seq = history.closed.seq if history.closed else 0
    if [record.seq for record in seen] != list(range(closed_seq + 1, status.last_seq + 1)):
        return False
    last = seen[-1] if seen else history.closed
    if last is None or status.last_outcome is None:
        return True
    return last.operation_id == status.last_outcome.operation_id


def _ended_alike(record: OperationRecord, status: WorkerStatus) -> bool:
    """Whether worker and journal agree that the operation was applied, where that matters."""
    outcome = status.last_outcome
    assert outcome is not None
    is_done = outcome.state is OperationState.DONE
    return not record.effect.is_replayed or is_done == (record.state is JournalState.APPLIED)


def _has_journaled_state(history: PolicyHistory, status: WorkerStatus) -> bool:
    """Whether versions match, and digests where both sides have one."""
    journaled = history.closed.weights_digest if history.closed else ""
    has_digests = bool(journaled and status.weights_digest)
    is_same = not has_digests or journaled == status.weights_digest
    return is_same and status.version == history.policy.version


def _adopt_past(run: PolicyRun, record: OperationRecord) -> None:
    if record.state is JournalState.LOST:
        # Gradients of the window are lost, and nobody knows which.
        run.window = run.window.with_failed(record.seq)
        return
    if not record.effect.adds_to_window:
        return
    if record.state is JournalState.APPLIED:
        run.window = run.window.with_applied(record)
    elif record.state is JournalState.FAILED:
        run.window = run.window.with_failed(record.seq)


def _adopt_open(run: PolicyRun, record: OperationRecord) -> None:
    run.sequencer.accept(record.seq, record.operation_id)
    if record.state.is_final:
        run.sequencer.consume(record.seq)
        return
    live = run.ledger.find(record.operation_id) or run.ledger.add(record)
    live.set_record(record)
    # The worker has run it, so it can no longer be cancelled as a queued one.
    stored = run.stored_outcome
    live.is_started = stored is not None and stored.operation_id == record.operation_id
    if stored is not None and live.is_started:
        live.start(stored.started_at)
        # Keeps the files that the choices name.
        live.set_record(replace(live.record, choices=stored.choices))


class RecoveryStoppedError(Exception):
    """The policy cannot reach the state that the journal records; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """The worker's state, which includes all operations up to `last_seq`.

    `rebased`: new weights digests by seq, where a replay ran under other numerics than the
    journal's; else empty.
    """

    loaded: Loaded
    last_seq: int
    rebased: Mapping[int, str]


async def load_newest(
    run: PolicyRun, history: PolicyHistory, kept_from_seq: int, last_seq: int | None = None
) -> tuple[Checkpoint, Loaded]:
    """Load the newest usable state after which nothing that must be replayed was freed.

    `last_seq`: the seq that the worker counts on from; None: the checkpoint's. Raises
    `RecoveryStoppedError` where there is no such state, `WorkerLostError`, and `RatoonError` where
    the model cannot be loaded.
    """
    faults: list[str] = []
    initial = (INITIAL,) if run.spec.from_checkpoint is None else ()
    states = (*reversed(history.checkpoints), *initial)
    for base in (state for state in states if state.info.replay_from_seq >= kept_from_seq):
        try:
            seq = base.info.seq if last_seq is None else last_seq
            return base, await load_state(run, base, seq)
        except UnusableCheckpointError as error:
            _LOG.error("checkpoint unusable", policy_id=run.policy_id, reason=str(error))
            run.send([metrics.CHECKPOINTS.sample(1, run.policy_id, "unusable")])
            faults.append(str(error))
    what = "; ".join(faults) or "no checkpoint is new enough"
    raise RecoveryStoppedError(
        f"there is nothing to recover from: {what}; operations below seq {kept_from_seq} cannot be "
        "run again"
    )


async def load_state(run: PolicyRun, state: Checkpoint, last_seq: int) -> Loaded:
    """Have the worker load a checkpoint, or `INITIAL`, as the policy's state at `last_seq`.

    Raises `UnusableCheckpointError`, and as `load_newest`.
    """
    name, source = state.info.checkpoint_id, InitialWeights()
    origin = run.spec.from_checkpoint
    if name:
        await run.archive.restore_checkpoint(name)
        folder = str(run.paths.checkpoint(name))
        source = CheckpointWeights(folder=folder, weights_digest=state.weights_digest)
    request = LoadRequest(
        trainer=run.trainer,
        source=source,
        version=state.info.version,
        last_seq=last_seq,
        digests=run.replays,
        resets_optimizer=origin is not None and not (origin.with_optimizer or state.info.seq),
    )
    return await run.worker.call(WorkerCore.load, run.token, run.policy_id, request)


async def replay_policy(run: PolicyRun, history: PolicyHistory) -> Recovered:
    """Load the worker and replay the journal. Raises as `load_newest`."""
    checkpoint, loaded = await load_newest(run, history, history.kept_from_seq)
    base = checkpoint.info
    records = await run.journal.records_from(run.policy_id, base.replay_from_seq)
    past = ended_in_order(records, base.replay_from_seq)
    _check_whole(records, past)
    replayer = Replayer(run, Numerics.of(loaded.numerics))
    await replayer.check_numerics(past)
    await replayer.open_window([record for record in past if record.seq <= base.seq])
    for record in past:
        if record.seq > base.seq:
            await replayer.pass_or_run(record)
    last_seq = past[-1].seq if past else base.seq
    _LOG.info(
        "replayed",
        policy_id=run.policy_id,
        from_seq=base.seq,
        to_seq=last_seq,
        ran=replayer.num_run,
    )
    run.send([metrics.REPLAYED_OPERATIONS.sample(replayer.num_run, run.policy_id)])
    return Recovered(
        loaded=loaded,
        last_seq=max(last_seq, base.seq),
        rebased=replayer.digests if replayer.is_rebasing else {},
    )


def ended_in_order(
    records: tuple[OperationRecord, ...], from_seq: int
) -> tuple[OperationRecord, ...]:
    """The contiguous ended records from `from_seq` on, up to the first that is open or missing."""
    past: list[OperationRecord] = []
    for record in records:
        if record.seq != from_seq + len(past) or not record.state.is_final:
            break
        past.append(record)
    return tuple(past)


def _check_whole(records: tuple[OperationRecord, ...], past: tuple[OperationRecord, ...]) -> None:
    """Raises `RecoveryStoppedError` where the journal lacks operations before an applied one."""
    applied = [r.seq for r in records[len(past) :] if r.state is JournalState.APPLIED]
    if applied:
        before = f"all before it but the last {len(past)}" if past else "what was before it"
        raise RecoveryStoppedError(f"seq {applied[0]} is applied, and the journal lacks {before}")


class Replayer:
    """Replays records in seq order on a loaded worker."""

    def __init__(self, run: PolicyRun, numerics: Numerics) -> None:
        self._run = run
        self._numerics = numerics
        self._window: dict[int, OperationRecord] = {}
        self.is_rebasing = False
        self.num_run = 0
        # Weights digests of what ran, by seq.
        self.digests: dict[int, str] = {}

    async def check_numerics(self, past: tuple[OperationRecord, ...]) -> None:
        """Check that these numerics can give the journal's bits. Raises `RecoveryStoppedError`."""
        run = self._run
        for record in past:
            is_run = record.state is JournalState.APPLIED and record.effect.depends_on_numerics
            if not (is_run and record.numerics) or record.numerics == self._numerics.digest:
                continue
            then = await run.journal.numerics(record.numerics)
            what = f"seq {record.seq} ran under other numerics than there are now: "
            what += differences(then, self._numerics.fields)
            if run.spec.on_changed_numerics is OnChangedNumerics.STOP:
                raise RecoveryStoppedError(what)
            _LOG.warning("numerics changed", policy_id=run.policy_id, reason=what)
            self.is_rebasing = True
            return

    async def open_window(self, records: list[OperationRecord]) -> None:
        """Restore the gradients of the window that was open when the checkpoint was taken."""
        for record in records:
            if _is_gradient(record):
                self._window[record.seq] = record
        if self._window:
            await self._restore(tuple(self._window))

    async def pass_or_run(self, record: OperationRecord) -> None:
        """Skip or replay one operation. Raises `RecoveryStoppedError`."""
        run = self._run
        run.reach(CrashPoint.ENGINE_IN_REPLAY)
        if record.state is not JournalState.APPLIED or not record.effect.is_replayed:
            outcome = await run.worker.call(
                WorkerCore.skip, run.token, record.seq, _journaled_outcome(record)
            )
            if record.state is JournalState.DISCARDED:
                self._window.clear()
                self.digests[record.seq] = outcome.weights_digest
            return
        await self._select(record)
        if isinstance(record.command, LoadCheckpointCommand):
            assert record.choices is not None
            assert record.choices.checkpoint is not None
            await run.archive.restore_checkpoint(record.choices.checkpoint.checkpoint_id)
        outcome = await run.worker.call(WorkerCore.apply, run.token, record.to_task(run.paths))
        self.num_run += 1
        self._check(record, outcome)
        if _is_gradient(record):
            self._window[record.seq] = record
        else:
            self._window.clear()

    async def _select(self, record: OperationRecord) -> None:
        """Restore only the gradients that an OptimStep with `include_seqs` steps on."""
        command = record.command
        if isinstance(command, OptimStepCommand) and command.include_seqs:
            selected = tuple(sorted(command.include_seqs))
            if selected != tuple(self._window):
                await self._restore(selected)

    async def _restore(self, seqs: tuple[int, ...]) -> None:
        run = self._run
        for seq in seqs:
            for digest in self._window[seq].bodies:
                if run.paths.body(digest).exists():
                    continue
                # The worker would be lost to it, again and again.
                raise RecoveryStoppedError(
                    f"forward_backward {seq} cannot be run again: its body {digest} is gone"
                )
        tasks = tuple(self._window[seq].to_task(run.paths) for seq in seqs)
        self.num_run += len(tasks)
        await run.worker.call(WorkerCore.restore, run.token, tasks)

    def _check(self, record: OperationRecord, outcome: Outcome) -> None:
        name = f"{record.kind} {record.seq}"
        if isinstance(outcome.result, FailedResult):
            why = outcome.result.error["message"]
            raise RecoveryStoppedError(f"{name} cannot be run again: {why}")
        now, then = version_of(outcome.result), version_of(record.result)
        if now != then:
            raise RecoveryStoppedError(
                f"{name} gave version {now} when it was run again, version {then} at first"
            )
        self.digests[record.seq] = outcome.weights_digest
        if outcome.weights_digest == record.weights_digest or not record.weights_digest:
            return
        what = (
            f"{name} gave the weights digest {outcome.weights_digest} when it was run again, the "
            f"journal has {record.weights_digest}"
        )
        if not self.is_rebasing:
            raise RecoveryStoppedError(what)
        _LOG.warning("weights differ", policy_id=self._run.policy_id, reason=what)


def _is_gradient(record: OperationRecord) -> bool:
    return record.effect.adds_to_window and record.state is JournalState.APPLIED


def _journaled_outcome(record: OperationRecord) -> Outcome:
    return Outcome(
        operation_id=record.operation_id,
        state=OperationState(record.state.public),
        result=record.result or EmptyResult(),
        discards_gradients=record.state is JournalState.DISCARDED,
        weights_digest=record.weights_digest,
        choices=record.choices,
        started_at=record.started_at,
    )
