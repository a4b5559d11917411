"""Writes the audit log, `access/audit.jsonl` below the data root: who did what, and its outcome.

Each line is appended by one write, so lines of several processes do not mix. The file is opened for
each line, so it may be moved away at any time. Lines are not synced, and a call goes on if its line
cannot be written.

Refusals beyond `REFUSALS_A_MINUTE` per host, or ten times as many over all hosts, are only counted;
a SUPPRESSED line gives the count once the minute is over.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from ratoon.auth.keys import access_folder, make_access_folder
from ratoon.config import RatoonConfig
from ratoon.errors import ErrorCode
from ratoon.log import get_logger

REFUSALS_A_MINUTE = 60
_REFUSALS_OF_ALL = 10 * REFUSALS_A_MINUTE
_MINUTE_S = 60.0
SUPPRESSED = "SUPPRESSED"
# Refusals that anybody can cause at any rate.
_REFUSALS = frozenset(
    {ErrorCode.UNAUTHENTICATED, ErrorCode.PERMISSION_DENIED, ErrorCode.RESOURCE_EXHAUSTED}
)

_log = get_logger("audit")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One line of the log.

    `key_id` "": not authenticated. `policy_id` "": none; "?": not a valid id. `seq` 0: none.
    `outcome` is OK (for an operation: accepted) or the code of the error.
    """

    key_id: str
    peer: str
    call: str
    policy_id: str
    seq: int
    outcome: str


class Audit(Protocol):
    """A log that entries are written to."""

    def write(self, entry: AuditEntry) -> None: ...


class AuditLog:
    """The log file. Any number of processes may write it; each counts refusals separately."""

    def __init__(
        self,
        data_root: Path,
        *,
        max_file_bytes: int,
        max_files: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._data_root = data_root
        self._path = access_folder(data_root) / "audit.jsonl"
        self._max_file_bytes = max_file_bytes
        self._max_files = max_files
        self._now = now
        self._minute_ends = 0.0
        # This minute's refusals by host; hosts beyond those with a line of their own are "".
        self._written: Counter[str] = Counter()
        self._suppressed: Counter[str] = Counter()

    @classmethod
    def of(cls, config: RatoonConfig) -> AuditLog:
        """Return the log of a service with these settings."""
        return cls(
            config.data_root.absolute(),
            max_file_bytes=config.auth.audit_file_bytes,
            max_files=config.auth.audit_files,
        )

    def write(self, entry: AuditEntry) -> None:
        """Append an entry, or count it. Never raises."""
        if self._now() >= self._minute_ends:
            self._end_minute()
        if entry.outcome in _REFUSALS and not self._may_write(entry.peer):
            return
        self._add(asdict(entry))

    def _may_write(self, peer: str) -> bool:
        """Return whether one more refusal of a host gets a line; if not, count it."""
        own = self._written[peer]
        if own < REFUSALS_A_MINUTE and self._written.total() < _REFUSALS_OF_ALL:
            self._written[peer] += 1
            return True
        # Only hosts that have a line are counted separately: their number has no bound.
        self._suppressed[peer if own else ""] += 1
        return False

    def _end_minute(self) -> None:
        suppressed, self._suppressed = self._suppressed, Counter()
        self._written.clear()
        self._minute_ends = self._now() + _MINUTE_S
        for peer, count in suppressed.items():
            self._add({"peer": peer, "outcome": SUPPRESSED, "num_suppressed": count})

    def _add(self, fields: dict[str, Any]) -> None:
        at = datetime.now(UTC).isoformat(timespec="microseconds")
        line = f"{json.dumps({'at': at, **fields})}\n".encode()
        try:
            make_access_folder(self._data_root)
            descriptor = os.open(self._path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
            try:
                os.write(descriptor, line)
                if 0 < self._max_file_bytes <= os.fstat(descriptor).st_size:
                    self._put_aside(descriptor, at)
            finally:
                os.close(descriptor)
        except OSError as err:
            outcome = fields["outcome"]
            _log.error("audit line lost", error=str(err), outcome=outcome)

    def _put_aside(self, descriptor: int, at: str) -> None:
        """Rotate the file and drop the oldest; of concurrent processes, only one does it."""
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_ino != self._path.stat().st_ino:
            return
        self._path.rename(self._path.with_name(f"audit-{at.replace(':', '')}.jsonl"))
        aside = sorted(self._path.parent.glob("audit-*.jsonl"))
        for path in aside[: -self._max_files]:
            path.unlink(missing_ok=True)
