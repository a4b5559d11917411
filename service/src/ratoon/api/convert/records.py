"""Messages and the dataclasses that have their fields; errors name fields as callers know them."""

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
    """A record of `message`, whose path is `path`; `given` are fields that it says otherwise.

    Raises INVALID_ARGUMENT for a field without a default that is absent, and for an unknown enum.
    """
    try:
        return to_record(message, record, path, given=given)
    except FieldError as err:
        raise invalid(err.field, err.got, err.expected) from err


def write(message: MessageT, record: object, *, skip: Collection[str] = ()) -> MessageT:
    """`message` with the fields of `record` but those in `skip`; times are Unix seconds."""
    fill(message, record, skip=skip)
    return message
