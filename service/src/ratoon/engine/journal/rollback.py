"""How a rollback changes a record: an operation whose effect is lost fails explicitly. Pure."""

from __future__ import annotations

from dataclasses import replace

from ratoon.engine.journal.records import JournalState, OperationRecord, RollBack
from ratoon.engine.types import FailedResult, OperationKind
from ratoon.errors import ErrorCode, RatoonError

# Applied after the checkpoint, these changed weights that are now lost.
_LOST_KINDS = (
    OperationKind.UPDATE,
    OperationKind.OPTIM_STEP,
    OperationKind.LOAD_CHECKPOINT,
    OperationKind.IMPORT_WEIGHTS,
)


def rolled_back(record: OperationRecord, roll_back: RollBack) -> OperationRecord | None:
    """The record after the rollback; None: unchanged."""
    if not record.state.is_final:
        return _failed(record, roll_back, _lost(record, roll_back, "was not applied"))
    if record.kind is OperationKind.FORWARD_BACKWARD and record.seq >= roll_back.replay_from_seq:
        return _failed(record, roll_back, _lost(record, roll_back, "lost its gradients"))
    if record.kind in _LOST_KINDS and record.seq > roll_back.seq:
        was = f"was applied as version {record.version} and rolled back"
        return _failed(record, roll_back, _lost(record, roll_back, was))
    return None


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
