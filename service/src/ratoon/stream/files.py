"""Durable writes on a local file system, for the journal, checkpoints and versions.

A file gets its name only after its content is on disk, and the folder is synced before the call
returns. A crash leaves at most names that start with `TEMPORARY_PREFIX`. Later damage is detected
by digests: `seal_bytes`, `seal_document`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from io import RawIOBase
from pathlib import Path
from typing import Any, cast

import xxhash

TEMPORARY_PREFIX = ".tmp-"
# Bytes that `seal_bytes` adds.
SEAL_BYTES = 16
_READ_BYTES = 2**20
_DIGEST_FIELD = "digest"


class DamagedFileError(ValueError):
    """The bytes are not what was written."""


def temporary_name(path: Path) -> Path:
    """A unique name beside `path`, so that a rename to `path` stays on one file system."""
    return path.parent / f"{TEMPORARY_PREFIX}{path.name}-{uuid.uuid4().hex}"


def fsync_file(path: Path) -> None:
    """Sync a file's content to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_folder(folder: Path) -> None:
    """Sync a folder's names to disk (not the content of its files)."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Create a folder and its parents durably; it may exist.

    `mode` applies to the folder itself, less the umask, when it is created.
    """
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(mode, exist_ok=True)
    fsync_folder(folder.parent)


def write_synced(path: Path, *buffers: bytes | memoryview) -> None:
    """Create a file of what `buffers` hold, one after the other, and sync its content to disk."""
    with path.open("xb") as file:
        file.writelines(buffers)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: Path, *buffers: bytes | memoryview) -> None:
    """Write `buffers` to `path`, replacing it atomically: readers see all of the old or the new."""
    temporary = temporary_name(path)
    try:
        write_synced(temporary, *buffers)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def keep_file(temporary: Path, path: Path) -> None:
    """Give a file that another process has written its name, in the same folder, durably."""
    fsync_file(temporary)
    temporary.replace(path)
    fsync_folder(path.parent)


def fsync_tree(folder: Path) -> None:
    """Sync a folder with everything below it, innermost first."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            fsync_file(Path(parent) / name)
        fsync_folder(Path(parent))


def rename_folder(source: Path, target: Path) -> None:
    """Rename a folder, synced by `fsync_tree`, to its final name.

    Raises `FileExistsError` if `target` exists and is not empty.
    """
    try:
        source.rename(target)
    except OSError as err:
        if err.errno == errno.ENOTEMPTY:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from err
        raise
    fsync_folder(target.parent)


@contextmanager
def made_folder(target: Path) -> Generator[Path]:
    """A folder to fill. After the block it is durable and named `target`; on failure it is gone.

    Raises `FileExistsError` if `target` exists and is not empty.
    """
    make_folder(target.parent)
    temporary = temporary_name(target)
    temporary.mkdir()
    try:
        yield temporary
        fsync_tree(temporary)
        rename_folder(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_folder(folder: Path) -> None:
    """Remove a folder, which may be gone. Readers never see half of it under its name.

    This holds after a power cut too: the name is gone from the disk before the first file is.
    """
    doomed = temporary_name(folder)
    with contextlib.suppress(FileNotFoundError):  # Another process may remove it, or its leftovers.
        folder.rename(doomed)
        fsync_folder(folder.parent)
        shutil.rmtree(doomed)


def remove_leftovers(folder: Path, spared: Path | None = None) -> None:
    """Remove what crashed writers left in `folder`, whose only writer is the caller, but `spared`.

    A replaced writer that has not noticed may still write or remove here: files that vanish are
    ignored, and a folder that it adds to is left to the next call.
    """
    remove_paths(path for path in find_leftovers(folder) if path != spared)


def is_open_elsewhere(path: Path) -> bool:
    """Whether anybody has the file open or mapped, or it has another name; True if unknown."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        if os.fstat(descriptor).st_nlink > 1:
            return True
        # A write lease is granted only to the sole process that has the file open: see fcntl(2).
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except (OSError, AttributeError):  # No leases on this system or file system.
        return True
    finally:
        os.close(descriptor)
    return False


def find_leftovers(folder: Path) -> list[Path]:
    """Paths that `remove_leftovers` would remove now."""
    return list(folder.glob(f"{TEMPORARY_PREFIX}*"))


def remove_paths(paths: Iterable[Path]) -> None:
    """Remove files and folders, any of which may be gone."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def link_or_copy(source: Path | str, target: Path | str) -> None:
    """Put a file that stays as it is at `target` too. Raises FileNotFoundError, OSError."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # Another file system, or one without links.
        shutil.copyfile(source, target)


def digest_bytes(data: bytes | memoryview) -> str:
    """xxh3-128 of `data`, 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_file(path: Path) -> str:
    """xxh3-128 of a file, read in blocks, 32 hexadecimal digits."""
    with path.open("rb", buffering=0) as file:
        return digest_stream(file)


def digest_stream(file: RawIOBase) -> str:
    """xxh3-128 of the unread rest of an open file."""
    state, block = xxhash.xxh3_128(), memoryview(bytearray(_READ_BYTES))
    while size := file.readinto(block):
        state.update(block[:size])
    return state.hexdigest()


def seal_bytes(data: bytes) -> bytes:
    """`data` and its xxh3-128."""
    return data + xxhash.xxh3_128_digest(data)


def unseal_bytes(sealed: bytes) -> bytes:
    """The sealed bytes. Raises `DamagedFileError`."""
    data, digest = sealed[:-SEAL_BYTES], sealed[-SEAL_BYTES:]
    if xxhash.xxh3_128_digest(data) != digest:
        raise DamagedFileError(f"{len(data)} bytes of another digest")
    return data


def seal_document(fields: Mapping[str, Any]) -> bytes:
    """JSON of the fields, in one canonical form, with a digest of them as an extra field."""
    digest = digest_bytes(_json(fields))
    return _json({**fields, _DIGEST_FIELD: digest})


def unseal_document(data: bytes) -> dict[str, Any]:
    """The sealed fields. Raises `DamagedFileError` for any other bytes."""
    try:
        document: object = json.loads(data)
    except (ValueError, RecursionError) as err:
        raise DamagedFileError("no JSON") from err
    if not isinstance(document, dict):
        raise DamagedFileError("no JSON object")
    fields = cast("dict[str, Any]", document)
    digest = fields.pop(_DIGEST_FIELD, None)
    if data != seal_document(fields):
        raise DamagedFileError(f"other fields than those of the digest {digest!r}")
    return fields


def _json(fields: Mapping[str, Any]) -> bytes:
    return (json.dumps(fields, indent=1, sort_keys=True) + "\n").encode()
