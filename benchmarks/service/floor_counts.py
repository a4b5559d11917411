"""Counts what a service's processes hold, and how often its database commits."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

_WAL_HEADER = 32
_FRAME_HEADER = 24


def held(processes: Iterable[psutil.Process]) -> list[dict[str, Any]]:
    """Processes, largest first: name, CPU seconds since start, PSS and RSS in MB.

    PSS divides shared pages among their users.
    """
    found: list[dict[str, Any]] = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            memory, cpu = process.memory_full_info(), process.cpu_times()
            sizes = {"pss_mb": memory.pss / 1e6, "rss_mb": memory.rss / 1e6}
            found.append({"name": _name(process), "cpu_s": cpu.user + cpu.system, **sizes})
    return sorted(found, key=lambda row: -row["pss_mb"])


def _name(process: psutil.Process) -> str:
    """The title that Ray gives a process, or else its program or script."""
    words = process.cmdline() or [process.name()]
    if words[0].startswith("ray::"):
        return words[0]
    scripts = [word for word in words if word.endswith(".py")]
    return Path(scripts[0] if scripts else words[0]).name


def committed_writes(database: Path) -> int:
    """Transactions in an SQLite database's write-ahead log, since it last restarted.

    A frame that ends a transaction has the database's size in its header, others 0; frames of an
    earlier log have other salts (https://www.sqlite.org/fileformat2.html#walformat).
    """
    log = database.with_name(database.name + "-wal").read_bytes()
    page_size = struct.unpack_from(">I", log, 8)[0]
    salts = log[16:24]
    commits = 0
    for at in range(_WAL_HEADER, len(log) - page_size, _FRAME_HEADER + page_size):
        if log[at + 8 : at + 16] != salts:
            break
        commits += struct.unpack_from(">I", log, at + 4)[0] != 0
    return commits
