"""Limits on open operations: over all policies, and per API key.

The counters are in memory; each controller fills them from the journal when it starts.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ratoon.engine.files.disk import check_room
from ratoon.engine.files.uploads import upload_bytes_of
from ratoon.engine.journal.records import OperationRecord
from ratoon.engine.policy.quotas import QuotaFiles
from ratoon.engine.types import Holder


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """An open operation's share of the limits. `key_id` "": no API key."""

    policy_id: str
    key_id: str
    body_bytes: int


@dataclass(slots=True, kw_only=True)
class Held:
    """Open operations, and the bytes of their bodies."""

    num_operations: int = 0
    num_bytes: int = 0


class Claims:
    """Claims of all policies, by operation id; operations are admitted one at a time.

    They are counted in all, by policy and by API key, so that an admission scans none of them.
    """

    def __init__(self, data_root: Path, *, max_total_bytes: int) -> None:
        self._policies = data_root / "policies"
        self._max_total_bytes = max_total_bytes
        self._open: dict[str, Claim] = {}
        self._total = Held()
        self._by_policy: defaultdict[str, Held] = defaultdict(Held)
        self._by_key: defaultdict[str, Held] = defaultdict(Held)
        self._quotas = QuotaFiles(data_root)
        self._lock = asyncio.Lock()

    def open_bytes(self, policy_id: str) -> int:
        """Bytes of the bodies of the policy's open operations."""
        return _of(self._by_policy, policy_id).num_bytes

    def restore(self, policy_id: str, records: Iterable[OperationRecord]) -> None:
        """Replace the policy's claims by those of `records`."""
        mine = [name for name, claim in self._open.items() if claim.policy_id == policy_id]
        for operation_id in mine:
            self.drop(operation_id)
        for record in records:
            claim = Claim(policy_id=policy_id, key_id=record.key_id, body_bytes=record.body_bytes)
            self._add(record.operation_id, claim)

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
            claim = Claim(policy_id=policy_id, key_id=holder.key_id, body_bytes=body_bytes)
            self._add(operation_id, claim)

    async def undo(self, operation_id: str, holder: Holder, num_tokens: int, now: float) -> None:
        """Undo `take`: the operation was not accepted."""
        self.drop(operation_id)
        async with self._lock:
            await asyncio.to_thread(self._quotas.give_back, holder.key_id, num_tokens, now)

    def drop(self, operation_id: str) -> None:
        """Release the claim of an operation that has ended."""
        claim = self._open.pop(operation_id, None)
        if claim is not None:
            self._count(claim, -1)

    def check_upload(self, holder: Holder, num_bytes: int) -> None:
        """Raises RESOURCE_EXHAUSTED where a part exceeds what its sender's API key has left.

        Reads files: call it in a thread.
        """
        limit = None if holder.limits is None else holder.limits.max_queued_bytes
        if holder.key_id and limit is not None:
            # An upload used by a call is counted as that call's body instead.
            used = _of(self._by_key, holder.key_id).num_bytes
            used += upload_bytes_of(self._policies, holder.key_id)
            name = f"API key {holder.key_id}: bytes of open operations and uploads"
            check_room(name, "key_queued_bytes", used, num_bytes, limit)

    async def _check_open(self, holder: Holder, body_bytes: int) -> None:
        key_id, limits = holder.key_id, holder.limits
        if key_id and limits is not None:
            if limits.max_open_operations is not None:
                name, used = f"API key {key_id}: open operations", _of(self._by_key, key_id)
                limit = limits.max_open_operations
                check_room(name, "key_open_operations", used.num_operations, 1, limit)
            if limits.max_queued_bytes is not None:
                await asyncio.to_thread(self.check_upload, holder, body_bytes)
        name, used = "bytes of open operations of all policies", self._total.num_bytes
        check_room(name, "total_queued_bytes", used, body_bytes, self._max_total_bytes)

    def _add(self, operation_id: str, claim: Claim) -> None:
        self.drop(operation_id)
        self._open[operation_id] = claim
        self._count(claim, 1)

    def _count(self, claim: Claim, sign: int) -> None:
        """Add a claim to the counts, or with `sign` -1 take it off; empty counts are dropped."""
        of_policy, of_key = self._by_policy[claim.policy_id], self._by_key[claim.key_id]
        for held in (self._total, of_policy, of_key):
            held.num_operations += sign
            held.num_bytes += sign * claim.body_bytes
        if not of_policy.num_operations:
            del self._by_policy[claim.policy_id]
        if not of_key.num_operations:
            del self._by_key[claim.key_id]


def _of(counts: Mapping[str, Held], name: str) -> Held:
    """The counts of a policy or an API key. Adds none: it may be called in a thread."""
    return counts.get(name) or Held()
