"""Keeps API keys in a file, `access/keys.json` below the data root.

Every process checks at each call whether the file was replaced, so a revoked key is refused at
once. A damaged file lets nobody in.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from ratoon.auth.keys import ApiKey
from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon.log import get_logger
from ratoon.stream.files import (
    DamagedFileError,
    make_folder,
    seal_document,
    unseal_document,
    write_atomic,
)

Keys = Mapping[str, ApiKey]
_NO_KEYS: Keys = MappingProxyType({})
_log = get_logger("auth")


@checked_dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """The content of the file."""

    format: Literal[1]
    keys: tuple[ApiKey, ...]


def access_folder(data_root: Path) -> Path:
    """Return the folder of keys and audit log; it need not exist."""
    return data_root / "access"


def make_access_folder(data_root: Path) -> Path:
    """Make that folder, and a missing data root, accessible only to the owner."""
    folder = access_folder(data_root)
    # The data root will hold rollouts and weights. One that an operator has made keeps its mode.
    make_folder(data_root, 0o700)
    make_folder(folder, 0o700)
    return folder


class KeyFile:
    """The keys of one data root. The file is made with the first key."""

    def __init__(self, data_root: Path) -> None:
        self._data_root = data_root
        self._path = access_folder(data_root) / "keys.json"
        self._signature: tuple[int, int, int] | None = None
        self._keys = _NO_KEYS

    def keys(self) -> Keys:
        """Return every key by its id, revoked ones too; none without a file.

        Raises UNAVAILABLE where the file cannot be read: then nobody is let in.
        """
        try:
            status = self._path.stat()
            signature = (status.st_ino, status.st_mtime_ns, status.st_size)
            # Before the file is read, so that a replacement in between is noticed.
            if signature != self._signature:
                self._keys = _parsed(self._path.read_bytes())
                self._signature = signature
        except FileNotFoundError:
            self._signature, self._keys = None, _NO_KEYS
        except (OSError, DamagedFileError, ValidationError) as err:
            self._signature = None
            _log.error("keys cannot be read", path=str(self._path), error=type(err).__name__)
            raise RatoonError(ErrorCode.UNAVAILABLE, "the API keys cannot be read") from None
        return self._keys

    def add(self, key: ApiKey) -> None:
        """Add a key. Raises UNAVAILABLE where the file cannot be read."""
        self._change(lambda keys: {**keys, key.key_id: key})

    def revoke(self, key_id: str, now: float) -> None:
        """Revoke a key; idempotent. Raises INVALID_ARGUMENT for an unknown key, UNAVAILABLE."""

        def revoked(keys: Keys) -> Keys:
            if key_id not in keys:
                raise invalid("key_id", repr(key_id), "the id of a key (ratoon keys list)")
            if keys[key_id].revoked_at is not None:
                return keys
            return {**keys, key_id: replace(keys[key_id], revoked_at=now)}

        self._change(revoked)

    def _change(self, change: Callable[[Keys], Keys]) -> None:
        make_access_folder(self._data_root)
        with self._locked():
            keys = change(self.keys())
            write_atomic(self._path, _written(keys.values()))

    @contextmanager
    def _locked(self) -> Generator[None, None, None]:
        descriptor = os.open(self._path.with_name(".keys.lock"), os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _parsed(data: bytes) -> Keys:
    table = TypeAdapter(_Table).validate_python(unseal_document(data))
    return MappingProxyType({key.key_id: key for key in table.keys})


def _written(keys: Iterable[ApiKey]) -> bytes:
    table = _Table(format=1, keys=tuple(keys))
    return seal_document(TypeAdapter(_Table).dump_python(table, mode="json"))
