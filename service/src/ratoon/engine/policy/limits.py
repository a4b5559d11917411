"""Limits of open operations, over all policies and per API key, and tokens used per API key.

Open operations are counted in memory; each controller fills the counts from the journal when it
starts. Tokens are counted in `access/usage/<key_id>.json` below the data root, in minutes, hours
and days of UTC. A count is durable before its operation is, so an engine killed in between counts a
retry twice.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratoon.config import KeyLimits
from ratoon.engine.commands import Holder
from ratoon.engine.files.uploads import upload_bytes_of
from ratoon.engine.journal.records import OperationRecord
from ratoon.engine.refusals import check_room
from ratoon.errors import ErrorCode, RatoonError, exhausted
from ratoon.log import get_logger
from ratoon.stream.files import make_folder, write_atomic

_LOG = get_logger("quotas")
_WINDOWS_S = {"minute": 60, "hour": 3_600, "day": 86_400}


class QuotaFiles:
    """One file per API key that has a quota."""

    def __init__(self, data_root: Path) -> None:
        self._folder = data_root / "access" / "usage"

    def use(self, key_id: str, limits: KeyLimits, num_tokens: int, now: float) -> None:
        """Count tokens of a key, unless it raises RESOURCE_EXHAUSTED or BODY_TOO_LARGE."""
        quotas = _quotas(limits)
        if not num_tokens or not quotas:
            return
        used = self._used(key_id, now)
        for window, limit in quotas.items():
            if num_tokens > limit:
                raise _never(key_id, window, num_tokens, limit)
            if used[window] + num_tokens > limit:
                raise exhausted(
                    f"API key {key_id}: {used[window]} of {limit} tokens a {window} are used, "
                    f"{num_tokens} more wanted",
                    resource=f"tokens_per_{window}",
                    wanted=num_tokens,
                    free=limit - used[window],
                    limit=limit,
                    retry_after_s=_WINDOWS_S[window] - now % _WINDOWS_S[window],
                )
        self._write(key_id, {window: used[window] + num_tokens for window in _WINDOWS_S}, now)

    def give_back(self, key_id: str, num_tokens: int, now: float) -> None:
        """Return tokens that were counted and not used."""
        if key_id and num_tokens and self._path(key_id).exists():
            used = self._used(key_id, now)
            left = {window: max(used[window] - num_tokens, 0) for window in _WINDOWS_S}
            self._write(key_id, left, now)

    def _used(self, key_id: str, now: float) -> dict[str, int]:
        """Tokens used in the windows that contain `now`."""
        try:
            data: Any = json.loads(self._path(key_id).read_bytes())
            return {
                window: int(data[window]["tokens"])
                if int(data[window]["start"]) == _start(window, now)
                else 0
                for window in _WINDOWS_S
            }
        except FileNotFoundError:
            return dict.fromkeys(_WINDOWS_S, 0)
        except (ValueError, KeyError, TypeError):
            _LOG.error("usage cannot be read, counted from zero", key_id=key_id)
            return dict.fromkeys(_WINDOWS_S, 0)

    def _write(self, key_id: str, used: Mapping[str, int], now: float) -> None:
        path = self._path(key_id)
        make_folder(path.parent)
        data = {
            window: {"start": _start(window, now), "tokens": tokens}
            for window, tokens in used.items()
        }
        write_atomic(path, json.dumps(data).encode())

    def _path(self, key_id: str) -> Path:
        return self._folder / f"{key_id}.json"


def _quotas(limits: KeyLimits) -> dict[str, int]:
    named = {
        "minute": limits.tokens_per_minute,
        "hour": limits.tokens_per_hour,
        "day": limits.tokens_per_day,
    }
    return {window: limit for window, limit in named.items() if limit is not None}


def _start(window: str, now: float) -> int:
    return int(now) // _WINDOWS_S[window] * _WINDOWS_S[window]


def _never(key_id: str, window: str, num_tokens: int, limit: int) -> RatoonError:
    return RatoonError(
        ErrorCode.BODY_TOO_LARGE,
        f"the batch has {num_tokens} tokens, API key {key_id} has {limit} a {window}",
        field="groups",
        got=f"{num_tokens} tokens",
        expected=f"at most {limit} tokens",
    )


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

        `num_tokens`: unshared, each rollout counted alone. `is_awaited`: its seq is next, or a
        student waits for it, so it bypasses the limits on open operations. Raises
        RESOURCE_EXHAUSTED, and BODY_TOO_LARGE for more tokens than a whole quota.
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
