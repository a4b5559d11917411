"""A lock that one process of this machine holds, and that ends with it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


def take(path: Path) -> int:
    """A descriptor that holds the lock until it is closed. Raises BlockingIOError: it is held."""
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def held(path: Path) -> Generator[None]:
    """Raises BlockingIOError where somebody else holds it."""
    descriptor = take(path)
    try:
        yield
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    """A file of another user, in a folder of all, may be opened but not with O_CREAT."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        return os.open(path, flags | os.O_CREAT, 0o644)
