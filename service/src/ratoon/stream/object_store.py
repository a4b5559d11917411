"""Bytes and folders by key in an S3-compatible object store, through fsspec.

Keys are plain names joined by `/`; a key never changes its content, and has one writer. A folder
exists once its manifest, written last and deleted first, does. Reads are verified by digest.

The store writes objects atomically, including multipart uploads. Unanswered calls are retried for
at most `timeout_s` seconds plus one attempt, then raise UNAVAILABLE. All calls block, and may come
from any thread.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar, cast

import tenacity
from aiohttp import ClientError as ConnectionLostError
from botocore.exceptions import (  # pyright: ignore[reportMissingTypeStubs]
    BotoCoreError,
    NoCredentialsError,
    PartialCredentialsError,
)
from s3fs import S3FileSystem  # pyright: ignore[reportMissingTypeStubs]

from ratoon.errors import ErrorCode, RatoonError, invalid, shown
from ratoon.stream.files import (
    digest_file,
    made_folder,
    seal_bytes,
    unseal_bytes,
)
from ratoon.stream.manifest import read_file
from ratoon_proto.types import WeightFile

SCHEME = "s3://"
# Name that is never a key: components do not start with a dot.
FOLDER_MANIFEST = ".files"
_FORMAT = 1
_COMPONENT = re.compile(r"[a-zA-Z0-9_-][a-zA-Z0-9._-]{0,127}")
_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 30.0
_FIRST_WAIT_S = 0.1
_MAX_WAIT_S = 5.0

T = TypeVar("T")


class ObjectStore:
    """Credentials, region and endpoint come from the usual AWS variables.

    Raises INVALID_ARGUMENT if `url` is not `s3://bucket/prefix`. Methods raise INVALID_ARGUMENT for
    other keys, FileNotFoundError for a missing one, and INTERNAL for damaged content.
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        place = url.removeprefix(SCHEME).rstrip("/")
        if not url.startswith(SCHEME) or not place:
            raise invalid("storage_url", repr(url), "s3://bucket/prefix")
        self._place = _checked_key(place)
        self._timeout_s = timeout_s
        self._store: Any = S3FileSystem(
            use_listings_cache=False,
            skip_instance_cache=True,
            config_kwargs={
                "connect_timeout": _CONNECT_TIMEOUT_S,
                "read_timeout": _READ_TIMEOUT_S,
                "retries": {"total_max_attempts": 1},
            },
        )
        # One attempt per call: `_call` limits the time of all attempts together.
        self._store.retries = 1

    def check(self) -> None:
        """Check that the bucket exists and is writable. Raises UNAVAILABLE, INVALID_ARGUMENT."""
        probe = f"{self._place}/.probe"
        try:
            self._call(lambda: self._store.pipe_file(probe, b""))
            self._call(lambda: self._store.rm_file(probe))
        except (FileNotFoundError, PermissionError) as err:
            raise invalid("storage_url", str(err), "a bucket that may be written") from err

    def put(self, key: str, data: bytes) -> None:
        """Store `data`: durable on return, and atomic for readers."""
        path = self._path(key)
        self._call(lambda: self._store.pipe_file(path, data))

    def get(self, key: str, digest: str) -> bytes:
        """Returns the bytes, verified by their SHA-256."""
        data = self._read(self._path(key))
        got = hashlib.sha256(data).hexdigest()
        if got != digest:
            raise _damaged(key, f"digest {got}", f"digest {digest}")
        return data

    def delete(self, key: str) -> None:
        """Delete the key, which may be gone already."""
        self._remove(self._path(key))

    def names(self, key: str) -> tuple[str, ...]:
        """Names of the blobs directly below `key`, ascending."""
        return tuple(sorted(name for name in self._names(key) if "/" not in name))

    def put_folder(self, key: str, source: Path) -> None:
        """Copy the folder `source`, with files in folders within it.

        Raises FileExistsError if the key has other files; if it has the same, nothing is copied.
        """
        path = self._path(key)
        files = _describe_folder(source)
        manifest = encode_manifest(files)
        if self._call(lambda: self._store.exists(f"{path}/{FOLDER_MANIFEST}")):
            if self._read(f"{path}/{FOLDER_MANIFEST}") != manifest:
                raise FileExistsError(key)
            return
        self._clear(path)
        for file in files:
            local, remote = str(source / file.name), f"{path}/{file.name}"
            self._call(lambda local=local, remote=remote: self._store.put_file(local, remote))
        self._call(lambda: self._store.pipe_file(f"{path}/{FOLDER_MANIFEST}", manifest))

    def get_folder(self, key: str, target: Path) -> None:
        """Makes a verified copy at `target`, which must not exist yet and appears whole."""
        path = self._path(key)
        files = decode_manifest(key, self._read(f"{path}/{FOLDER_MANIFEST}"))
        with made_folder(target) as folder:
            for file in files:
                remote, local = f"{path}/{file.name}", folder / file.name
                local.parent.mkdir(parents=True, exist_ok=True)
                self._call(
                    lambda remote=remote, local=local: self._store.get_file(remote, str(local))
                )
                _check_file(key, local, file)

    def delete_folder(self, key: str) -> None:
        """Delete a folder, atomically for readers; it may be gone already."""
        path = self._path(key)
        self._remove(f"{path}/{FOLDER_MANIFEST}")
        self._clear(path)

    def folder_names(self, key: str) -> tuple[str, ...]:
        """Names of the complete folders directly below `key`, ascending."""
        end = f"/{FOLDER_MANIFEST}"
        names = (name.removesuffix(end) for name in self._names(key) if name.endswith(end))
        return tuple(sorted(name for name in names if "/" not in name))

    def remove_leftovers(self, key: str) -> None:
        """Remove files of folders without a manifest, and incomplete uploads."""
        path = self._path(key)
        whole = set(self.folder_names(key))
        for name in self._names(key):
            folder, is_below, _ = name.partition("/")
            if is_below and folder not in whole:
                self._remove(f"{path}/{name}")
        bucket, _, prefix = path.partition("/")
        found = self._call(
            lambda: self._store.call_s3(
                "list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/"
            )
        )
        for upload in cast("list[dict[str, str]]", found.get("Uploads", [])):
            self._call(
                lambda upload=upload: self._store.call_s3(
                    "abort_multipart_upload",
                    Bucket=bucket,
                    Key=upload["Key"],
                    UploadId=upload["UploadId"],
                )
            )

    def _path(self, key: str) -> str:
        return f"{self._place}/{_checked_key(key)}"

    def _names(self, key: str) -> list[str]:
        """Names of all objects below `key`, relative to it."""
        path = self._path(key)
        found = cast("list[str]", self._call(lambda: self._store.find(f"{path}/")))
        return [name.removeprefix(f"{path}/") for name in found]

    def _read(self, path: str) -> bytes:
        return self._call(lambda: self._store.cat_file(path))

    def _clear(self, path: str) -> None:
        for name in cast("list[str]", self._call(lambda: self._store.find(f"{path}/"))):
            self._remove(name)

    def _remove(self, path: str) -> None:
        """Delete an object; a missing one is no error in S3."""
        self._call(lambda: self._store.rm_file(path))

    def _call(self, attempt: Callable[[], T]) -> T:
        """Run `attempt`, retrying as long as the store does not answer and time is left."""
        deadline = time.monotonic() + self._timeout_s
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_may_pass),
            wait=tenacity.wait_random_exponential(multiplier=_FIRST_WAIT_S, max=_MAX_WAIT_S),
            stop=lambda _: time.monotonic() >= deadline,
            reraise=True,
        )
        try:
            return retrying(attempt)
        except (FileNotFoundError, FileExistsError, PermissionError):
            raise
        except _NO_ANSWER as err:
            raise RatoonError(
                ErrorCode.UNAVAILABLE, f"the object store: {type(err).__name__}: {err}"
            ) from err


