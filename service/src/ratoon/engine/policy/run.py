"""The state of a policy in memory, and all that its controller acts through.

A start fills the state from the journal; afterwards each field has one writer, which the class
names. The state changes on the controller's event loop only, and a field changes only after the
journal write that makes it true.

Failures in a row are counted, after which something is given up. A policy fails after too many
steps in a row were skipped for their numbers. That count is a function of the journal, so every
reader gets the same, and only a LoadCheckpoint brings a failed policy back. A step that was taken,
a loaded checkpoint or imported weights reset the count. Operations that change no weights, and
steps without tokens or without a gradient, leave it as it is. An operation, or a publication, fails
after too many workers in a row were lost to it: each loss costs a load and a replay.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from ratoon import metrics
from ratoon.config import CheckpointConfig, LimitsConfig
from ratoon.engine.commands import Submission
from ratoon.engine.crash_points import Reach
from ratoon.engine.files.archive import Archive
from ratoon.engine.files.paths import BodyFiles, PolicyPaths, Position, write_position
from ratoon.engine.journal.journal import Journal
from ratoon.engine.journal.records import (
    JournalState,
    OperationEnd,
    OperationRecord,
    waiting_load,
)
from ratoon.engine.policy import telemetry
from ratoon.engine.policy.limits import Claims
from ratoon.engine.policy.queue import Ledger, LiveOperation, Sequencer, Window
from ratoon.engine.refusals import cancelled, policy_not_ready, version_not_found
from ratoon.engine.types import FailedResult, NamedVersion, Operation, Policy, PolicySpec
from ratoon.engine.worker.tasks import (
    NeighbourLostError,
    Numerics,
    Outcome,
    RemoteWorker,
    WorkerLostError,
)
from ratoon.errors import ErrorCode, RatoonError
from ratoon.log import get_logger
from ratoon.metrics import Change, MetricsSink
from ratoon.train.spec import TrainerSpec
from ratoon_proto.types import PolicyState, Recovery, StepResult

_LOG = get_logger("run")
# Records read first from the end of the journal; doubled until the count is known.
_FIRST_SPAN = 64
T = TypeVar("T")
MAX_LOSSES = 4


class Policies(Protocol):
    """All policies of the engine, for one that asks another; see `Engine`."""

    async def policy(self, policy_id: str) -> Policy: ...

    async def submit(self, submission: Submission) -> Operation: ...

    async def get_operation(self, operation_id: str, wait_s: float) -> Operation: ...

    async def cancel_operation(self, operation_id: str) -> Operation: ...

    async def read_output(self, policy_id: str, digest: str) -> bytes: ...


@dataclass(slots=True, kw_only=True)
class PolicyRun:
    """The state that the parts of one controller share; see the module."""

    spec: PolicySpec
    # A start adds what the first load of the policy chose.
    trainer: TrainerSpec
    journal: Journal
    worker: RemoteWorker
    metrics: MetricsSink
    policies: Policies
    # Seconds since the epoch.
    now: Callable[[], float]
    limits: LimitsConfig
    checkpoints: CheckpointConfig
    paths: PolicyPaths
    bodies: BodyFiles
    # Shared by all policies.
    claims: Claims
    reach: Reach
    archive: Archive = field(default_factory=Archive)

    # Written by each start alone: when the policy was created, the fencing token, the worker's
    # numerics, and the checkpoints in the archive that the start has compared with the journal.
    created_at: float = 0.0
    token: int = 0
    numerics: Numerics = field(default_factory=lambda: Numerics.of({}))
    archived: frozenset[str] = frozenset()
    # Filled by a start, then changed through their own methods.
    sequencer: Sequencer = field(default_factory=lambda: Sequencer(turn=1))
    ledger: Ledger = field(init=False)

    # Written by `enter`. `failure`: why the policy failed or ended.
    state: PolicyState = PolicyState.CREATING
    failure: str = ""
    # Written by the controller: when a call has last named the policy, by a clock that nobody sets.
    called_at: float = field(default_factory=time.monotonic)
    # Written by the executor: versions, and the open window.
    version: int = 0
    max_version: int = 0
    window: Window = field(default_factory=Window)
    # The worker's last outcome, where the journal does not have it yet; the executor completes it.
    stored_outcome: Outcome | None = None
    # Written by `set_published`: versions that can be fetched, in publication order.
    published: tuple[int, ...] = ()
    # Written by `end`, and where names are taken away: versions that callers have named.
    named: tuple[NamedVersion, ...] = ()
    # Written by the breaker: optimizer steps skipped for their numbers since the last one taken.
    skipped_in_row: int = 0
    # Written by `has_come_to`: the content of the position file.
    position: Position = field(default_factory=Position)

    def __post_init__(self) -> None:
        self.ledger = Ledger(on_settled=self.claims.drop)

    @property
    def policy_id(self) -> str:
        return self.spec.policy_id

    @property
    def replays(self) -> bool:
        """Whether lost work is replayed, so that bodies are kept until a checkpoint covers them."""
        return self.spec.recovery is Recovery.REPLAY

    @property
    def listed(self) -> tuple[int, ...]:
        """Versions that can be fetched: those that only their names keep, and the published."""
        kept = {named.version for named in self.named}.difference(self.published)
        return (*sorted(kept), *self.published)

    @property
    def turn(self) -> LiveOperation | None:
        """The operation whose turn it is; None: it has not arrived, or has ended already."""
        turn = self.sequencer.peek()
        return None if turn is None or turn.is_consumed else self.ledger.find(turn.operation_id)

    @property
    def awaits_teachers(self) -> bool:
        """Whether the operation whose turn it is waits for its teachers."""
        live = self.turn
        return live is not None and live.awaits_teachers

    def version_of(self, name: str) -> int:
        """The version of this name. Raises WEIGHTS_NOT_FOUND."""
        for named in self.named:
            if named.name == name:
                return named.version
        raise version_not_found(name)

    def enter(self, state: PolicyState, failure: str = "") -> None:
        """Change the policy's state. `failure`: why it failed or ended; "": it has not."""
        self.state, self.failure = state, failure
        shown = (
            (metrics.POLICY_FAILED, PolicyState.FAILED),
            (metrics.POLICY_RELEASED, PolicyState.RELEASED),
        )
        self.send([gauge.sample(int(state is of), self.policy_id) for gauge, of in shown])

    async def set_published(self, published: tuple[int, ...]) -> None:
        """Change which versions can be fetched, in the journal first."""
        await self.journal.set_published(self.token, self.policy_id, published)
        self.published = published

    async def accept(self, record: OperationRecord, next_seq: int) -> None:
        """See `FencedStore.accept`."""
        count = await self.journal.accept(self.token, record, next_seq)
        self.has_come_to(count, max_seq=record.seq)

    async def end(self, end: OperationEnd, seq: int = 0) -> None:
        """See `FencedStore.end`. `seq`: the operation's, where it ends in its turn."""
        count = await self.journal.end(self.token, self.policy_id, end)
        self.has_come_to(count, last_seq=seq, version=end.version)
        if end.named is not None:
            others = (named for named in self.named if named.name != end.named.name)
            self.named = (*others, end.named)

    def has_come_to(
        self, count: int, *, max_seq: int = 0, last_seq: int = 0, version: int = 0
    ) -> None:
        """Note a write of the journal, before callers hear of it or files are deleted by it."""
        before = self.position
        self.position = Position(
            count=max(count, before.count),
            token=self.token,
            max_seq=max(max_seq, before.max_seq),
            last_seq=max(last_seq, before.last_seq),
            version=max(version, before.version),
        )
        write_position(self.paths.position, self.position)

    async def check_newest(self) -> None:
        """Raises `FencedError` where another controller has taken over."""
        await self.journal.check_token(self.token, self.policy_id)

    def settle(self, live: LiveOperation) -> None:
        """Report an operation that has ended to its callers, the log and the metrics."""
        self.ledger.settle(live)
        log_end(live.record)
        self.send(telemetry.entered(live.record, live.record.state))

    def send(self, changes: Sequence[Change]) -> None:
        self.metrics.send(changes)


