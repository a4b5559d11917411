"""The audit log, `access/audit.jsonl` below the data root: who did what, and how it was answered.

Enters one entry a call, leaves one JSON line. Invariant: lines are only ever added, by one write
each, so that processes do not mix theirs; the file is opened anew for each, so that it may be moved
away at any time. A line is not synced, and where it cannot be written the call goes on.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from ratoon.auth.key_file import access_folder, make_access_folder
from ratoon.log import get_logger

_log = get_logger("audit")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """`key_id` "": nobody that is known; `policy_id` "": none, "?": no id; `seq` 0: none.

    `outcome` is OK (for an operation: accepted) or the code of the error.
    """

    key_id: str
    peer: str
    call: str
    policy_id: str
    seq: int
    outcome: str


class Audit(Protocol):
    """Where entries go."""

    def write(self, entry: AuditEntry) -> None: ...


class AuditLog:
    """The file. Any number of processes may hold one."""

    def __init__(self, data_root: Path) -> None:
        self._data_root = data_root
        self._path = access_folder(data_root) / "audit.jsonl"

    def write(self, entry: AuditEntry) -> None:
        """Never raises."""
        at = datetime.now(UTC).isoformat(timespec="microseconds")
        line = f"{json.dumps({'at': at, **asdict(entry)})}\n".encode()
        try:
            make_access_folder(self._data_root)
            descriptor = os.open(self._path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
            try:
                os.write(descriptor, line)
            finally:
                os.close(descriptor)
        except OSError as err:
            _log.error("audit line lost", error=str(err), call=entry.call, outcome=entry.outcome)
