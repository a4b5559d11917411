"""Typed errors that several parts of the engine raise.

Enter names, leave `RatoonError`s. Invariant: one failure has one wording.
"""

from __future__ import annotations

from ratoon.engine.types import PolicyState
from ratoon.errors import ErrorCode, RatoonError


def policy_not_found(policy_id: str) -> RatoonError:
    return RatoonError(
        ErrorCode.POLICY_NOT_FOUND, f"no policy {policy_id}", field="policy_id", got=policy_id
    )


def operation_not_found(operation_id: str) -> RatoonError:
    return RatoonError(
        ErrorCode.OPERATION_NOT_FOUND,
        f"no operation {operation_id}",
        field="operation_id",
        got=operation_id,
    )


def policy_not_ready(policy_id: str, state: PolicyState) -> RatoonError:
    return RatoonError(
        ErrorCode.POLICY_NOT_READY,
        f"policy {policy_id} is {state}",
        field="policy_id",
        got=str(state),
        expected="ready",
    )


def cancelled(operation_id: str) -> RatoonError:
    return RatoonError(ErrorCode.CANCELLED, f"operation {operation_id} was cancelled")


def seq_gap(seq: int, missing_seq: int) -> RatoonError:
    return RatoonError(
        ErrorCode.SEQ_GAP,
        f"operation {seq} waits for seq {missing_seq}, which has not arrived",
        field="key.seq",
        got=str(seq),
        expected=str(missing_seq),
        details={"missing_seq": str(missing_seq)},
    )
