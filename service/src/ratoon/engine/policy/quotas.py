"""Tokens used per API key, in `access/usage/<key_id>.json` below the data root.

Windows are minutes, hours and days of UTC. A count is durable before its operation is, so an engine
killed in between counts a retry twice. Writers hold the lock of `engine.policy.claims`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ratoon.config import KeyLimits
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
