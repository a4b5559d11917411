"""Limits on open operations: over all policies, and per API key.

The counters are in memory; each controller fills them from the journal when it starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ratoon.engine.files.disk import check_room
from ratoon.engine.files.uploads import upload_bytes_of
from ratoon.engine.journal.records import OperationRecord
from ratoon.engine.policy.quotas import QuotaFiles
from ratoon.engine.types import Holder


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What an open operation holds. `key_id` "": no API key."""

    policy_id: str
    key_id: str
    body_bytes: int


class Claims:
    """Claims of all policies, by operation id; operations are admitted one at a time."""

    def __init__(self, data_root: Path, *, max_total_bytes: int) -> None:
        self._policies = data_root / "policies"
        self._max_total_bytes = max_total_bytes
        self._open: dict[str, Claim] = {}
        self._quotas = QuotaFiles(data_root)
        self._lock = asyncio.Lock()

    def open_bytes(self, policy_id: str) -> int:
        """Bytes of the bodies of the policy's open operations."""
        claims = self._open.values()
        return sum(claim.body_bytes for claim in claims if claim.policy_id == policy_id)

    def restore(self, policy_id: str, records: Iterable[OperationRecord]) -> None:
        """Replace the policy's claims by those of `records`."""
        others = {name: claim for name, claim in self._open.items() if claim.policy_id != policy_id}
        self._open = others | {
            record.operation_id: Claim(
                policy_id=policy_id, key_id=record.key_id, body_bytes=record.body_bytes
            )
            for record in records
        }

    async def take(
        self,
        policy_id: str,
        operation_id: str,
        holder: Holder,
        *,
        num_tokens: int,
        body_bytes: int,
        now: float,
        is_awaited: bool,
    ) -> None:
        """Count an operation as open and its tokens as used, or neither.

        `num_tokens`: unshared, each rollout counted alone. `is_awaited`: its seq is next, so it
        bypasses the limits on open operations. Raises RESOURCE_EXHAUSTED, and BODY_TOO_LARGE for
        more tokens than a whole quota.
        """
        async with self._lock:
            if not is_awaited:
                await self._check_open(holder, body_bytes)
            if holder.key_id and holder.limits is not None:
                limits = holder.limits
                await asyncio.to_thread(self._quotas.use, holder.key_id, limits, num_tokens, now)
            self._open[operation_id] = Claim(
                policy_id=policy_id, key_id=holder.key_id, body_bytes=body_bytes
            )

    async def undo(self, operation_id: str, holder: Holder, num_tokens: int, now: float) -> None:
        """Undo `take`: the operation was not accepted."""
        self.drop(operation_id)
        async with self._lock:
            await asyncio.to_thread(self._quotas.give_back, holder.key_id, num_tokens, now)

    def drop(self, operation_id: str) -> None:
        """Release the claim of an operation that has ended."""
        self._open.pop(operation_id, None)

    def check_upload(self, holder: Holder, num_bytes: int) -> None:
        """Raises RESOURCE_EXHAUSTED where a part exceeds what its sender's API key has left.

        Reads files: call it in a thread.
        """
        limit = None if holder.limits is None else holder.limits.max_queued_bytes
        if holder.key_id and limit is not None:
            # An upload used by a call is counted as that call's body instead.
            used = sum(claim.body_bytes for claim in self._of_key(holder.key_id))
            used += upload_bytes_of(self._policies, holder.key_id)
            name = f"API key {holder.key_id}: bytes of open operations and uploads"
            check_room(name, "key_queued_bytes", used, num_bytes, limit)

    async def _check_open(self, holder: Holder, body_bytes: int) -> None:
        key_id, limits = holder.key_id, holder.limits
        if key_id and limits is not None:
            if limits.max_open_operations is not None:
                name, used = f"API key {key_id}: open operations", len(self._of_key(key_id))
                check_room(name, "key_open_operations", used, 1, limits.max_open_operations)
            if limits.max_queued_bytes is not None:
                await asyncio.to_thread(self.check_upload, holder, body_bytes)
        used = sum(claim.body_bytes for claim in self._open.values())
        name = "bytes of open operations of all policies"
        check_room(name, "total_queued_bytes", used, body_bytes, self._max_total_bytes)

    def _of_key(self, key_id: str) -> list[Claim]:
        return [claim for claim in tuple(self._open.values()) if claim.key_id == key_id]
