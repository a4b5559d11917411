"""What a process did to the files below a folder, in the order in which it did it.

Enters a Python module to run, leaves its `Event`s. Invariant: a log with anything in it that a
rebuilt disk could not show (a write through a mapping, a copy inside the kernel) is refused; the
one exception is SQLite's `-shm`, which it builds anew from the log after every crash.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SHARED_MEMORY = "-shm"
_SOURCE = Path(__file__).with_name("shim.c")
_HEADER = struct.Struct("<4I3Q")


class Kind(IntEnum):
    """As in shim.c."""

    CREATE = 1
    WRITE = 2
    TRUNCATE = 3
    SYNC = 4
    RENAME = 5
    UNLINK = 6
    MKDIR = 7
    RMDIR = 8
    LINK = 9
    MARK = 10
    MAPPED = 11
    UNSUPPORTED = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One call that succeeded; paths are relative to the recorded folder, "." is the folder.

    `offset` is that of a WRITE, the size after a TRUNCATE, in bytes. A MARK's `data` is its text.
    """

    kind: Kind
    inode: int
    offset: int
    path: str
    target: str
    data: bytes


def require_compiler() -> str:
    """A C compiler; the test is skipped where there is none, in continuous integration it fails."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or sys.platform != "linux":
        missing = "the recorder needs Linux and a C compiler: apt-get install gcc libc6-dev"
        assert not os.environ.get("CI"), missing
        pytest.skip(missing)
    return compiler


def build_shim(folder: Path) -> Path:
    """The library that records, compiled into `folder`."""
    library = folder / "shim.so"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    command = [require_compiler(), *flags, "-o", str(library), str(_SOURCE), "-lpthread"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return library


def record(
    shim: Path, module: str, root: Path, arguments: tuple[str, ...], *, timeout_s: float = 120
) -> tuple[Event, ...]:
    """Run `python -m module *arguments` and return what it did below `root`, which exists."""
    log = shim.with_name(f"{root.name}.log")
    recording: Mapping[str, str] = {
        "LD_PRELOAD": str(shim),
        "RECORD_ROOT": str(root),
        "RECORD_LOG": str(log),
        "OMP_NUM_THREADS": "1",
    }
    ran = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, **recording},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    events = tuple(_events(log.read_bytes(), os.fsencode(root.resolve())))
    assert events, "nothing was recorded"
    return events


def mark(text: str) -> None:
    """Say something at this place of the record; where nothing records, nothing."""
    try:
        function = ctypes.CDLL(None).record_mark
    except AttributeError:
        return
    function(text.encode())


def _events(log: bytes, root: bytes) -> Iterator[Event]:
    place = 0
    while place < len(log):
        kind, path_bytes, target_bytes, _, inode, offset, data_bytes = _HEADER.unpack_from(
            log, place
        )
        place += _HEADER.size
        path = _relative(log[place : place + path_bytes], root)
        place += path_bytes
        target = _relative(log[place : place + target_bytes], root)
        place += target_bytes
        event = Event(
            kind=Kind(kind),
            inode=inode,
            offset=offset,
            path=path,
            target=target,
            data=log[place : place + data_bytes],
        )
        place += data_bytes
        is_believed = event.kind not in (Kind.MAPPED, Kind.UNSUPPORTED)
        assert is_believed or event.path.endswith(SHARED_MEMORY), f"cannot be rebuilt: {event}"
        if is_believed and not event.path.endswith(SHARED_MEMORY):
            yield event


def _relative(path: bytes, root: bytes) -> str:
    if path == root:
        return "."
    return os.fsdecode(path.removeprefix(root + b"/"))
