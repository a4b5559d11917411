"""The journal's nouns: durable knowledge of a policy, its operations and its checkpoints.

A record is written twice: accepted, then applied, failed, discarded or cancelled, and never back.
Only applied ones changed weights. That an operation is running is known in memory only. Where state
and journal part, records change once more, and what is lost fails explicitly: after a rollback the
state lacks what the journal has; after an adoption it has what the journal lost.

A caller's checkpoint stays until its name is taken away: by a deletion, by another of the same
name, by `keep_last` of a later one, or once it expires. From then on it is the service's own, as
automatic ones are from the start, and deleted once recovery no longer needs it. Folders of the
service's own choice start with `AUTOMATIC_PREFIX`, which is refused to callers.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from ratoon.engine.commands import Command, Effect, effect_of
from ratoon.engine.files.paths import PolicyPaths
from ratoon.engine.types import (
    CheckpointInfo,
    FailedResult,
    ForwardResult,
    NamedVersion,
    Operation,
    OperationResult,
    Policy,
    PolicySpec,
)
from ratoon.engine.worker.tasks import Choices, Numerics, Task
from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon.model.spec import ModelInfo
from ratoon_proto.types import OperationKind, OperationState, PolicyState, Progress, StepResult

AUTOMATIC_PREFIX = "auto-"
_OWN_SUFFIX = "-own"
# `replay_from_seq` of a checkpoint past which its policy was rolled back.
NO_RECOVERY = 0


class JournalAwayError(Exception):
    """The database does not answer, or has failed over and must be read again."""


class JournalState(StrEnum):
    ACCEPTED = "accepted"
    # This state is in memory only: the journal has such an operation as accepted.
    APPLYING = "applying"
    APPLIED = "applied"
    FAILED = "failed"
    CANCELLED = "cancelled"
    # It failed, and the window's gradients were discarded by it.
    DISCARDED = "discarded"
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
    JournalState.DISCARDED: OperationState.FAILED,
    JournalState.LOST: OperationState.FAILED,
}


NO_PROGRESS = Progress()


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRecord:
    """One row: times in seconds since the epoch, digests in hexadecimal, "" where there is none.

    With its defaults it is a lifecycle operation that was just accepted; all others have a command.
    """

    operation_id: str
    policy_id: str
    kind: OperationKind
    # 0 and "": lifecycle operations, and a Forward without a key.
    seq: int = 0
    request_id: str = ""
    payload_hash: str
    # It is None in lifecycle operations, and in records that nothing will replay.
    command: Command | None = None
    body_digest: str = ""
    body_bytes: int = 0
    # The API key that it counts against while open; "": none.
    key_id: str = ""
    state: JournalState = JournalState.ACCEPTED
    # They are None where the operation was not applied, or nothing will replay it.
    choices: Choices | None = None
    result: OperationResult | None = None
    # The policy's version once applied. Of a lost one: the version that the policy went on from
    # after it, with no window open; None: with one open, or from a later one.
    version: int | None = None
    # Digest of weights, moments and counters after the operation.
    weights_digest: str = ""
    # Digest of the `Numerics` that it ran under.
    numerics: str = ""
    created_at: float
    started_at: float | None = None
    finished_at: float | None = None

    @property
    def bodies(self) -> tuple[str, ...]:
        """Digests of the files that it is run from: its batch, and what teachers said of it."""
        answers = () if self.choices is None else self.choices.teachers
        own = (self.body_digest,) if self.body_digest else ()
        return own + tuple(answer.digest for answer in answers)

    @property
    def effect(self) -> Effect:
        """The effect that the operation has once it is applied."""
        return effect_of(self.kind)

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
    # Why the policy failed or ended; "": it has not, or the cause is unknown.
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
    `checkpoint`: the one that it saved. `named`: the version that it named. `frees_window`: neither
    it nor anything before it will be replayed (`recovery: fail`).
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
    named: NamedVersion | None = None
    # How many checkpoints of callers stay beside those that are pinned; 0: all.
    keep_last: int = 0
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
    # An operation that has not ended and stays as it is; "": none.
    spared_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyHistory:
    """A starting controller reads this: the policy and its records since the last closed window.

    `closed`: the operation that closed it. Commands and choices are kept from `kept_from_seq` on.
    Checkpoints are in seq order.
    """

    policy: PolicyRow
    closed: OperationRecord | None
    records: tuple[OperationRecord, ...]
    checkpoints: tuple[Checkpoint, ...]
    kept_from_seq: int
    named: tuple[NamedVersion, ...]


def last_in_turn(history: PolicyHistory) -> int:
    """The highest seq that has ended, as have all before it. Pure."""
    last_seq = history.closed.seq if history.closed else 0
    for record in history.records:
        if record.seq != last_seq + 1 or not record.state.is_final:
            break
        last_seq = record.seq
    return last_seq


def waiting_load(history: PolicyHistory) -> OperationRecord | None:
    """The LoadCheckpoint whose turn it is; None: it is another operation's, or nobody's. Pure."""
    seq = last_in_turn(history) + 1
    loads = (r for r in history.records if r.kind is OperationKind.LOAD_CHECKPOINT)
    return next((record for record in loads if record.seq == seq), None)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """`weights_digest`: of the saved state; "": not known."""

    info: CheckpointInfo
    weights_digest: str

    @property
    def is_automatic(self) -> bool:
        """Whether the service took it by itself: no LoadCheckpoint names it."""
        folder = self.info.checkpoint_id
        return folder.startswith(AUTOMATIC_PREFIX) and not folder.endswith(_OWN_SUFFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Covered:
    """Files that a checkpoint made superfluous: bodies (operation id, digest), checkpoints by id.

    `position`: the policy's, by which files are deleted that an earlier journal would still need.
    """

    bodies: tuple[tuple[str, str], ...]
    checkpoint_ids: tuple[str, ...]
    position: int


def automatic_id(seq: int, token: int) -> str:
    """Id of the automatic checkpoint at `seq` by the controller with this fencing token.

    The token makes it unique, so no controller deletes another's checkpoint.
    """
    return f"{AUTOMATIC_PREFIX}{seq}-{token}"


def unused_id(name: str, seq: int, token: int, checkpoints: Iterable[Checkpoint]) -> str:
    """Folder of a caller's checkpoint: its name, unless a checkpoint has that folder still."""
    if name not in {checkpoint.info.checkpoint_id for checkpoint in checkpoints}:
        return name
    return f"{automatic_id(seq, token)}{_OWN_SUFFIX}"


