"""Creates, writes and verifies API keys.

A record holds only the SHA-256 of the secret, which has 256 random bits, so a slow hash would add
nothing. A key is written as

ratoon_<id: 12 hexadecimal digits>_<secret: 64 hexadecimal digits>
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from enum import StrEnum

from ratoon.config import KeyLimits

_KEY = re.compile(r"ratoon_([0-9a-f]{12})_([0-9a-f]{64})")
_ID_BYTES = 6
_SECRET_BYTES = 32
# Hash to compare with if there is no record, so that the comparison takes as long.
_NO_HASH = "0" * 64
NO_LIMITS = KeyLimits()


class Scope(StrEnum):
    """The calls that a key may make. Each scope includes those before it."""

    READ = "read"
    TRAIN = "train"
    ADMIN = "admin"

    def includes(self, other: Scope) -> bool:
        """Return whether this scope allows the calls of another."""
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
    )
    return key, f"ratoon_{key_id}_{secret}"


def split_key(text: str) -> tuple[str, str] | None:
    """Return (id, secret) of a key's text; None if `text` is not a key."""
    match = _KEY.fullmatch(text)
    return (match[1], match[2]) if match else None


def is_secret_of(secret: str, key: ApiKey | None) -> bool:
    """Return whether `secret` is that of `key`, in constant time."""
    known = _NO_HASH if key is None else key.secret_sha256
    return hmac.compare_digest(_hash(secret), known) and key is not None


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
