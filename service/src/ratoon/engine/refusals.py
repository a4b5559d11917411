"""Typed errors that several parts of the engine raise, so that one failure has one wording."""

from __future__ import annotations

import errno

from ratoon.errors import RETRY_AFTER_DETAIL, ErrorCode, RatoonError, described, without_folders
from ratoon_proto.types import PolicyState


def policy_not_found(policy_id: str) -> RatoonError:
    return RatoonError(
        ErrorCode.POLICY_NOT_FOUND, f"no policy {policy_id}", field="policy_id", got=policy_id
    )


def policy_exists(
    policy_id: str, state: PolicyState, version: int, *, is_other: bool
) -> RatoonError:
    """`is_other`: it was created with another spec."""
    if state is PolicyState.DELETING:
        text = "is being deleted; its id is free once that has ended"
    elif is_other:
        text = (
            f"exists already, with another spec; it is {state}, at version {version}. Take another"
            " id, or the spec that it was created with"
        )
    else:
        text = f"exists already; it is {state}, at version {version}. Train it, or take another id"
    return RatoonError(
        ErrorCode.POLICY_EXISTS,
        f"policy {policy_id} {text}",
        field="policy_id",
        got=policy_id,
        expected="an id that is not in use, or the spec it was created with",
    )


def operation_not_found(operation_id: str) -> RatoonError:
    return RatoonError(
        ErrorCode.OPERATION_NOT_FOUND,
        f"no operation {operation_id}",
        field="operation_id",
        got=operation_id,
    )


def policy_not_ready(policy_id: str, state: PolicyState, failure: str = "") -> RatoonError:
    """`failure`: why the policy failed, which no retry changes; "": it has not failed."""
    return RatoonError(
        ErrorCode.POLICY_FAILED if failure else ErrorCode.POLICY_NOT_READY,
        f"policy {policy_id} is {state}" + (f": {failure}" if failure else ""),
        field="policy_id",
        got=str(state),
        expected="ready",
    )


def not_up(policy_id: str, reason: str) -> RatoonError:
    """The policy has not started yet, which is tried again."""
    return RatoonError(
        ErrorCode.POLICY_NOT_READY,
        f"policy {policy_id} is not up yet: {reason}",
        field="policy_id",
        expected="ready",
    )


def disk_fault(what: str, error: OSError) -> RatoonError:
    """Files could not be written: RESOURCE_EXHAUSTED where there is no room, else UNAVAILABLE."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    code = ErrorCode.RESOURCE_EXHAUSTED if is_full else ErrorCode.UNAVAILABLE
    details = {"resource": "disk"} if is_full else {}
    return RatoonError(code, f"the {what} was not written: {error.strerror}", details=details)


def unexpected(error: Exception) -> RatoonError:
    """The error that a caller gets for an unexpected exception, with the rank that a note names."""
    notes: list[str] = getattr(error, "__notes__", [])
    rank = next((note for note in notes if note.startswith("rank ")), "")
    if is_out_of_memory(error):
        return RatoonError(
            ErrorCode.RESOURCE_EXHAUSTED,
            f"{rank or 'the worker'} has not enough memory: {without_folders(str(error))}",
            details={"resource": "memory"},
        )
    where = f"{rank}: " if rank else ""
    return RatoonError(ErrorCode.INTERNAL, f"{where}{described(error)}")


# CUDA's, the CPU allocator's, and NCCL's, which calls CUDA for buffers of its own.
_NO_MEMORY = ("out of memory", "can't allocate memory", "Failed to CUDA calloc")


def is_out_of_memory(error: Exception) -> bool:
    """Whether a host or a device has no more memory, of which torch, CUDA and NCCL have errors of
    their own."""
    # torch is not imported here, so its error is told by name.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return any(text in str(error) for text in _NO_MEMORY)


def overtaken() -> RatoonError:
    """For callers of a controller that was replaced."""
    return RatoonError(ErrorCode.UNAVAILABLE, "another controller took over; ask again")


def draining() -> RatoonError:
    return RatoonError(
        ErrorCode.UNAVAILABLE,
        "the service is draining: it takes nothing new, what is queued waits for its next start",
        details={RETRY_AFTER_DETAIL: "5"},
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