_NO_ANSWER = (OSError, BotoCoreError, ConnectionLostError, TimeoutError)
_FINAL = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    NoCredentialsError,
    PartialCredentialsError,
)


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, _NO_ANSWER) and not isinstance(error, _FINAL)


def _checked_key(key: str) -> str:
    """`key`, if it is plain names joined by `/`. Raises INVALID_ARGUMENT."""
    if not all(map(_COMPONENT.fullmatch, key.split("/"))):
        raise invalid("key", repr(key), "plain names joined by '/'")
    return key


def _check_file(key: str, path: Path, file: WeightFile) -> None:
    """Raises INTERNAL if `path` does not match its entry in a manifest."""
    size_bytes = path.stat().st_size
    if size_bytes != file.size_bytes:
        raise _damaged(f"{key}/{file.name}", f"{size_bytes} bytes", f"{file.size_bytes} bytes")
    digest = digest_file(path)
    if digest != file.digest:
        raise _damaged(f"{key}/{file.name}", f"digest {digest}", f"digest {file.digest}")


def _describe_folder(folder: Path) -> tuple[WeightFile, ...]:
    """Returns the files of a folder, by name."""
    paths = sorted(path for path in folder.rglob("*") if path.name != FOLDER_MANIFEST)
    paths = [path for path in paths if not path.is_dir()]
    assert paths, "a folder without files"
    assert all(path.is_file() and not path.is_symlink() for path in paths), "only files"
    return tuple(
        WeightFile(
            name=_checked_key(str(path.relative_to(folder))),
            size_bytes=path.stat().st_size,
            digest=digest_file(path),
        )
        for path in paths
    )


def encode_manifest(files: Sequence[WeightFile]) -> bytes:
    """Returns the files as sealed JSON."""
    return seal_bytes(json.dumps({"format": _FORMAT, "files": [asdict(f) for f in files]}).encode())


def decode_manifest(key: str, data: bytes) -> tuple[WeightFile, ...]:
    """Returns the files by name. Raises INTERNAL for bytes that `encode_manifest` would not
    write."""
    what = f"{key}/{FOLDER_MANIFEST}"
    try:
        document = json.loads(unseal_bytes(data))
        if document["format"] != _FORMAT:
            raise _damaged(what, f"format {document['format']}", f"{_FORMAT}")
        files = tuple(map(read_file, document["files"]))
    # A seal shows that the bytes are complete, not who wrote them.
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as err:
        raise _damaged(what, shown(str(err)), "a manifest") from err
    for file in files:
        if not all(map(_COMPONENT.fullmatch, file.name.split("/"))):
            raise _damaged(what, shown(file.name), "plain names")
    return files


def _damaged(what: str, got: str, expected: str) -> RatoonError:
    return RatoonError(
        ErrorCode.INTERNAL,
        f"{what} is damaged: got {got}, expected {expected}",
        field=what,
        got=got,
        expected=expected,
    )
