"""Typed errors that several parts of the engine raise, so that one failure has one wording.

New work is refused below a reserve of disk space, and a full disk is one typed error. Only accepted
work may use the reserve (its journal, checkpoints, versions).
"""

from __future__ import annotations

import errno
import shutil
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from ratoon.config import GIB
from ratoon.errors import (
    RETRY_AFTER_DETAIL,
    ErrorCode,
    RatoonError,
    described,
    exhausted,
    without_folders,
)
from ratoon_proto.types import PolicyState

# Retry time for disk space, which is freed when bodies and versions are deleted, or by an operator.
_RETRY_S = 10.0
# Retry time for a queue place, which is freed when an operation ends.
_QUEUE_RETRY_S = 2.0
_DISK = "disk"
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Code of disk_full (PostgreSQL's manual, appendix A).
_POSTGRESQL_DISK_FULL = "53100"


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
    elif state is PolicyState.ENDED:
        text = "has ended; its id is free once it is deleted, with its checkpoints"
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


def checkpoint_not_found(checkpoint_id: str) -> RatoonError:
    return RatoonError(
        ErrorCode.CHECKPOINT_NOT_FOUND,
        f"checkpoint_id: no checkpoint {checkpoint_id}",
        field="checkpoint_id",
        got=checkpoint_id,
        expected="a checkpoint of this policy",
    )


def version_not_found(name: str) -> RatoonError:
    return RatoonError(
        ErrorCode.WEIGHTS_NOT_FOUND,
        f"name: no version has the name {name}",
        field="name",
        got=name,
        expected="a version's name of this policy",
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


def not_up(policy_id: str, reason: str, *, is_waited: bool = False) -> RatoonError:
    """The policy has not started yet, which is tried again; `is_waited`: as often as it takes."""
    return RatoonError(
        ErrorCode.UNAVAILABLE if is_waited else ErrorCode.POLICY_NOT_READY,
        f"policy {policy_id} is not up yet: {reason}",
        field="policy_id",
        expected="ready",
    )


_REPLACED_DETAIL = "policy_created_at"


def policy_replaced(policy_id: str, created_at: float) -> RatoonError:
    """The error for a submission that an earlier policy of the same id has validated."""
    return RatoonError(
        ErrorCode.UNAVAILABLE,
        f"policy {policy_id} was deleted and created anew; ask again",
        field="policy_id",
        got=policy_id,
        details={_REPLACED_DETAIL: str(created_at)},
    )


def is_policy_replaced(error: RatoonError) -> bool:
    """Whether `error` is a `policy_replaced`: the submission is to be validated again."""
    return _REPLACED_DETAIL in error.details


def disk_fault(what: str, error: OSError) -> RatoonError:
    """Files could not be written: RESOURCE_EXHAUSTED where there is no room, else UNAVAILABLE."""
    is_full = error.errno in _FULL
    code = ErrorCode.RESOURCE_EXHAUSTED if is_full else ErrorCode.UNAVAILABLE
    details = {"resource": _DISK} if is_full else {}
    return RatoonError(code, f"the {what} was not written: {error.strerror}", details=details)


def unexpected(error: Exception) -> RatoonError:
    """The error that a caller gets for any exception, with the rank that a note names; a typed one
    stays as it is."""
    if isinstance(error, RatoonError):
        return error
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


# CUDA's, the CPU allocator's, NCCL's, which calls CUDA for buffers of its own, and cuBLAS's, whose
# handle and workspace take some.
_NO_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "Failed to CUDA calloc",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "calling `cublasCreate",
)


def is_out_of_memory(error: Exception) -> bool:
    """Whether a host or a device has no more memory, of which torch, CUDA and NCCL have errors of
    their own."""
    # torch is not imported here, so its error is told by name.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return any(text in str(error) for text in _NO_MEMORY)


def superseded() -> RatoonError:
    """The error for callers of a controller that a newer one has replaced."""
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


def check_room(name: str, resource: str, used: int, wanted: int, limit: int) -> None:
    """Raises RESOURCE_EXHAUSTED if `wanted` more of `resource` would exceed `limit`."""
    if used + wanted > limit:
        raise exhausted(
            f"{name}: {used} of at most {limit}, {wanted} more wanted",
            resource=resource,
            wanted=wanted,
            free=limit - used,
            limit=limit,
            retry_after_s=_QUEUE_RETRY_S,
        )


def disk_refusal(folder: Path, wanted_bytes: int, min_free_bytes: int) -> RatoonError | None:
    """Refusal of `wanted_bytes` more, if they would leave less than `min_free_bytes`.

    None: there is room. `folder` must exist.
    """
    if min_free_bytes == 0:
        return None
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes - wanted_bytes >= min_free_bytes:
        return None
    more = f"; {wanted_bytes:,} bytes more were wanted" if wanted_bytes else ""
    return exhausted(
        f"the disk has {free_bytes / GIB:.2f} GiB free, of which "
        f"limits.min_free_disk_bytes keeps {min_free_bytes / GIB:.2f} for work that is accepted "
        f"already{more}: delete checkpoints or policies, or give it a larger disk",
        resource=_DISK,
        wanted=wanted_bytes,
        free=free_bytes - min_free_bytes,
        limit=min_free_bytes,
        retry_after_s=_RETRY_S,
    )


def disk_full(error: BaseException) -> RatoonError | None:
    """Refusal for an error that reports a full disk, or an exhausted quota of it; else None."""
    cause = getattr(error, "orig", error)  # SQLAlchemy wraps the driver's error.
    match cause:
        case OSError():
            is_full = cause.errno in _FULL
        case sqlite3.Error():
            is_full = _primary(cause) == sqlite3.SQLITE_FULL
        case _:
            # The error is PostgreSQL's; its library is not imported here.
            is_full = getattr(cause, "sqlstate", None) == _POSTGRESQL_DISK_FULL
    if not is_full:
        return None
    return exhausted(
        "the disk is full", resource=_DISK, wanted=1, free=0, limit=0, retry_after_s=_RETRY_S
    )


def is_disk_full(error: Exception) -> bool:
    """Whether `error` is a refusal because a disk is full."""
    return isinstance(error, RatoonError) and error.details.get("resource") == _DISK


def is_waited_for(error: BaseException) -> bool:
    """Whether the missing resource becomes available by itself: disk space or a GPU that others
    free, or a store."""
    if not isinstance(error, RatoonError):
        return False
    return error.code is ErrorCode.UNAVAILABLE or error.details.get("resource") in (_DISK, "GPU")


@contextmanager
def full_disk_refused() -> Generator[None, None, None]:
    """Raise RESOURCE_EXHAUSTED for a full disk in the block; other errors pass."""
    try:
        yield
    except Exception as err:
        refusal = disk_full(err)
        if refusal is None:
            raise
        raise refusal from err


def _primary(error: sqlite3.Error) -> int:
    """SQLite's primary error code, the low byte."""
    return (error.sqlite_errorcode or 0) & 0xFF
