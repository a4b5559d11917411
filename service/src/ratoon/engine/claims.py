"""Who has how much open: a file for each open operation of every policy, whose name says it all.

Enters operations as they are accepted and as they end, leaves refusals. Controllers of all policies
share the folders, so that bounds over all policies, and those of an API key, are exact wherever it
calls. Invariant: an operation that is open has a file; one that has none is not counted, and what a
crash leaves is swept when the policy's controller starts.

    policies/<policy_id>/open/<hexadecimal part of the operation's id>~<key_id>~<bytes of its body>
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ratoon.engine.files import PolicyPaths
from ratoon.engine.quotas import QuotaFiles
from ratoon.engine.room import check_room
from ratoon.engine.types import Holder
from ratoon.engine.uploads import upload_bytes_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one operation takes. Tokens are replicated ones: each rollout alone."""

    operation_id: str
    holder: Holder
    num_tokens: int
    body_bytes: int


class Claims:
    """Of one policy's controller, its folder's only writer. Synchronous: call it in a thread."""

    def __init__(self, paths: PolicyPaths, *, max_total_bytes: int) -> None:
        self._folder = paths.open_operations
        self._policies = paths.root.parent
        self._max_total_bytes = max_total_bytes
        self._own: dict[str, Path] = {}
        self._quotas = QuotaFiles(paths.root.parent.parent)

    @property
    def open_bytes(self) -> int:
        """Of the bodies of the policy's own open operations."""
        return sum(_fields(path.name)[1] for path in self._own.values())

    def sweep(self, open_ids: Iterable[str]) -> None:
        """Forget what is not open: an earlier controller was killed while it ended."""
        known = {_part(operation_id): operation_id for operation_id in open_ids}
        self._own.clear()
        for path in self._folder.iterdir():
            operation_id = known.get(path.name.partition("~")[0])
            if operation_id is None:
                path.unlink(missing_ok=True)  # A controller that was replaced may be at it too.
            else:
                self._own[operation_id] = path

    def take(self, claim: Claim, now: float, *, is_awaited: bool) -> None:
        """Count an operation as open and its tokens as used, or neither.

        `is_awaited`: all others of the policy wait for it, so that no queue is too full for it.
        Raises RESOURCE_EXHAUSTED, BODY_TOO_LARGE for more tokens than a quota has in all.
        """
        with self._locked():
            if not is_awaited:
                self._check_open(claim)
            self._quotas.use(claim.holder.key_id, claim.holder.limits, claim.num_tokens, now)
            path = self._path(claim)
            try:
                path.touch()
            except BaseException:
                self._quotas.give_back(claim.holder.key_id, claim.num_tokens, now)
                raise
            self._own[claim.operation_id] = path

    def undo(self, claim: Claim, now: float) -> None:
        """The operation was not accepted after all."""
        with self._locked():
            self._quotas.give_back(claim.holder.key_id, claim.num_tokens, now)
        self.drop(claim.operation_id)

    def drop(self, operation_id: str) -> None:
        """The operation has ended."""
        path = self._own.pop(operation_id, None)
        if path is not None:
            path.unlink(missing_ok=True)

    def _check_open(self, claim: Claim) -> None:
        held = list(self._held())
        key_id, limits = claim.holder.key_id, claim.holder.limits
        mine = [size_bytes for owner, size_bytes in held if owner == key_id]
        if key_id and limits.max_open_operations is not None:
            name = f"API key {key_id}: open operations"
            check_room(name, "key_open_operations", len(mine), 1, limits.max_open_operations)
        self._check_key_bytes(claim.holder, sum(mine), claim.body_bytes)
        used = sum(size_bytes for _, size_bytes in held)
        name = "bytes of open operations of all policies"
        check_room(name, "total_queued_bytes", used, claim.body_bytes, self._max_total_bytes)

    def check_upload(self, holder: Holder, num_bytes: int) -> None:
        """Raises RESOURCE_EXHAUSTED where a part has more bytes than its sender's key has left."""
        mine = [size_bytes for owner, size_bytes in self._held() if owner == holder.key_id]
        self._check_key_bytes(holder, sum(mine), num_bytes)

    def _check_key_bytes(self, holder: Holder, open_bytes: int, wanted: int) -> None:
        """An upload that a call names is that call's, whose body counts from then on."""
        limit = holder.limits.max_queued_bytes
        if holder.key_id and limit is not None:
            used = open_bytes + upload_bytes_of(self._policies, holder.key_id)
            name = f"API key {holder.key_id}: bytes of open operations and uploads"
            check_room(name, "key_queued_bytes", used, wanted, limit)

    def _held(self) -> Iterator[tuple[str, int]]:
        """(key id, bytes) of every open operation of every policy."""
        for folder in self._policies.glob("*/open"):
            with suppress(FileNotFoundError):  # The policy is being deleted.
                yield from [_fields(path.name) for path in folder.iterdir()]

    def _path(self, claim: Claim) -> Path:
        name = f"{_part(claim.operation_id)}~{claim.holder.key_id}~{claim.body_bytes}"
        return self._folder / name

    @contextmanager
    def _locked(self) -> Generator[None, None, None]:
        """One operation of all policies at a time: what is counted stays true until it is used."""
        descriptor = os.open(self._policies / ".claims.lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _fields(name: str) -> tuple[str, int]:
    """(key id, bytes) of a file's name."""
    _, owner, size_bytes = name.split("~")
    return owner, int(size_bytes)


def _part(operation_id: str) -> str:
    return operation_id.rpartition(".")[2]
