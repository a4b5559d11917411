"""API keys: creating, writing as text, verifying.

A record holds only the SHA-256 of the secret, which has 256 random bits, so a slow hash would add
nothing.

    ratoon_<id: 12 hexadecimal digits>_<secret: 64 hexadecimal digits>
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass

from ratoon.auth.scopes import Scope
from ratoon.config import KeyLimits

_KEY = re.compile(r"ratoon_([0-9a-f]{12})_([0-9a-f]{64})")
_ID_BYTES = 6
_SECRET_BYTES = 32
# Compared with where there is no record, so that it takes as long.
_NO_HASH = "0" * 64
NO_LIMITS = KeyLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """`policies` None: all. Times are seconds since the epoch; None: never."""

    key_id: str
    secret_sha256: str
    scope: Scope
    policies: tuple[str, ...] | None
    note: str
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    # Limits of the key's own.
    limits: KeyLimits = NO_LIMITS

    def is_valid(self, now: float) -> bool:
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
    """A record, and the text for its owner, which is kept nowhere else."""
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
    """(id, secret), or None where `text` is no key."""
    match = _KEY.fullmatch(text)
    return (match[1], match[2]) if match else None


def is_secret_of(secret: str, key: ApiKey | None) -> bool:
    """Whether `secret` is that of `key`, in constant time."""
    known = _NO_HASH if key is None else key.secret_sha256
    return hmac.compare_digest(_hash(secret), known) and key is not None


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