def unused_name(name: str, names: Iterable[str]) -> str:
    """The name, with as many dashes behind it as make it one that is not among `names`."""
    taken = frozenset(names)
    while name in taken:
        name += "-"
    return name


def check_own_id(checkpoint_id: str) -> None:
    """Raises INVALID_ARGUMENT for an id that callers may not use."""
    if checkpoint_id.startswith(AUTOMATIC_PREFIX):
        raise invalid("checkpoint_id", checkpoint_id, f"a name without {AUTOMATIC_PREFIX} in front")


def kept_checkpoints(checkpoints: tuple[Checkpoint, ...], keep: int) -> tuple[Checkpoint, ...]:
    """The newest `keep` of `checkpoints`, which are in seq order: recovery may begin at these."""
    assert keep >= 1
    return tuple(c for c in checkpoints if c.info.replay_from_seq != NO_RECOVERY)[-keep:]


def first_uncovered_seq(checkpoints: tuple[Checkpoint, ...], keep: int) -> int:
    """The lowest seq that a recovery from the newest `keep` checkpoints (in seq order) may replay.

    With fewer checkpoints it may begin at the initial weights, so nothing is covered.
    """
    kept = kept_checkpoints(checkpoints, keep)
    if len(kept) < keep:
        return 1
    return min(c.info.replay_from_seq for c in kept)


