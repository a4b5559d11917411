"""Messages as JSON and back: the one form of `ratoon.v1` over HTTP.

JSON differs from the message in this: enum values are lower case and without their prefix, times
are RFC 3339, bytes base64, the fields of a flat message stand where it would.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Collection, Mapping
from typing import Any, TypeVar, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from ratoon_proto.fields import enum_name, fields_of, is_flat, is_map
from ratoon_proto.fill import FLOATS, fill_known

_PLAIN = (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_STRING)
MessageT = TypeVar("MessageT", bound=Message)


def to_json(message: Message) -> dict[str, Any]:
    """Returns an answer with every field; absent fields are null, and so are numbers that are not
    finite."""
    return {
        field.name: None if _is_absent(message, field) else _json_of(message, field, to_json)
        for field in fields_of(message.DESCRIPTOR)
    }


def to_request_json(message: Message, *, skip: Collection[str] = ()) -> dict[str, Any]:
    """A request: every field but those in `skip` and those that are absent."""
    data: dict[str, Any] = {}
    for field in fields_of(message.DESCRIPTOR):
        if field.name in skip or _is_absent(message, field) or _is_unset_enum(message, field):
            continue
        if field.message_type is not None and is_flat(field.message_type):
            data |= to_request_json(getattr(message, field.name))
        else:
            data[field.name] = _json_of(message, field, to_request_json)
    return data


def from_json(message_type: type[MessageT], data: object) -> MessageT:
    """Reads a peer's answer. Raises ValueError if `data` has another form."""
    message = message_type()
    try:
        fill_known(message, data)
    except (TypeError, ValueError, KeyError, AttributeError) as err:
        raise ValueError(f"no {message_type.DESCRIPTOR.name}: {err}") from err
    return message


def _is_absent(message: Message, field: FieldDescriptor) -> bool:
    return not field.is_repeated and field.has_presence and not message.HasField(field.name)


def _is_unset_enum(message: Message, field: FieldDescriptor) -> bool:
    return field.enum_type is not None and not getattr(message, field.name)


def _json_of(message: Message, field: FieldDescriptor, nested: Any) -> Any:
    value = getattr(message, field.name)
    if is_map(field):
        return dict(cast("Mapping[str, str]", value))
    if field.is_repeated and (
        field.type in _PLAIN or (field.type in FLOATS and all(map(math.isfinite, value)))
    ):
        return list(value)
    if field.is_repeated:
        return [_value(field, item, nested) for item in value]
    return _value(field, value, nested)


def _value(field: FieldDescriptor, value: Any, nested: Any) -> Any:
    if isinstance(value, Timestamp):
        return value.ToJsonString()
    if isinstance(value, Message):
        return nested(value)
    if field.enum_type is not None:
        return enum_name(field.enum_type, value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, float) and nested is to_json and not math.isfinite(value):
        return None
    return value
