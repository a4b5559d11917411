"""The numerics fingerprint: what an operation's bits depend on besides journal and plan. Pure.

Equal digests mean equal fields.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """`fields` as the trainer names them; `digest` is of their JSON, 32 hexadecimal digits."""

    digest: str
    fields: Mapping[str, str]

    @classmethod
    def of(cls, fields: Mapping[str, str]) -> Numerics:
        digest = hashlib.sha256(_text(fields).encode()).hexdigest()[:32]
        return cls(digest=digest, fields=dict(fields))

    @property
    def text(self) -> str:
        return _text(self.fields)


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """The fields that differ, as `name: then -> now`."""
    names = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
    return ", ".join(f"{name}: {then.get(name, '')} -> {now.get(name, '')}" for name in names)


def _text(fields: Mapping[str, str]) -> str:
    return json.dumps(dict(fields), sort_keys=True, separators=(",", ":"))
