"""The journal's nouns: what is durably known of a policy and of each of its operations.

A record is written twice: accepted, then applied, failed or cancelled, and never back. Only applied
ones changed weights. That an operation is running is known in memory only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ratoon.engine.files.paths import PolicyPaths
from ratoon.engine.journal.checkpoints import Checkpoint
from ratoon.engine.types import (
    Command,
    ForwardResult,
    Operation,
    OperationResult,
    Policy,
    PolicySpec,
)
from ratoon.engine.worker.numerics import Numerics
from ratoon.engine.worker.tasks import Choices, Task
from ratoon.model.spec import ModelInfo
from ratoon_proto.types import OperationKind, OperationState, PolicyState, Progress, StepResult

# Lifecycle operations create or delete a policy and are not sequenced.
LIFECYCLE_KINDS = (OperationKind.CREATE_POLICY, OperationKind.DELETE_POLICY)

# Operations that close a window when applied.
CLOSING_KINDS = (
    OperationKind.UPDATE,
    OperationKind.OPTIM_STEP,
    OperationKind.DISCARD_GRADIENTS,
    OperationKind.LOAD_CHECKPOINT,
    OperationKind.IMPORT_WEIGHTS,
)

# Operations that change weights or gradients; recovery skips all others.
RUN_KINDS = (*CLOSING_KINDS, OperationKind.FORWARD_BACKWARD)


class JournalAwayError(Exception):
    """The database does not answer, or has failed over and must be read again."""


class JournalState(StrEnum):
    ACCEPTED = "accepted"
    # In memory only: the journal has such an operation as accepted.
    APPLYING = "applying"
    APPLIED = "applied"
    FAILED = "failed"
    CANCELLED = "cancelled"
    # The journal lost how it ended, and the policy went on from a state that includes it.
    LOST = "lost"

    @property
    def is_final(self) -> bool:
        return self not in (JournalState.ACCEPTED, JournalState.APPLYING)

    @property
    def public(self) -> OperationState:
        """The state as callers see it."""
        return _PUBLIC[self]


_PUBLIC = {
    JournalState.ACCEPTED: OperationState.QUEUED,
    JournalState.APPLYING: OperationState.RUNNING,
    JournalState.APPLIED: OperationState.DONE,
    JournalState.FAILED: OperationState.FAILED,
    JournalState.CANCELLED: OperationState.CANCELLED,
    JournalState.LOST: OperationState.FAILED,
}

NO_PROGRESS = Progress()


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRecord:
    """One row: times in seconds since the epoch, digests in hexadecimal, "" where there is none."""

    operation_id: str
    policy_id: str
    kind: OperationKind
    # 0 and "": lifecycle operations, and a Forward without a key.
    seq: int
    request_id: str
    payload_hash: str
    # None: lifecycle operations, and records that nothing will replay.
    command: Command | None
    body_digest: str
    body_bytes: int
    # The API key that it counts against while open; "": none.
    key_id: str
    state: JournalState
    # None: not applied, or nothing will replay it.
    choices: Choices | None
    result: OperationResult | None
    # The policy's version once applied. Of a lost one: the version that the policy went on from
    # after it, with no window open; None: with one open, or from a later one.
    version: int | None
    # Of weights, moments and counters, after the operation.
    weights_digest: str
    # Digest of the `Numerics` that it ran under.
    numerics: str
    created_at: float
    started_at: float | None
    finished_at: float | None

    def to_operation(self, *, progress: Progress, blocked_by_seq: int) -> Operation:
        """The handle as callers see it."""
        return Operation(
            operation_id=self.operation_id,
            policy_id=self.policy_id,
            kind=self.kind,
            seq=self.seq,
            request_id=self.request_id,
            state=self.state.public,
            blocked_by_seq=blocked_by_seq,
            progress=progress,
            created_at=self.created_at,
            started_at=self.started_at,
            finished_at=self.finished_at,
            result=self.result,
        )

    def to_task(self, paths: PolicyPaths) -> Task:
        """The worker's task, once the choices are made."""
        assert self.command is not None
        assert self.choices is not None
        return Task(
            operation_id=self.operation_id,
            seq=self.seq,
            command=self.command,
            choices=self.choices,
            paths=paths,
            started_at=self.started_at,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRow:
    """`max_version` is the highest version number ever given to weights; it never falls."""

    spec: PolicySpec
    state: PolicyState
    version: int
    max_version: int
    # The lowest seq never accepted.
    next_seq: int
    # Fencing token of the newest controller; 0: none yet.
    token: int
    created_at: float
    info: ModelInfo | None
    # Versions whose weights can be fetched, in publication order.
    published: tuple[int, ...]
    # Why the policy failed; "": it has not, or the cause is unknown.
    failure: str
    # Number of writes that callers could be told of. It grows with each and never falls.
    position: int

    def to_policy(self) -> Policy:
        return Policy(
            spec=self.spec,
            state=self.state,
            version=self.version,
            next_seq=self.next_seq,
            created_at=self.created_at,
            info=self.info,
            published_version=self.published[-1] if self.published else None,
            failure=self.failure,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationEnd:
    """How an operation ended. `version`: the policy's afterwards.

    `choices`: those it was applied with. `numerics`: those it ran under; None: it did not run.
    `checkpoint`: the one that it saved. `frees_window`: neither it nor anything before it will be
    replayed (`recovery: fail`).
    """

    operation_id: str
    state: JournalState
    result: OperationResult
    version: int
    started_at: float | None
    finished_at: float
    choices: Choices | None = None
    weights_digest: str = ""
    numerics: Numerics | None = None
    checkpoint: Checkpoint | None = None
    frees_window: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RollBack:
    """Back to `seq`, the newest checkpoint's or 0; later operations fail explicitly.

    ForwardBackwards fail from `replay_from_seq` on: a checkpoint holds no gradients.
    """

    seq: int
    replay_from_seq: int
    version: int
    checkpoint_id: str
    finished_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyHistory:
    """What a starting controller reads: the policy and its records since the last closed window.

    `closed`: the operation that closed it. Commands and choices are kept from `kept_from_seq` on.
    Checkpoints are in seq order.
    """

    policy: PolicyRow
    closed: OperationRecord | None
    records: tuple[OperationRecord, ...]
    checkpoints: tuple[Checkpoint, ...]
    kept_from_seq: int


def ended_progress(result: OperationResult | None) -> Progress:
    """The progress of an operation that ended with `result`: all that was planned."""
    if not isinstance(result, StepResult | ForwardResult):
        return NO_PROGRESS
    report = result.report
    return Progress(
        micro_batches_done=report.num_micro_batches,
        micro_batches_planned=report.num_micro_batches,
        tokens_per_second=report.tokens_per_second or 0.0,
        eta_s=0.0,
    )