async def cancel_queued(run: PolicyRun, live: LiveOperation) -> None:
    """End an operation whose turn has not come. The caller holds the controller's lock.

    Raises what the journal raises; then nothing has changed here.
    """
    record, now = live.record, run.now()
    result = FailedResult(error=cancelled(record.operation_id).to_dict())
    if record.seq:
        end = OperationEnd(
            operation_id=record.operation_id,
            state=JournalState.CANCELLED,
            result=result,
            version=run.version,
            started_at=None,
            finished_at=now,
        )
        await run.end(end)
        run.sequencer.consume(record.seq)
    live.end(JournalState.CANCELLED, result, now)
    run.settle(live)
    for digest in live.bodies:
        await run.bodies.release(record.operation_id, digest)


def log_end(record: OperationRecord) -> None:
    """Write the log's line about an operation that has ended."""
    fields = telemetry.line(record)
    stands_out = fields.keys() & {"error", "skip_reason", "warnings"}
    (_LOG.warning if stands_out else _LOG.info)("operation ended", **fields)


class NumbersFailedError(Exception):
    """The policy is failed for its numbers; the message says why."""


async def note_end(run: PolicyRun, record: OperationRecord) -> None:
    """Count a sequenced operation that ended. Raises `NumbersFailedError` at the limit.

    The caller holds the controller's lock, so that nothing is submitted meanwhile.
    """
    run.skipped_in_row = skipped_after(run.skipped_in_row, record)
    if is_run_too_long(run, run.skipped_in_row):
        await _give_up(run, run.skipped_in_row)


