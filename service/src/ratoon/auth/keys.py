"""Creates and verifies API keys, and keeps them in `access/keys.json` below the data root.

A record holds only the SHA-256 of the secret, which has 256 random bits, so a slow hash would add
nothing. A key is written as

    ratoon_<id: 12 hexadecimal digits>_<secret: 64 hexadecimal digits>

and one for the Tinker wire as tml-<id>-<secret>, as its SDK takes no other.

Every process checks at each call whether the file was replaced, so a revoked key is refused at
once. A damaged file lets nobody in.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from ratoon.config import KeyLimits
from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon.log import get_logger
from ratoon.stream.files import (
    DamagedFileError,
    make_folder,
    seal_document,
    unseal_document,
    write_atomic,
)

_KEY = re.compile(r"(?:ratoon_([0-9a-f]{12})_|tml-([0-9a-f]{12})-)([0-9a-f]{64})")
_ID_BYTES = 6
_SECRET_BYTES = 32
# Hash to compare with if there is no record, so that the comparison takes as long.
_NO_HASH = "0" * 64
NO_LIMITS = KeyLimits()
_log = get_logger("auth")


class Scope(StrEnum):
    """The calls that a key may make: `train` includes `read`, and `admin` both.

    No scope includes `read:rollouts`, to see tokens and texts. A key has it besides its own scope.
    `tinker` allows the calls of the Tinker wire alone, on what the key itself has made; `admin`
    includes it.
    """

    READ = "read"
    TRAIN = "train"
    ADMIN = "admin"
    READ_ROLLOUTS = "read:rollouts"
    TINKER = "tinker"

    def includes(self, other: Scope) -> bool:
        """Return whether this scope allows the calls of another."""
        if Scope.TINKER in (self, other):
            return self is other or self is Scope.ADMIN
        if Scope.READ_ROLLOUTS in (self, other):
            return self is other
        order = tuple(Scope)
        return order.index(self) >= order.index(other)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """Record of an API key.

    `policies` None: all policies. Times are seconds since the epoch; None: never.
    """

    key_id: str
    secret_sha256: str
    scope: Scope
    policies: tuple[str, ...] | None
    note: str
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    # The key's own limits.
    limits: KeyLimits = NO_LIMITS
    # Whether it has the scope `read:rollouts` besides.
    reads_rollouts: bool = False

    def is_valid(self, now: float) -> bool:
        """Return whether the key is neither revoked nor expired at the time `now`."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


def new_key(
    *,
    scope: Scope,
    policies: tuple[str, ...] | None,
    note: str,
    created_at: float,
    expires_at: float | None,
    limits: KeyLimits = NO_LIMITS,
    reads_rollouts: bool = False,
) -> tuple[ApiKey, str]:
    """Create a key. Returns its record, and the text for its owner, which is kept nowhere else."""
    key_id, secret = secrets.token_hex(_ID_BYTES), secrets.token_hex(_SECRET_BYTES)
    key = ApiKey(
        key_id=key_id,
        secret_sha256=_hash(secret),
        scope=scope,
        policies=policies,
        note=note,
        created_at=created_at,
        expires_at=expires_at,
        revoked_at=None,
        limits=limits,
        reads_rollouts=reads_rollouts,
    )
    is_tinker = scope is Scope.TINKER
    return key, f"tml-{key_id}-{secret}" if is_tinker else f"ratoon_{key_id}_{secret}"


def split_key(text: str) -> tuple[str, str] | None:
    """Return (id, secret) of a key's text; None if `text` is not a key."""
    match = _KEY.fullmatch(text)
    return (match[1] or match[2], match[3]) if match else None


def is_secret_of(secret: str, key: ApiKey | None) -> bool:
    """Return whether `secret` is that of `key`, in constant time."""
    known = _NO_HASH if key is None else key.secret_sha256
    return hmac.compare_digest(_hash(secret), known) and key is not None


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


Keys = Mapping[str, ApiKey]
_NO_KEYS: Keys = MappingProxyType({})


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
