"""Durable writes on a local file system: what the journal, checkpoints and versions are made of.

Enters bytes or a finished folder, leaves a name that either is whole or does not exist. Invariant:
a name is given (renamed to) only after its content is on disk, and the folder that holds the name
is synced before the call returns. A crash leaves at most names that start with `TEMPORARY_PREFIX`.
"""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

import xxhash

TEMPORARY_PREFIX = ".tmp-"
_READ_BYTES = 2**20


def temporary_name(path: Path) -> Path:
    """A name beside `path` that no other call gets; a rename to `path` stays on one file system."""
    return path.parent / f"{TEMPORARY_PREFIX}{path.name}-{uuid.uuid4().hex}"


def fsync_file(path: Path) -> None:
    """Put the content of a file on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_folder(folder: Path) -> None:
    """Put the names of a folder on disk (not the content of its files)."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder, and its parents, that a crash does not take away; it may be there."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    fsync_folder(folder.parent)


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` to `path`, replacing what is there; readers see the old or the new, whole."""
    temporary = temporary_name(path)
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def fsync_tree(folder: Path) -> None:
    """Put a folder on disk with everything below it, innermost first."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            fsync_file(Path(parent) / name)
        fsync_folder(Path(parent))


def rename_folder(source: Path, target: Path) -> None:
    """Give a folder, already synced by `fsync_tree`, its final name; `target` may not exist.

    Raises `FileExistsError` where it does.
    """
    if target.exists():
        raise FileExistsError(target)
    source.rename(target)
    fsync_folder(target.parent)


def remove_folder(folder: Path) -> None:
    """Remove a folder so that no reader ever sees half of it under its own name."""
    doomed = temporary_name(folder)
    folder.rename(doomed)
    shutil.rmtree(doomed)
    fsync_folder(folder.parent)


def remove_leftovers(folder: Path) -> None:
    """Remove what crashed writers left in `folder`, of which the caller is the one writer."""
    for path in folder.glob(f"{TEMPORARY_PREFIX}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def digest_bytes(data: bytes) -> str:
    """xxh3-128 of `data`, 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_file(path: Path) -> str:
    """xxh3-128 of a file, read in blocks, 32 hexadecimal digits."""
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            state.update(block)
    return state.hexdigest()