async def read_run(run: PolicyRun, next_seq: int) -> None:
    """Read the count from the journal. Raises as `note_end`."""
    span = _FIRST_SPAN
    while True:
        start = max(1, next_seq - span)
        records = await run.journal.records_from(run.policy_id, start)
        is_known = start == 1 or any(ends_run(record) for record in records)
        count = skipped_in_row(records)
        if is_known or is_run_too_long(run, count):
            break
        span *= 2
    run.skipped_in_row = count
    if is_run_too_long(run, count):
        await _give_up(run, count)


def skipped_in_row(records: Iterable[OperationRecord]) -> int:
    """The count after `records`, in seq order, starting from 0. Pure."""
    count = 0
    for record in records:
        count = skipped_after(count, record)
    return count


def skipped_after(count: int, record: OperationRecord) -> int:
    """The count after a record, given the count before it. Pure."""
    if ends_run(record):
        return 0
    return count + _is_skipped_for_numbers(record)


def ends_run(record: OperationRecord) -> bool:
    """Whether the operation changed the weights, which resets the count. Pure."""
    if record.state is not JournalState.APPLIED or not record.effect.changes_weights:
        return False
    return not (isinstance(record.result, StepResult) and record.result.report.skipped)


def is_run_too_long(run: PolicyRun, count: int) -> bool:
    limit = run.spec.numerics_guard.max_skipped_in_row
    return 0 < limit <= count


def _is_skipped_for_numbers(record: OperationRecord) -> bool:
    if record.state is not JournalState.APPLIED or not isinstance(record.result, StepResult):
        return False
    reason = record.result.report.skip_reason
    return reason is not None and reason.is_of_numbers


async def _give_up(run: PolicyRun, count: int) -> None:
    """Fail the policy and its open operations, unless it is a LoadCheckpoint's turn. Idempotent."""
    history = await run.journal.history(run.policy_id)
    if waiting_load(history) is not None:
        return
    reason = f"{count} optimizer steps in a row were skipped for their numbers"
    # A skipped step closes its window too.
    if history.closed is not None and isinstance(history.closed.result, StepResult):
        last = history.closed.result.report.skip_reason
        reason += f", the last at seq {history.closed.seq}: {last}"
    run.enter(PolicyState.FAILED, reason)
    error = policy_not_ready(run.policy_id, run.state, reason)
    result = FailedResult(error=error.to_dict())
    for record in history.records:
        if record.state.is_final:
            continue
        end = OperationEnd(
            operation_id=record.operation_id,
            state=JournalState.FAILED,
            result=result,
            version=history.policy.version,
            started_at=None,
            finished_at=run.now(),
        )
        await run.end(end)
        run.send(telemetry.entered(replace(record, result=result), JournalState.FAILED))
    for live in run.ledger.open_operations():
        live.fail(error, run.now())
        run.ledger.settle(live)
    raise NumbersFailedError(reason)


class LostWorkers:
    """Remembers the last thing that has lost a worker, by its name."""

    def __init__(self) -> None:
        self._name = ""
        # Why each worker was lost.
        self._reasons: tuple[str, ...] = ()

    async def counted(self, name: str, call: Awaitable[T]) -> T:
        """Await the worker's answer, and count a loss of the worker."""
        try:
            return await call
        except NeighbourLostError:
            raise
        except WorkerLostError as err:
            reasons = self._reasons if self._name == name else ()
            self._name, self._reasons = name, (*reasons, str(err))
            raise

    def check(self, name: str) -> None:
        """Raises WORKER_LOST where too many workers were lost to it."""
        if self._name == name and len(self._reasons) >= MAX_LOSSES:
            message = f"{len(self._reasons)} workers in a row were lost to it, the last: "
            raise RatoonError(ErrorCode.WORKER_LOST, message + self._reasons[-1])
