"""`Blobs` in an S3-compatible object store, through fsspec.

The store writes objects atomically, including multipart uploads. A folder exists while its manifest
does, which is deleted first. Unanswered calls are retried for at most `timeout_s` seconds plus one
attempt, then raise UNAVAILABLE.
"""

from __future__ import annotations

import time
from collections.abc import Callable
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

from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon.stream import blobs

SCHEME = "s3://"
_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 30.0
_FIRST_WAIT_S = 0.1
_MAX_WAIT_S = 5.0

T = TypeVar("T")


class ObjectStore:
    """See `Blobs`. Credentials, region and endpoint come from the usual AWS variables.

    Raises INVALID_ARGUMENT if `url` is not `s3://bucket/prefix`.
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        place = url.removeprefix(SCHEME).rstrip("/")
        if not url.startswith(SCHEME) or not place:
            raise invalid("storage_url", repr(url), "s3://bucket/prefix")
        self._place = blobs.checked_key(place)
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
        path = self._path(key)
        self._call(lambda: self._store.pipe_file(path, data))

    def get(self, key: str, digest: str) -> bytes:
        data = self._read(self._path(key))
        blobs.check_digest(key, data, digest)
        return data

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        path = self._path(key)
        if offset >= self._call(lambda: int(self._store.size(path))):
            return b""
        return self._call(lambda: self._store.cat_file(path, start=offset, end=offset + length))

    def delete(self, key: str) -> None:
        self._remove(self._path(key))

    def names(self, key: str) -> tuple[str, ...]:
        return tuple(sorted(name for name in self._names(key) if "/" not in name))

    def put_folder(self, key: str, source: Path) -> None:
        path = self._path(key)
        files = blobs.describe_folder(source)
        if self._call(lambda: self._store.exists(f"{path}/{blobs.FOLDER_MANIFEST}")):
            blobs.check_same(key, self._read(f"{path}/{blobs.FOLDER_MANIFEST}"), files)
            return
        self._clear(path)
        for file in files:
            local, remote = str(source / file.name), f"{path}/{file.name}"
            self._call(lambda local=local, remote=remote: self._store.put_file(local, remote))
        manifest = blobs.encode_manifest(files)
        self._call(lambda: self._store.pipe_file(f"{path}/{blobs.FOLDER_MANIFEST}", manifest))

    def get_folder(self, key: str, target: Path) -> None:
        path = self._path(key)
        files = blobs.decode_manifest(key, self._read(f"{path}/{blobs.FOLDER_MANIFEST}"))
        with blobs.made_folder(target) as folder:
            for file in files:
                remote, local = f"{path}/{file.name}", folder / file.name
                self._call(
                    lambda remote=remote, local=local: self._store.get_file(remote, str(local))
                )
                blobs.check_file(key, local, file)

    def delete_folder(self, key: str) -> None:
        path = self._path(key)
        self._remove(f"{path}/{blobs.FOLDER_MANIFEST}")
        self._clear(path)

    def folder_names(self, key: str) -> tuple[str, ...]:
        end = f"/{blobs.FOLDER_MANIFEST}"
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
        return f"{self._place}/{blobs.checked_key(key)}"

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
