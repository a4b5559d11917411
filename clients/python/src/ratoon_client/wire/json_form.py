"""Messages as the service's JSON, and back.

What `ratoon.v1` can say survives the way there and back, but for a number that is not finite: it is
null in JSON, and NaN here.

JSON differs from the message in this: enum values are short names, times RFC 3339, bytes base64,
what is absent is null; `key` is two plain fields, and a rollout's segments have one level less.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from ratoon_client.errors import TransportError
from ratoon_client.wire.enums import enum_name, enum_number
from ratoon_proto.v1 import rollout_pb2, service_pb2

MessageT = TypeVar("MessageT", bound=Message)
_FLATTENED = frozenset(
    {service_pb2.OperationKey.DESCRIPTOR.full_name, rollout_pb2.SegmentList.DESCRIPTOR.full_name}
)
_FLOATS = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)


def to_json(message: Message, *, skip: Iterable[str] = ()) -> dict[str, Any]:
    """Every field but those in `skip` and those that are absent."""
    data: dict[str, Any] = {}
    for field in cast("Iterable[FieldDescriptor]", message.DESCRIPTOR.fields):
        value = getattr(message, field.name)
        if field.name in skip or _is_absent(message, field, value):
            continue
        if field.message_type is not None and field.message_type.full_name in _FLATTENED:
            data.update(to_json(value))
        elif field.is_repeated:
            data[field.name] = [_value_json(field, item) for item in value]
        else:
            data[field.name] = _value_json(field, value)
    return data


def _is_absent(message: Message, field: FieldDescriptor, value: Any) -> bool:
    """An enum value of 0 is `unspecified`, which JSON says by leaving it out."""
    if field.has_presence:
        return not message.HasField(field.name)
    return field.enum_type is not None and not field.is_repeated and value == 0


def _value_json(field: FieldDescriptor, value: Any) -> Any:
    if isinstance(value, Message):
        return to_json(value)
    if field.enum_type is not None:
        return enum_name(field.enum_type, value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    return value


def from_json(message_type: type[MessageT], data: object) -> MessageT:
    """Raises TransportError where `data` has another form: the service did not write it."""
    message = message_type()
    try:
        _fill(message, data)
    except (TypeError, ValueError, KeyError, AttributeError, binascii.Error) as err:
        name = message_type.DESCRIPTOR.name
        raise TransportError(f"the answer is no {name}: {err}") from err
    return message


def _fill(message: Message, data: object) -> None:
    """Fields that this client does not know are of a newer service."""
    for name, value in cast("Mapping[str, Any]", data).items():
        field = cast("FieldDescriptor | None", message.DESCRIPTOR.fields_by_name.get(name))
        if field is None:
            continue
        if value is None:
            if field.type in _FLOATS and not field.has_presence:
                setattr(message, name, math.nan)
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, name).update(value)
        elif field.is_repeated and field.message_type is not None:
            for item in value:
                _fill(getattr(message, name).add(), item)
        elif field.is_repeated:
            getattr(message, name).extend(value)
        elif field.message_type is not None:
            _fill_child(getattr(message, name), value)
        else:
            setattr(message, name, _scalar(field, value))


def _fill_child(child: Message, value: Any) -> None:
    child.SetInParent()
    if isinstance(child, Timestamp):
        child.FromJsonString(value)
    else:
        _fill(child, value)


def _scalar(field: FieldDescriptor, value: Any) -> Any:
    if field.enum_type is not None:
        try:
            return enum_number(field.enum_type, value, field=field.name)
        except ValueError:
            return 0
    if field.type == FieldDescriptor.TYPE_BYTES:
        return base64.b64decode(value, validate=True)
    return value
