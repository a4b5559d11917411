"""Compiled kernels that outlive the process that compiled them, in one folder per fingerprint.

A folder that a worker uses is locked, shared, for as long as the worker lives: it is never removed.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ratoon.config import set_compile_cache
from ratoon.engine.worker.numerics import Numerics
from ratoon.log import get_logger
from ratoon.stream.files import make_folder, remove_folder

MAX_BYTES = 8 * 2**30
_LOCK = ".lock"
_LOG = get_logger("compile_cache")


class CompileCache:
    """This process's folder; kernels that it compiles go there, and are found there next time.

    One process that starts to use it makes room first: the folders that were used longest ago go,
    until all together have at most `max_bytes`.
    """

    def __init__(self, root: Path, numerics: Mapping[str, str], max_bytes: int = MAX_BYTES) -> None:
        self.folder = root / Numerics.of(numerics).digest
        os.close(_locked(self.folder))  # It is the one that was used last.
        _evict(root, max_bytes)
        self._lock = _locked(self.folder)
        set_compile_cache(self.folder)

    def close(self) -> None:
        """Let others remove the folder."""
        os.close(self._lock)


def _locked(folder: Path) -> int:
    """A descriptor that holds the folder, which is made where there is none."""
    while True:
        make_folder(folder)
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        with suppress(FileNotFoundError):
            os.utime(folder / _LOCK)
            if os.path.samestat((folder / _LOCK).stat(), os.fstat(descriptor)):
                return descriptor
        os.close(descriptor)  # Another process has removed it in between.


def _evict(root: Path, max_bytes: int) -> None:
    folders = sorted((path for path in root.iterdir() if path.is_dir()), key=_used_at)
    sizes = {folder: _size_bytes(folder) for folder in folders}
    total = sum(sizes.values())
    for folder in folders:
        if total <= max_bytes:
            return
        if _remove(folder):
            total -= sizes[folder]
            _LOG.info("compiled kernels removed", folder=folder.name, size_bytes=sizes[folder])


def _remove(folder: Path) -> bool:
    """Whether it went: nobody uses it."""
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_folder(folder)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _used_at(folder: Path) -> float:
    try:
        return (folder / _LOCK).stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _size_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # Compilers rename what they have written.
            total += path.lstat().st_size
    return total
