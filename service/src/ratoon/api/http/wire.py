"""JSON models to messages, messages to JSON.

Enters a validated model or a message, leaves the other form. Invariant: names decide; a field that
one side has and the other has not is our bug and fails loudly.

JSON differs from the message in this: enum values are lower case and without their prefix, times
are RFC 3339, bytes are base64, what is absent is null, and so is a number that is not finite.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from ratoon.api.http.schema.base import WireModel
from ratoon.errors import invalid

_TIMESTAMP = Timestamp.DESCRIPTOR.full_name


def fill(message: Message, model: WireModel, *, path: str = "") -> None:
    """Write the fields of `model` that are not null into `message`.

    Raises INVALID_ARGUMENT where two fields exclude each other. `path` is the model's own.
    """
    for name in type(model).model_fields:
        value = getattr(model, name)
        if value is None:
            continue
        target, field_name = message, name
        if name in model.flattened:
            parent, field_name = model.flattened[name]
            _check_alone(message, _field(message, parent), name, path)
            target = getattr(message, parent)
        field = _field(target, field_name)
        _check_alone(target, field, name, path)
        _set_field(target, field, value, f"{path}{name}")


def _field(message: Message, name: str) -> FieldDescriptor:
    return cast("FieldDescriptor", message.DESCRIPTOR.fields_by_name[name])


def _check_alone(message: Message, field: FieldDescriptor, name: str, path: str) -> None:
    oneof = field.containing_oneof
    if oneof is None:
        return
    other = message.WhichOneof(oneof.name)
    if other is not None and other != field.name:
        field_name = f"{path}{name}".removeprefix("batch.")
        raise invalid(field_name, f"both {other} and {name}", "one of them")


def _set_field(message: Message, field: FieldDescriptor, value: Any, path: str) -> None:
    if isinstance(value, WireModel):
        child = getattr(message, field.name)
        child.SetInParent()
        fill(child, value, path=f"{path}.")
    elif field.is_repeated and field.message_type is not None:
        items = getattr(message, field.name)
        for index, item in enumerate(cast("Iterable[WireModel]", value)):
            fill(items.add(), item, path=f"{path}[{index}].")
        # An empty list is a choice too, where it stands for a member of a oneof.
        message.SetInParent()
    elif field.is_repeated:
        getattr(message, field.name).extend(value)
    elif field.enum_type is not None:
        setattr(message, field.name, enum_number(field.enum_type, str(value)))
    else:
        setattr(message, field.name, value)


def enum_prefix(enum: EnumDescriptor) -> str:
    return enum.values_by_number[0].name.removesuffix("UNSPECIFIED")


def enum_number(enum: EnumDescriptor, name: str) -> int:
    """The number of a JSON enum value such as `grpo`."""
    return enum.values_by_name[f"{enum_prefix(enum)}{name.upper()}"].number


def to_json(message: Message) -> dict[str, object]:
    """Every field of `message`, absent ones as null."""
    return {
        field.name: _field_json(message, field)
        for field in cast("list[FieldDescriptor]", message.DESCRIPTOR.fields)
    }


def _field_json(message: Message, field: FieldDescriptor) -> object:
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(cast("Mapping[str, str]", value))
    if field.is_repeated:
        return [_value_json(field, item) for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _value_json(field, value)


def _value_json(field: FieldDescriptor, value: Any) -> object:
    if field.message_type is not None:
        if field.message_type.full_name == _TIMESTAMP:
            return cast("Timestamp", value).ToJsonString()
        return to_json(value)
    if field.enum_type is not None:
        name = field.enum_type.values_by_number[value].name
        return name.removeprefix(enum_prefix(field.enum_type)).lower()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
