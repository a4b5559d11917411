"""Messages to dataclasses whose fields have their names.

What is absent takes the dataclass's default. The type of a field decides the rest: a `StrEnum` is
strict, a plain text takes the short name of any enum value, a dataclass is a record of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from ratoon_proto.fields import FieldError, enum_name, is_map, one_of

T = TypeVar("T")


def to_record(
    message: Message,
    record: type[T],
    path: str = "",
    *,
    given: Mapping[str, Any] | None = None,
) -> T:
    """The record of `message`; `given` holds the fields that are not read by their names.

    Raises FieldError, below `path`, for a field without a default that is absent, and for an enum
    value that a `StrEnum` has not.
    """
    values = dict(given or {})
    for name, hint, has_default in _shape(record):
        if name in values:
            continue
        place = f"{path}.{name}" if path else name
        field = cast("FieldDescriptor", message.DESCRIPTOR.fields_by_name[name])
        if not _is_absent(message, field, hint):
            values[name] = _value(field, getattr(message, name), hint, place)
        elif not has_default:
            values[name] = _default(message, field, hint, place)
    return record(**values)


@cache
def _shape(record: type[Any]) -> tuple[tuple[str, Any, bool], ...]:
    """Name and type of each field, and whether it has a default."""
    hints = get_type_hints(record)
    return tuple(
        (
            field.name,
            hints[field.name],
            field.default is not MISSING or field.default_factory is not MISSING,
        )
        for field in cast("Iterable[Field[Any]]", fields(record))
        if field.init
    )


def _is_absent(message: Message, field: FieldDescriptor, hint: Any) -> bool:
    if field.has_presence:
        return not message.HasField(field.name)
    is_strict = field.enum_type is not None and _enum_of(hint) is not None
    return is_strict and not field.is_repeated and getattr(message, field.name) == 0


def _default(message: Message, field: FieldDescriptor, hint: Any, place: str) -> Any:
    """Value of an absent field without a default: None, or an empty record."""
    if NoneType in get_args(hint):
        return None
    if field.message_type is not None:
        return _value(field, getattr(message, field.name), hint, place)
    raise FieldError(place, "nothing", one_of(field.enum_type) if field.enum_type else "a number")


def _value(field: FieldDescriptor, value: Any, hint: Any, place: str) -> Any:
    if is_map(field):
        return dict(value)
    if field.is_repeated:
        item_hint = get_args(hint)[0]
        return tuple(
            _single(field, item, item_hint, f"{place}[{index}]") for index, item in enumerate(value)
        )
    return _single(field, value, hint, place)


def _single(field: FieldDescriptor, value: Any, hint: Any, place: str) -> Any:
    if isinstance(value, Timestamp):
        return datetime.fromtimestamp(value.seconds + value.nanos * 1e-9, tz=UTC)
    if isinstance(value, Message):
        return to_record(value, _plain(hint), place)
    if field.enum_type is None:
        return value
    enum = _enum_of(hint)
    if enum is None:
        return enum_name(field.enum_type, value)
    if value not in field.enum_type.values_by_number:
        raise FieldError(place, f"enum value {value}", one_of(field.enum_type))
    return enum(enum_name(field.enum_type, value))


def _enum_of(hint: Any) -> type[StrEnum] | None:
    plain = _plain(hint)
    return plain if isinstance(plain, type) and issubclass(plain, StrEnum) else None


def _plain(hint: Any) -> Any:
    """A type without its None."""
    if get_origin(hint) in (Union, UnionType):
        return next(one for one in get_args(hint) if one is not NoneType)
    return hint
