"""Messages to values and back; errors use callers' field names."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import TypeVar

from google.protobuf.message import Message

from ratoon.errors import invalid
from ratoon_proto import records
from ratoon_proto.fields import FieldError
from ratoon_proto.fill import fill

T = TypeVar("T")
EnumT = TypeVar("EnumT", bound=StrEnum)
MessageT = TypeVar("MessageT", bound=Message)


def read(message: Message, kind: type[T], path: str) -> T:
    """Read a value of class `kind` from a request's message, whose place is `path`.

    Raises INVALID_ARGUMENT for a missing field without a default, and for an unknown enum.
    """
    try:
        return records.from_proto(message, kind, path, is_request=True)
    except FieldError as err:
        raise invalid(err.field, err.got, err.expected) from err


def read_enum(message: Message, name: str, kind: type[EnumT], path: str) -> EnumT:
    """Read one enum of a request's message; `path` is its place.

    Raises INVALID_ARGUMENT for an unknown value.
    """
    try:
        return records.read_enum(message, name, kind, path)
    except FieldError as err:
        raise invalid(err.field, err.got, err.expected) from err


def write(message: MessageT, value: object, *, skip: Collection[str] = ()) -> MessageT:
    """Fill `message` from `value`, except the fields in `skip`; times are Unix seconds."""
    fill(message, value, skip=skip)
    return message
