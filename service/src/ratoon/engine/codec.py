"""Engine values as JSON text and back: the journal's columns and the payload hash.

Enters any frozen dataclass of `_CLASSES`, leaves canonical JSON in which each names its class.
Invariant: only classes of the table are built on reading, and `from_text(to_text(v)) == v`.
"""

from __future__ import annotations

import hashlib
import json
import types
import typing
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, cast

from ratoon.engine import types as engine_types
from ratoon.engine.types import Command
from ratoon.model import spec as model_spec
from ratoon.train import config as train_config
from ratoon.train import report as train_report

_TAG = "$"

_CLASSES: dict[str, type] = {
    cls.__name__: cls
    for module in (engine_types, model_spec, train_config, train_report)
    for cls in vars(module).values()
    if isinstance(cls, type) and is_dataclass(cls)
}


def to_text(value: object) -> str:
    """Canonical JSON of a value: sorted names, no spaces, non-finite floats as in Python."""
    return json.dumps(_encode(value), sort_keys=True, separators=(",", ":"))


def from_text(text: str) -> object:
    """Inverse of `to_text` for a dataclass. Raises `ValueError` for a class not in the table."""
    return _decode(object, json.loads(text))


def payload_hash(command: Command) -> str:
    """SHA-256 of the validated command, which names its body by digest: 64 hexadecimal digits.

    The key is not in it, so a retry over another wire or by an upload in parts hashes the same.
    """
    return hash_text(to_text(command))


def hash_text(text: str) -> str:
    """SHA-256 of a text, 64 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def _encode(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        encoded: dict[str, object] = {_TAG: type(value).__name__}
        for field in fields(value):
            encoded[field.name] = _encode(getattr(value, field.name))
        return encoded
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, tuple | list):
        return [_encode(item) for item in cast("tuple[object, ...]", value)]
    if isinstance(value, dict):
        mapping = cast("dict[str, object]", value)
        return {name: _encode(item) for name, item in mapping.items()}
    assert value is None or isinstance(value, bool | int | float | str), type(value)
    return value


def _decode(hint: Any, value: object) -> object:
    if isinstance(value, dict):
        mapping = cast("dict[str, object]", value)
        return _decode_object(mapping) if _TAG in mapping else mapping
    for arm in _arms(hint):
        if typing.get_origin(arm) is tuple and isinstance(value, list):
            item_hint = typing.get_args(arm)[0]
            return tuple(_decode(item_hint, item) for item in cast("list[object]", value))
        if isinstance(arm, type) and issubclass(arm, StrEnum) and isinstance(value, str):
            return arm(value)
    return value


def _decode_object(mapping: dict[str, object]) -> object:
    name = str(mapping[_TAG])
    if name not in _CLASSES:
        raise ValueError(f"no such value: {name}")
    cls = _CLASSES[name]
    hints = _hints(cls)
    unknown = mapping.keys() - hints.keys() - {_TAG}
    if unknown:
        raise ValueError(f"{name} has no {sorted(unknown)}")
    build = cast("Callable[..., object]", cls)
    return build(
        **{name: _decode(hints[name], item) for name, item in mapping.items() if name != _TAG}
    )


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _arms(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union; anything else is its own only one."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)
