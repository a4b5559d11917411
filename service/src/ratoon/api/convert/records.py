"""Messages to dataclasses with the same fields, and back; errors use callers' field names."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

from google.protobuf.message import Message

from ratoon.errors import invalid
from ratoon_proto.fields import FieldError
from ratoon_proto.fill import fill
from ratoon_proto.records import to_record

T = TypeVar("T")
MessageT = TypeVar("MessageT", bound=Message)


def read(message: Message, record: type[T], path: str, **given: Any) -> T:
    """A record of `message`, whose path is `path`; `given` replaces its fields.

    Raises INVALID_ARGUMENT for a missing field without a default, and for an unknown enum.
    """
    try:
        return to_record(message, record, path, given=given)
    except FieldError as err:
        raise invalid(err.field, err.got, err.expected) from err


def write(message: MessageT, record: object, *, skip: Collection[str] = ()) -> MessageT:
    """Fill `message` from `record`, except the fields in `skip`; times are Unix seconds."""
    fill(message, record, skip=skip)
    return message
