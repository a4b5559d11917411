"""Bytes and folders by key: the interface common to an object store and a disk.

A folder exists once its manifest, written last, does. A key never changes its content, and none
leads out of the root of its `Blobs`. Reads are verified by digest.

All calls block, and may come from any thread; a key has one writer.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from ratoon.errors import ErrorCode, RatoonError, invalid, shown
from ratoon.stream.files import (
    digest_bytes,
    digest_file,
    fsync_tree,
    make_folder,
    rename_folder,
    seal_bytes,
    temporary_name,
    unseal_bytes,
)
from ratoon_proto.types import WeightFile

# Never a key: components do not start with a dot.
FOLDER_MANIFEST = ".files"
_FORMAT = 1
_COMPONENT = re.compile(r"[a-zA-Z0-9_-][a-zA-Z0-9._-]{0,127}")
_SHA256_DIGITS = 64


class Blobs(Protocol):
    """Keys are plain names joined by `/`; others raise INVALID_ARGUMENT.

    What is missing raises FileNotFoundError, what is damaged INTERNAL. A store that does not answer
    in time raises UNAVAILABLE, and the call may be retried.
    """

    def put(self, key: str, data: bytes) -> None:
        """Durable on return, and atomic for readers."""
        ...

    def get(self, key: str, digest: str) -> bytes:
        """The bytes, verified by their digest: SHA-256 (64 digits) or xxh3-128 (32 digits)."""
        ...

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """Bytes [offset, offset + length), fewer at the end."""
        ...

    def delete(self, key: str) -> None:
        """Delete the key, which may be gone already."""
        ...

    def names(self, key: str) -> tuple[str, ...]:
        """Names of the blobs directly below `key`, ascending."""
        ...

    def put_folder(self, key: str, source: Path) -> None:
        """Copy the flat folder `source`.

        Raises FileExistsError where the key has other files; if it has the same, nothing is copied.
        """
        ...

    def get_folder(self, key: str, target: Path) -> None:
        """A verified copy at `target`, which may not exist yet and appears whole."""
        ...

    def delete_folder(self, key: str) -> None:
        """Delete a folder, atomically for readers; it may be gone already."""
        ...

    def folder_names(self, key: str) -> tuple[str, ...]:
        """Names of the complete folders directly below `key`, ascending."""
        ...

    def remove_leftovers(self, key: str) -> None:
        """Remove what interrupted writers left below `key`."""
        ...


def checked_key(key: str) -> str:
    """`key`, if it is plain names joined by `/`. Raises INVALID_ARGUMENT."""
    if not all(map(_COMPONENT.fullmatch, key.split("/"))):
        raise invalid("key", repr(key), "plain names joined by '/'")
    return key


def check_digest(key: str, data: bytes, digest: str) -> None:
    """Raises INTERNAL where `data` has another digest."""
    is_sha256 = len(digest) == _SHA256_DIGITS
    got = hashlib.sha256(data).hexdigest() if is_sha256 else digest_bytes(data)
    if got != digest:
        raise damaged(key, f"digest {got}", f"digest {digest}")


def check_file(key: str, path: Path, file: WeightFile) -> None:
    """Raises INTERNAL where `path` does not match its entry in a manifest."""
    size_bytes = path.stat().st_size
    if size_bytes != file.size_bytes:
        raise damaged(f"{key}/{file.name}", f"{size_bytes} bytes", f"{file.size_bytes} bytes")
    digest = digest_file(path)
    if digest != file.digest:
        raise damaged(f"{key}/{file.name}", f"digest {digest}", f"digest {file.digest}")


def describe_folder(folder: Path) -> tuple[WeightFile, ...]:
    """The files of a flat folder, by name."""
    paths = sorted(path for path in folder.iterdir() if path.name != FOLDER_MANIFEST)
    assert paths, "a folder without files"
    assert all(path.is_file() and not path.is_symlink() for path in paths), "a folder is flat"
    return tuple(
        WeightFile(
            name=checked_key(path.name), size_bytes=path.stat().st_size, digest=digest_file(path)
        )
        for path in paths
    )


def encode_manifest(files: Sequence[WeightFile]) -> bytes:
    """JSON, sealed."""
    return seal_bytes(json.dumps({"format": _FORMAT, "files": [asdict(f) for f in files]}).encode())


def decode_manifest(key: str, data: bytes) -> tuple[WeightFile, ...]:
    """The files by name. Raises INTERNAL for bytes that `encode_manifest` would not write."""
    what = f"{key}/{FOLDER_MANIFEST}"
    try:
        document = json.loads(unseal_bytes(data))
        if document["format"] != _FORMAT:
            raise damaged(what, f"format {document['format']}", f"{_FORMAT}")
        return tuple(
            WeightFile(
                name=_file_name(what, str(file["name"])),
                size_bytes=int(file["size_bytes"]),
                digest=str(file["digest"]),
            )
            for file in document["files"]
        )
    # A seal says that the bytes are whole, not who wrote them.
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as err:
        raise damaged(what, shown(str(err)), "a manifest") from err


def _file_name(what: str, name: str) -> str:
    if not _COMPONENT.fullmatch(name):
        raise damaged(what, shown(name), "plain names")
    return name


def check_same(key: str, manifest: bytes, files: Sequence[WeightFile]) -> None:
    """Raises FileExistsError where an existing manifest names other files than these."""
    if manifest != encode_manifest(files):
        raise FileExistsError(key)


@contextmanager
def made_folder(target: Path) -> Generator[Path, None, None]:
    """A folder to fill. After the block it is durable and named `target`; on failure it is gone."""
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


def damaged(what: str, got: str, expected: str) -> RatoonError:
    return RatoonError(
        ErrorCode.INTERNAL,
        f"{what} is damaged: got {got}, expected {expected}",
        field=what,
        got=got,
        expected=expected,
    )
