"""How records change where state and journal part: what is lost fails explicitly. Pure.

After a rollback the state lacks what the journal has; after an adoption it has what the journal
lost.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ratoon.engine.journal.records import Checkpoint, JournalState, OperationRecord, RollBack
from ratoon.engine.types import FailedResult
from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.types import OperationKind


def rolled_back(record: OperationRecord, roll_back: RollBack) -> OperationRecord | None:
    """The record after the rollback; None: unchanged."""
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
