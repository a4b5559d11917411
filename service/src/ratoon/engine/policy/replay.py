"""Replays a policy's operations after its worker was lost, to the same bits.

Starts at the newest usable checkpoint, or the initial weights. Restores the open window's
ForwardBackwards, then runs every applied operation in seq order with its journaled choices. Failed
and cancelled ones, and those that changed no weights, are skipped.

Replay changes neither the journal nor the disk. A digest that differs from the journal's stops the
policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ratoon import metrics
from ratoon.engine.crash_points import CrashPoint
from ratoon.engine.journal.records import RUN_KINDS, JournalState, OperationRecord, PolicyHistory
from ratoon.engine.policy.run import PolicyRun
from ratoon.engine.types import (
    CheckpointInfo,
    FailedResult,
    LoadCheckpointCommand,
    OperationResult,
    OptimStepCommand,
)
from ratoon.engine.worker.numerics import Numerics, differences
from ratoon.engine.worker.tasks import (
    CheckpointWeights,
    InitialWeights,
    Loaded,
    LoadRequest,
    Outcome,
    UnusableCheckpointError,
)
from ratoon.log import get_logger
from ratoon_proto.types import (
    EmptyResult,
    ImportResult,
    OnChangedNumerics,
    OperationKind,
    OperationState,
    StepResult,
)

_LOG = get_logger("replay")

# The `RUN_KINDS` whose bits depend on the hardware and software they run on.
_COMPUTED_KINDS = (
    OperationKind.UPDATE,
    OperationKind.FORWARD_BACKWARD,
    OperationKind.OPTIM_STEP,
)


class RecoveryStoppedError(Exception):
    """The policy cannot reach the state that the journal records; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """A state that recovery may begin at; `source` has its weights. id "": the initial ones."""

    checkpoint_id: str
    source: InitialWeights | CheckpointWeights
    version: int
    seq: int
    replay_from_seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The worker's state, which includes all operations up to `last_seq`.

    `rebased`: new weights digests by seq, where the replay ran under other numerics than the
    journal's; else empty.
    """

    loaded: Loaded
    last_seq: int
    rebased: Mapping[int, str]


def bases(run: PolicyRun, history: PolicyHistory, kept_from_seq: int) -> Iterator[Base]:
    """Checkpoints, newest first, then initial weights, where nothing after them was freed."""
    for checkpoint in reversed(history.checkpoints):
        info = checkpoint.info
        if info.replay_from_seq >= kept_from_seq:
            folder = str(run.paths.checkpoint(info.checkpoint_id))
            yield Base(
                checkpoint_id=info.checkpoint_id,
                source=CheckpointWeights(folder=folder, weights_digest=checkpoint.weights_digest),
                version=info.version,
                seq=info.seq,
                replay_from_seq=info.replay_from_seq,
            )
    if kept_from_seq <= 1:
        yield Base(checkpoint_id="", source=InitialWeights(), version=0, seq=0, replay_from_seq=1)


def unusable(run: PolicyRun, error: UnusableCheckpointError) -> None:
    """Report a checkpoint that was skipped as unusable."""
    _LOG.error("checkpoint unusable", policy_id=run.policy_id, reason=str(error))
    run.send([metrics.CHECKPOINTS.sample(1, "unusable")])


async def replay_policy(run: PolicyRun, history: PolicyHistory) -> Replayed:
    """Load the worker and replay the journal.

    Raises `RecoveryStoppedError`, `WorkerLostError`, and `RatoonError` where the model cannot be
    loaded.
    """
    base, loaded = await _load(run, history)
    records = await run.ports.journal.records_from(run.policy_id, base.replay_from_seq)
    past = ended_in_order(records, base.replay_from_seq)
    _check_whole(records, past)
    again = _Again(run, Numerics.of(loaded.numerics))
    await again.check_numerics(past)
    await again.open_window([record for record in past if record.seq <= base.seq])
    for record in past:
        if record.seq > base.seq:
            await again.pass_or_run(record)
    last_seq = past[-1].seq if past else base.seq
    _LOG.info(
        "replayed", policy_id=run.policy_id, from_seq=base.seq, to_seq=last_seq, ran=again.num_run
    )
    run.send([metrics.REPLAYED_OPERATIONS.sample(again.num_run)])
    return Replayed(
        loaded=loaded,
        last_seq=max(last_seq, base.seq),
        rebased=again.digests if again.is_rebasing else {},
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


async def _load(run: PolicyRun, history: PolicyHistory) -> tuple[Base, Loaded]:
    faults: list[str] = []
    for base in bases(run, history, history.kept_from_seq):
        request = LoadRequest(
            trainer=run.trainer,
            source=base.source,
            version=base.version,
            last_seq=base.seq,
            digests=True,
        )
        await run.archive.restore_checkpoint(base.checkpoint_id)
        try:
            return base, await run.ports.worker.load(run.token, request)
        except UnusableCheckpointError as error:
            unusable(run, error)
            faults.append(str(error))
    what = "; ".join(faults) or "no checkpoint is new enough"
    raise RecoveryStoppedError(
        f"there is nothing to recover from: {what}; operations below seq {history.kept_from_seq} "
        "cannot be run again"
    )


class _Again:
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
            is_run = record.state is JournalState.APPLIED and record.kind in _COMPUTED_KINDS
            if not (is_run and record.numerics) or record.numerics == self._numerics.digest:
                continue
            then = await run.ports.journal.numerics(record.numerics)
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
        if record.state is not JournalState.APPLIED or record.kind not in RUN_KINDS:
            await run.ports.worker.skip(run.token, record.seq, _journaled_outcome(record))
            return
        await self._select(record)
        if isinstance(record.command, LoadCheckpointCommand):
            await run.archive.restore_checkpoint(record.command.checkpoint_id)
        outcome = await run.ports.worker.apply(run.token, record.to_task(run.paths))
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
            digest = self._window[seq].body_digest
            if not run.paths.body(digest).exists():
                # The worker would be lost to it, again and again.
                raise RecoveryStoppedError(
                    f"forward_backward {seq} cannot be run again: its body {digest} is gone"
                )
        tasks = tuple(self._window[seq].to_task(run.paths) for seq in seqs)
        self.num_run += len(tasks)
        await run.ports.worker.restore(run.token, tasks)

    def _check(self, record: OperationRecord, outcome: Outcome) -> None:
        name = f"{record.kind} {record.seq}"
        if isinstance(outcome.result, FailedResult):
            why = outcome.result.error["message"]
            raise RecoveryStoppedError(f"{name} cannot be run again: {why}")
        if _version(outcome.result) != _version(record.result):
            raise RecoveryStoppedError(
                f"{name} gave version {_version(outcome.result)} when it was run again, "
                f"version {_version(record.result)} at first"
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
    is_forward_backward = record.kind is OperationKind.FORWARD_BACKWARD
    return is_forward_backward and record.state is JournalState.APPLIED


def _version(result: OperationResult | None) -> int | None:
    has_version = isinstance(result, StepResult | CheckpointInfo | ImportResult)
    return result.version if has_version else None


def _journaled_outcome(record: OperationRecord) -> Outcome:
    return Outcome(
        operation_id=record.operation_id,
        state=OperationState(record.state.public),
        result=record.result or EmptyResult(),
        must_restore=False,
        weights_digest=record.weights_digest,
        choices=record.choices,
        started_at=record.started_at,
    )
