"""Messages to the values of `ratoon_proto.types`, or of any dataclass with the fields' names.

A requested value is strict: what a caller got wrong is refused by field. An answer is lenient: a
newer service may know more than this client does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, fields
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from ratoon_proto.bases import UNSPECIFIED
from ratoon_proto.fields import (
    FieldError,
    default_text,
    enum_name,
    is_map,
    is_required,
    one_of,
)

T = TypeVar("T")
EnumT = TypeVar("EnumT", bound=StrEnum)
# One value of a field: what the message holds, and its path in errors.
_Convert = Callable[[Any, str], Any]
# A field of a message, and the message's own path.
_Read = Callable[[Any, str], Any]
_ABSENT = object()


def from_proto(message: Message, kind: type[T], path: str = "", *, is_request: bool = False) -> T:
    """Read a value from a message.

    Args:
        message: What a peer sent.
        kind: A dataclass whose fields have the names of the message's fields, or of its unions.
            The types of its fields decide which classes nested values have.
        path: The message's own place, for errors.
        is_request: Whether to refuse what is missing or unknown. Otherwise an unknown enum value is
            `unspecified`, and a missing message is one without content.

    Returns:
        A value of `kind`; what is absent has the default of the class.

    Raises:
        FieldError: A required field is missing or an enum value is unknown, in a request.
        ValueError, OverflowError or OSError: A time is out of range.
    """
    values: dict[str, Any] = {}
    for name, read in _readers(message.DESCRIPTOR, kind, is_request):
        value = read(message, path)
        if value is not _ABSENT:
            values[name] = value
    return kind(**values)


def read_enum(message: Message, name: str, kind: type[EnumT], path: str) -> EnumT:
    """Read one enum of a request.

    Returns:
        The member; `unspecified`, or the default that the .proto file names, where it is absent.

    Raises:
        FieldError: The value is unknown, or missing from a required field.
    """
    number = getattr(message, name)
    if not number and (absent := _absent_member(message.DESCRIPTOR, name, kind)) is not None:
        return absent
    field = cast("FieldDescriptor", message.DESCRIPTOR.fields_by_name[name])
    if not number:
        raise _missing(field, path)
    return _member(field, kind, path, number, is_request=True)


@cache
def _absent_member(message: Descriptor, name: str, kind: type[EnumT]) -> EnumT | None:
    """The member that absence of an enum means; None: the field is required."""
    field = message.fields_by_name[name]
    return None if is_required(field) else kind(default_text(field) or UNSPECIFIED)


@cache
def _readers(
    message: Descriptor, kind: type[Any], is_request: bool
) -> tuple[tuple[str, _Read], ...]:
    hints = get_type_hints(kind)
    return tuple(
        (each.name, _reader(message, each, hints[each.name], is_request))
        for each in cast("Iterable[Field[Any]]", fields(kind))
        if each.init
    )


def _reader(message: Descriptor, of: Field[Any], hint: Any, is_request: bool) -> _Read:
    union = message.oneofs_by_name.get(of.name)
    if union is not None:
        kinds = _kinds_of(hint)
        converts: dict[str, _Convert | None] = {
            field.name: _convert(field, kinds[field.message_type.name], is_request)
            for field in cast("Iterable[FieldDescriptor]", union.fields)
            if field.message_type is not None and field.message_type.name in kinds
        }
        return _union_reader(of.name, converts)
    field = message.fields_by_name[of.name]
    if is_map(field):
        return lambda message, _: dict(getattr(message, field.name))
    plain = _plain(hint)
    convert = _convert(field, get_args(plain)[0] if field.is_repeated else plain, is_request)
    if field.is_repeated:
        return _list_reader(field.name, convert)
    has_default = of.default is not MISSING or of.default_factory is not MISSING
    return _single_reader(field, convert, has_default=has_default, is_request=is_request)


def _union_reader(name: str, converts: dict[str, _Convert | None]) -> _Read:
    def read(message: Message, path: str) -> Any:
        member = message.WhichOneof(name)
        convert = converts.get(member or "")
        if convert is None:
            return _ABSENT
        return convert(getattr(message, cast("str", member)), _below(path, cast("str", member)))

    return read


def _list_reader(name: str, convert: _Convert | None) -> _Read:
    if convert is None:
        return lambda message, _: tuple(getattr(message, name))

    def read(message: Message, path: str) -> Any:
        own = _below(path, name)
        return tuple(
            convert(item, f"{own}[{index}]") for index, item in enumerate(getattr(message, name))
        )

    return read


def _single_reader(
    field: FieldDescriptor, convert: _Convert | None, *, has_default: bool, is_request: bool
) -> _Read:
    name = field.name
    # Zero stands for absence where the .proto file says so, and of an enum that is not required.
    is_zero_absent = not field.has_presence and (
        bool(default_text(field)) or (field.enum_type is not None and (has_default or is_request))
    )
    if not field.has_presence and not is_zero_absent:
        return _always(name, convert)
    # Nothing is missing from an answer: a message is empty, and a number zero.
    is_missing_refused = is_request and is_required(field)
    is_skipped = has_default or is_missing_refused

    def read(message: Message, path: str) -> Any:
        if is_skipped and not (
            getattr(message, name) if is_zero_absent else message.HasField(name)
        ):
            if is_missing_refused:
                raise _missing(field, _below(path, name))
            return _ABSENT
        value = getattr(message, name)
        return value if convert is None else convert(value, _below(path, name))

    return read


def _always(name: str, convert: _Convert | None) -> _Read:
    if convert is None:
        return lambda message, _: getattr(message, name)
    return lambda message, path: convert(getattr(message, name), _below(path, name))


def _convert(field: FieldDescriptor, kind: Any, is_request: bool) -> _Convert | None:
    """How one value becomes a `kind`; None: it is one already."""
    if field.message_type is not None:
        if field.message_type.full_name == Timestamp.DESCRIPTOR.full_name:
            return _time
        return lambda value, path: from_proto(value, kind, path, is_request=is_request)
    if field.enum_type is not None:
        return lambda value, path: _member(field, kind, path, value, is_request=is_request)
    return None


def _time(value: Timestamp, _: str) -> datetime:
    return datetime.fromtimestamp(value.seconds + value.nanos * 1e-9, tz=UTC)


def _member(
    field: FieldDescriptor, kind: type[EnumT], path: str, number: int, *, is_request: bool
) -> EnumT:
    enum = field.enum_type
    assert enum is not None
    if is_request and not number:
        raise _missing(field, path)
    if is_request and number not in enum.values_by_number:
        raise FieldError(path, f"enum value {number}", one_of(enum))
    return kind(enum_name(enum, number))


def _missing(field: FieldDescriptor, path: str) -> FieldError:
    return FieldError(path, "nothing", one_of(field.enum_type) if field.enum_type else "a number")


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _kinds_of(hint: Any) -> dict[str, Any]:
    """The classes of a union by the names of their messages; a subclass has its parent's too."""
    return {parent.__name__: arm for arm in get_args(hint) for parent in arm.__mro__}


def _plain(hint: Any) -> Any:
    """A type without its None."""
    if get_origin(hint) in (Union, UnionType):
        return next(one for one in get_args(hint) if one is not NoneType)
    return hint
