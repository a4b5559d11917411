"""Limits requests per second of a key, and requests in flight of a caller.

A key's rate holds over all processes, by a file per key (`access/rates/<key_id>` below the data
root); requests in flight are counted per process.
"""

from __future__ import annotations

import fcntl
import math
import os
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ratoon.auth.keys import access_folder
from ratoon.config import KeyLimits
from ratoon.errors import RatoonError, exhausted
from ratoon.log import get_logger
from ratoon.stream.files import make_folder

_IN_FLIGHT_RETRY_S = 1.0
# A time further ahead than the clocks of two machines may differ came from a wrong clock.
_SKEW_S = 60.0
_BUCKET = struct.Struct("<dd")

# Calls that need no key, per host and process: per second, and at once. Hosts beyond `_MAX_HOSTS`
# share one bucket.
FREE_RATE = 50.0
FREE_BURST = 100
_MAX_HOSTS = 4096

_log = get_logger("rates")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    """State of a token bucket: at the time `at`, `level` requests may be made at once."""

    level: float
    at: float

    def filled(self, now: float, rate: float, burst: int) -> _Bucket:
        """The bucket as of `now`. The latest time stays, so that clocks that differ add nothing."""
        level = self.level + max(now - self.at, 0.0) * rate
        return _Bucket(level=min(level, float(burst)), at=max(now, self.at))


class Rates:
    """Token buckets of keys that have a rate. `now` returns seconds since the epoch.

    Files are not synced: after a power cut a bucket may be full again. A call goes on if its file
    cannot be written.
    """

    def __init__(self, data_root: Path, now: Callable[[], float] = time.time) -> None:
        self._folder = access_folder(data_root) / "rates"
        self._now = now
        self._hosts: dict[str, _Bucket] = {}

    def take(self, key_id: str, limits: KeyLimits) -> RatoonError | None:
        """Count a request of the key, or return the refusal."""
        rate = limits.requests_per_second
        if not key_id or rate is None:
            return None
        burst = limits.burst if limits.burst is not None else max(math.ceil(rate), 1)
        try:
            missing = 1.0 - self._level(key_id, rate, burst)
        except OSError as err:
            _log.error("rate not counted", key_id=key_id, error=str(err))
            return None
        if missing <= 0:
            return None
        return _too_fast(f"API key {key_id}: at most {rate:g} requests a second", rate, missing)

    def take_free(self, host: str) -> RatoonError | None:
        """Count a call that needs no key, or return the refusal."""
        now = self._now()
        if len(self._hosts) >= _MAX_HOSTS:
            full_after = now - FREE_BURST / FREE_RATE
            self._hosts = {name: b for name, b in self._hosts.items() if b.at > full_after}
        if host not in self._hosts and len(self._hosts) >= _MAX_HOSTS:
            host = ""
        bucket = self._hosts.get(host, _Bucket(level=FREE_BURST, at=now))
        bucket = bucket.filled(now, FREE_RATE, FREE_BURST)
        if bucket.level < 1.0:
            message = f"host {host}: at most {FREE_RATE:g} calls a second without a key"
            return _too_fast(message, FREE_RATE, 1.0 - bucket.level)
        self._hosts[host] = replace(bucket, level=bucket.level - 1.0)
        return None

    def _level(self, key_id: str, rate: float, burst: int) -> float:
        """Return the bucket's level, and take one if it has one. Raises `OSError`."""
        descriptor = self._open(key_id)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            bucket = _filled(os.pread(descriptor, _BUCKET.size, 0), self._now(), rate, burst)
            if bucket.level >= 1.0:
                os.pwrite(descriptor, _BUCKET.pack(bucket.level - 1.0, bucket.at), 0)
            return bucket.level
        finally:
            os.close(descriptor)

    def _open(self, key_id: str) -> int:
        flags, path = os.O_CREAT | os.O_RDWR, self._folder / key_id
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError:
            make_folder(self._folder)
            return os.open(path, flags, 0o600)


def _filled(data: bytes, now: float, rate: float, burst: int) -> _Bucket:
    """Return the bucket as of `now`; an invalid one counts as full."""
    if len(data) == _BUCKET.size:
        level, at = _BUCKET.unpack(data)
        if 0.0 <= level <= burst and at <= now + _SKEW_S:
            return _Bucket(level=level, at=at).filled(now, rate, burst)
    return _Bucket(level=float(burst), at=now)


def _too_fast(message: str, rate: float, missing: float) -> RatoonError:
    return exhausted(
        message,
        resource="requests_per_second",
        wanted=1,
        free=0,
        limit=math.ceil(rate),
        retry_after_s=missing / rate,
    )


class InFlight:
    """Counts unanswered requests, in all and per caller (a key, or else a host)."""

    def __init__(self, *, most: int, most_of_caller: int) -> None:
        self._most = most
        self._most_of_caller = most_of_caller
        self._of_caller: Counter[str] = Counter()

    def refusal(self, caller: str) -> RatoonError | None:
        """Return why one more request of a caller is refused; None if it is not."""
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
        """Count a request that was let in."""
        self._of_caller[caller] += 1

    def end(self, caller: str) -> None:
        """Forget a request that has ended."""
        self._of_caller[caller] -= 1
        if not self._of_caller[caller]:
            del self._of_caller[caller]
