"""How often and how much at once: requests a second of a key, requests in flight of a caller.

Enters calls as they come and go, leaves refusals that say when to come again. Invariant: what is
counted is this process's alone; a caller that meets N processes has N times as much.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ratoon.config import KeyLimits
from ratoon.errors import RatoonError, exhausted

_IN_FLIGHT_RETRY_S = 1.0


@dataclass(slots=True)
class _Bucket:
    """`level` requests could be made at once at `at`."""

    level: float
    at: float


class Rates:
    """A token bucket for each key that has a rate. `now`: seconds that never go back."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._buckets: dict[str, _Bucket] = {}

    def refusal(self, key_id: str, limits: KeyLimits) -> RatoonError | None:
        """Why a request of the key would be refused now; nothing is counted."""
        rate = limits.requests_per_second
        if not key_id or rate is None:
            return None
        missing = 1.0 - self._filled(key_id, rate, _burst(rate, limits)).level
        if missing <= 0:
            return None
        return exhausted(
            f"API key {key_id}: at most {rate:g} requests a second",
            resource="requests_per_second",
            wanted=1,
            free=0,
            limit=math.ceil(rate),
            retry_after_s=missing / rate,
        )

    def take(self, key_id: str, limits: KeyLimits) -> RatoonError | None:
        """Count a request of the key, unless it is refused."""
        error = self.refusal(key_id, limits)
        if error is None and key_id in self._buckets:
            self._buckets[key_id].level -= 1.0
        return error

    def _filled(self, key_id: str, rate: float, burst: int) -> _Bucket:
        now = self._now()
        bucket = self._buckets.setdefault(key_id, _Bucket(level=burst, at=now))
        bucket.level = min(bucket.level + (now - bucket.at) * rate, float(burst))
        bucket.at = now
        return bucket


class InFlight:
    """Requests that are not answered yet, in all and of each caller (a key, or else a host)."""

    def __init__(self, *, most: int, most_of_caller: int) -> None:
        self._most = most
        self._most_of_caller = most_of_caller
        self._of_caller: Counter[str] = Counter()

    def refusal(self, caller: str) -> RatoonError | None:
        """Why one more is not taken."""
        for name, used, limit in (
            ("requests", self._of_caller.total(), self._most),
            (f"requests of {caller}", self._of_caller[caller], self._most_of_caller),
        ):
            if used >= limit:
                return exhausted(
                    f"{name} in flight: {used} of at most {limit}",
                    resource="requests_in_flight",
                    wanted=1,
                    free=0,
                    limit=limit,
                    retry_after_s=_IN_FLIGHT_RETRY_S,
                )
        return None

    def begin(self, caller: str) -> None:
        self._of_caller[caller] += 1

    def end(self, caller: str) -> None:
        self._of_caller[caller] -= 1
        if not self._of_caller[caller]:
            del self._of_caller[caller]


def _burst(rate: float, limits: KeyLimits) -> int:
    return limits.burst if limits.burst is not None else max(math.ceil(rate), 1)