def surplus(checkpoints: tuple[Checkpoint, ...], keep_last: int) -> tuple[Checkpoint, ...]:
    """Callers' checkpoints, of all in seq order, that `keep_last` of the newest deletes."""
    own = [c for c in checkpoints if c.info.name and not c.info.pinned]
    return tuple(own[:-keep_last]) if keep_last else ()


def rolled_back(record: OperationRecord, roll_back: RollBack) -> OperationRecord | None:
    """The record after the rollback; None: unchanged."""
    if record.operation_id == roll_back.spared_id:
        return None
    if not record.state.is_final:
        return _failed(record, roll_back, _lost(record, roll_back, "was not applied"))
    if record.effect.adds_to_window and record.seq >= roll_back.replay_from_seq:
        return _failed(record, roll_back, _lost(record, roll_back, "lost its gradients"))
    if record.effect.changes_weights and record.seq > roll_back.seq:
        was = f"was applied as version {record.version} and rolled back"
        return _failed(record, roll_back, _lost(record, roll_back, was))
    return None


def lost_records(
    policy_id: str,
    records: Mapping[int, OperationRecord],
    checkpoint: Checkpoint,
    closed_seq: int,
    now: float,
) -> Iterator[OperationRecord]:
    """The records that an adopted checkpoint changes or adds: all up to its seq is past.

    `records`: those since `closed_seq`, by seq.
    Gradients that are applied and not stepped in the journal are lost too: what became of their
    window is not known.
    """
    info = checkpoint.info
    has_open_window = info.replay_from_seq <= info.seq
    for seq in range(closed_seq + 1, info.seq + 1):
        record = records.get(seq)
        is_gradient = record is not None and record.effect.adds_to_window
        is_last = seq == info.seq
        if record is not None and record.state.is_final and not (is_gradient or is_last):
            continue
        yield replace(
            record or _unknown(policy_id, seq, now),
            state=JournalState.LOST,
            command=None,
            choices=None,
            result=FailedResult(error=_unknown_end(seq, checkpoint).to_dict()),
            version=info.version if is_last and not has_open_window else None,
            weights_digest=checkpoint.weights_digest if is_last else "",
            finished_at=now,
        )


def _unknown(policy_id: str, seq: int, now: float) -> OperationRecord:
    """An operation of which the journal has lost everything, its kind too."""
    return OperationRecord(
        operation_id=f"{policy_id}.{uuid.uuid4().hex}",
        policy_id=policy_id,
        kind=OperationKind.FORWARD_BACKWARD,
        seq=seq,
        payload_hash="",
        created_at=now,
    )


def _unknown_end(seq: int, checkpoint: Checkpoint) -> RatoonError:
    info = checkpoint.info
    return RatoonError(
        ErrorCode.WORKER_LOST,
        f"the journal lost how seq {seq} ended; the policy went on from checkpoint "
        f"{info.checkpoint_id}, version {info.version}, which has its effect, if it had one",
        details={
            "seq": str(info.seq),
            "version": str(info.version),
            "checkpoint_id": info.checkpoint_id,
        },
    )


def _failed(record: OperationRecord, roll_back: RollBack, error: RatoonError) -> OperationRecord:
    return replace(
        record,
        state=JournalState.FAILED,
        result=FailedResult(error=error.to_dict()),
        version=None,
        finished_at=roll_back.finished_at,
    )


def _lost(record: OperationRecord, roll_back: RollBack, what: str) -> RatoonError:
    source = f"checkpoint {roll_back.checkpoint_id}" if roll_back.checkpoint_id else "its start"
    details = {
        "version": str(roll_back.version),
        "checkpoint_id": roll_back.checkpoint_id,
    }
    if record.version is not None:
        details["retired_version"] = str(record.version)
    return RatoonError(
        ErrorCode.WORKER_LOST,
        f"the worker was lost: the operation {what}; the policy is again as of {source}, "
        f"version {roll_back.version}",
        details=details,
    )
