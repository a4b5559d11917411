"""The journal's nouns: what is durably known of a policy and of each of its operations.

Enters from controllers through the coordinator, kept by `store.SqlStore`. Invariant: a record moves
accepted -> applying -> applied | failed, or to cancelled before it is applied, and never back; only
`JournalState.APPLIED` records have changed weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from ratoon.engine.checkpoints import Checkpoint, Covered
from ratoon.engine.numerics import Numerics
from ratoon.engine.types import (
    Command,
    ForwardResult,
    Operation,
    OperationKey,
    OperationKind,
    OperationResult,
    OperationState,
    Policy,
    PolicySpec,
    PolicyState,
    Progress,
    StepResult,
)
from ratoon.model.spec import ModelInfo

# Not sequenced: they begin and end a policy.
LIFE_KINDS = (OperationKind.CREATE_POLICY, OperationKind.DELETE_POLICY)

# The operations that end a window once they are applied.
CLOSING_KINDS = (
    OperationKind.UPDATE,
    OperationKind.OPTIM_STEP,
    OperationKind.DISCARD_GRADIENTS,
    OperationKind.LOAD_CHECKPOINT,
)

# The operations that change weights or gradients; recovery passes over the others.
RUN_KINDS = (*CLOSING_KINDS, OperationKind.FORWARD_BACKWARD)


class FencedError(Exception):
    """A newer controller owns the policy: whoever gets this stops, and touches nothing more."""


class JournalConflictError(Exception):
    """The operation ended already, in another way than the caller believes."""


class JournalAwayError(Exception):
    """The database does not answer, or has failed over; what it has is to be read again."""


class JournalState(StrEnum):
    ACCEPTED = "accepted"
    APPLYING = "applying"
    APPLIED = "applied"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in (JournalState.APPLIED, JournalState.FAILED, JournalState.CANCELLED)

    @property
    def public(self) -> OperationState:
        """The state that callers see."""
        return _PUBLIC[self]


_PUBLIC = {
    JournalState.ACCEPTED: OperationState.QUEUED,
    JournalState.APPLYING: OperationState.RUNNING,
    JournalState.APPLIED: OperationState.DONE,
    JournalState.FAILED: OperationState.FAILED,
    JournalState.CANCELLED: OperationState.CANCELLED,
}

NO_PROGRESS = Progress()


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRecord:
    """One row: times in seconds since the epoch, digests in hexadecimal, "" where there is none."""

    operation_id: str
    policy_id: str
    kind: OperationKind
    # 0 and "": CreatePolicy, DeletePolicy and a Forward without a key.
    seq: int
    request_id: str
    payload_hash: str
    # None: CreatePolicy and DeletePolicy, and records that nothing will run again.
    command: Command | None
    body_digest: str
    state: JournalState
    # How the batch is cut, and what else was decided before it was applied.
    plan: dict[str, object] | None
    result: OperationResult | None
    # The policy's version once applied.
    version: int | None
    # Of weights, moments and counters, after the operation.
    weights_digest: str
    # Digest of the `Numerics` that it ran under.
    numerics: str
    created_at: float
    started_at: float | None
    finished_at: float | None

    def to_operation(self, *, progress: Progress, blocked_by_seq: int) -> Operation:
        """The handle that callers see."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRow:
    """`max_version` is the highest number ever given to weights; it never falls."""

    spec: PolicySpec
    state: PolicyState
    version: int
    max_version: int
    # The lowest seq never accepted.
    next_seq: int
    # Of the newest controller; 0: none yet.
    token: int
    created_at: float
    info: ModelInfo | None
    # Versions whose weights can be fetched, in the order in which they were published.
    published: tuple[int, ...]
    # Why it is failed; "": it is not, or nobody could say.
    failure: str

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

    `frees_window`: nothing will run it, or what was before it, again (`recovery: fail`).
    """

    operation_id: str
    state: JournalState
    result: OperationResult
    finished_at: float
    version: int
    weights_digest: str
    frees_window: bool
    checkpoint: Checkpoint | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RollBack:
    """The policy is again as of `seq`, the newest checkpoint's or 0; all after it fails explicitly.

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

    `closed`: the operation that closed it. Commands and plans are there of `kept_from_seq` and all
    after it. Checkpoints are by seq.
    """

    policy: PolicyRow
    closed: OperationRecord | None
    records: tuple[OperationRecord, ...]
    checkpoints: tuple[Checkpoint, ...]
    kept_from_seq: int


class Journal(Protocol):
    """The durable side, as a controller sees it. Every write carries the controller's token.

    Writes raise `FencedError` where a newer token is known, and may be repeated: a second time
    changes nothing. They are durable when they return.
    """

    async def acquire(self, policy_id: str) -> int:
        """A fencing token above every earlier one."""
        ...

    async def history(self, policy_id: str) -> PolicyHistory: ...

    async def records_from(self, policy_id: str, seq: int) -> tuple[OperationRecord, ...]:
        """Those of `seq` and after it, by seq."""
        ...

    async def bodies_in_use(self, policy_id: str) -> Mapping[str, str]:
        """Digests by operation, of all that may run, or run again."""
        ...

    async def results_in_use(self, policy_id: str) -> frozenset[str]:
        """Digests of the Forward results that kept plans name."""
        ...

    async def numerics(self, digest: str) -> Mapping[str, str]:
        """The fields of a record's `numerics`; none where they are not known."""
        ...

    async def find_key(self, policy_id: str, key: OperationKey) -> OperationRecord | None: ...

    async def find_operation(self, operation_id: str) -> OperationRecord | None: ...

    async def accept(self, token: int, record: OperationRecord, next_seq: int) -> None: ...

    async def begin(
        self,
        token: int,
        operation_id: str,
        started_at: float,
        plan: dict[str, object] | None,
        numerics: Numerics,
    ) -> None:
        """Raises `JournalConflictError` where the operation has ended."""
        ...

    async def end(self, token: int, policy_id: str, end: OperationEnd) -> None: ...

    async def amend(self, token: int, operation_id: str, result: OperationResult) -> None:
        """Replace the result of an applied operation (its publish time)."""
        ...

    async def cover(
        self, token: int, policy_id: str, automatic: Checkpoint | None, keep: int
    ) -> Covered:
        """Add an automatic checkpoint, and free what the newest `keep` of all make superfluous."""
        ...

    async def rebase(
        self, token: int, policy_id: str, digests: Mapping[int, str], numerics: Numerics
    ) -> None:
        """Replace weights digests by seq: the operations were run again under other numerics."""
        ...

    async def set_published(
        self, token: int, policy_id: str, published: tuple[int, ...]
    ) -> None: ...

    async def set_policy(
        self, token: int, policy_id: str, state: PolicyState, info: ModelInfo | None
    ) -> None:
        """The state, and that nothing is wrong with the policy any more."""
        ...

    async def fail(self, token: int, policy_id: str, failure: str) -> None:
        """The policy is failed, and why."""
        ...

    async def roll_back(
        self, token: int, policy_id: str, roll_back: RollBack
    ) -> tuple[OperationRecord, ...]:
        """Fail what is past the checkpoint; returns the records that changed."""
        ...

    async def checkpoints(self, policy_id: str) -> tuple[Checkpoint, ...]: ...


def ended_progress(result: OperationResult | None) -> Progress:
    """The progress of an operation that has ended with `result`: all that was planned."""
    if not isinstance(result, StepResult | ForwardResult):
        return NO_PROGRESS
    report = result.report
    return Progress(
        micro_batches_done=report.num_micro_batches,
        micro_batches_planned=report.num_micro_batches,
        tokens_per_second=report.tokens_per_second,
        eta_s=0.0,
    )
