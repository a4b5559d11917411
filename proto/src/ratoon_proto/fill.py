"""Values into a message, by the names of its fields: a dataclass, parsed JSON, a pydantic model.

A value is what the field takes, or stands for it: an enum's short name, base64 text of bytes, an
array of a tensor; a datetime, RFC 3339 text or seconds since the epoch of a time. None is absent.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Collection, Iterable
from dataclasses import fields, is_dataclass
from datetime import datetime
from functools import cache
from typing import Any, TypeVar, cast

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from ratoon_proto.codec import encode_array
from ratoon_proto.fields import FieldError, Place, enum_number, is_map, is_required, json_places
from ratoon_proto.v1.tensor_pb2 import Tensor

MessageT = TypeVar("MessageT", bound=Message)
FLOATS = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)
_NANOS = 10**9
_MAX_SHOWN = 80


def to_proto(kind: type[MessageT], value: object, path: str = "") -> MessageT:
    """Make a message of a value; see `fill` for what it may be and what is raised."""
    message = kind()
    fill(message, value, path)
    return message


def fill(message: Message, values: Any, path: str = "", *, skip: Collection[str] = ()) -> None:
    """Write values into a message.

    Args:
        message: The message, which keeps what it has in other fields.
        values: Names of fields, or of unions of messages, and what they hold.
        path: The message's own place, for errors.
        skip: Names to leave alone.

    Raises:
        FieldError: A field does not take its value, a required one has none, or two exclude each
            other.
        KeyError: A name is no field's, which is our bug.
    """
    places = json_places(message.DESCRIPTOR)
    for name, value in _items(values):
        if name in skip:
            continue
        own = f"{path}.{name}" if path else name
        place = places.get(name)
        if place is None:
            _fill_union(message, message.DESCRIPTOR.oneofs_by_name[name], value, own)
        else:
            _fill_place(message, place, name, value, own)


def fill_known(message: Message, values: Any) -> None:
    """Fill a message with values from a peer, which may know more fields and enum values.

    Null stands for a number that is not finite. Raises ValueError, TypeError, KeyError or
    AttributeError for other forms.
    """
    places = json_places(message.DESCRIPTOR)
    for name, value in values.items():
        place = places.get(name)
        if place is None:
            continue
        field = place.field
        if value is None:
            if field.type in FLOATS and not field.has_presence:
                setattr(message, name, math.nan)
        elif field.message_type is None or is_map(field) or place.parent is not None:
            _fill_place(message, place, name, _known(field, value), name)
        elif field.is_repeated:
            for item in value:
                fill_known(getattr(message, name).add(), item)
        else:
            child = getattr(message, name)
            child.SetInParent()
            if isinstance(child, Timestamp):
                child.FromJsonString(value)
            else:
                fill_known(child, value)


def _known(field: FieldDescriptor, value: Any) -> Any:
    """A short name that this version does not know is none."""
    if field.is_repeated and field.type in FLOATS:
        return [math.nan if item is None else item for item in value]
    if field.enum_type is None:
        return value
    try:
        enum_number(field.enum_type, value, field=field.name)
    except FieldError:
        return None
    return value


def _items(values: Any) -> Iterable[tuple[str, Any]]:
    if is_dataclass(values):
        return ((name, getattr(values, name)) for name in _names(type(values)))
    if isinstance(values, str | list | tuple):
        raise TypeError("a value without names")
    return cast("Any", dict(values)).items()


@cache
def _names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _fill_union(message: Message, union: Any, value: Any, path: str) -> None:
    """Write a message of a union, which the class of the value names."""
    if value is None:
        return
    names = {parent.__name__ for parent in type(value).__mro__}
    member = next((field for field in union.fields if field.message_type.name in names), None)
    if member is None:
        kinds = [f"a value of type {field.message_type.name}" for field in union.fields]
        raise FieldError(path, repr(value)[:_MAX_SHOWN], f"{', '.join(kinds)} or None")
    _fill_place(message, Place(field=member, parent=None), member.name, value, path)


def _fill_place(message: Message, place: Place, name: str, value: Any, path: str) -> None:
    field = place.field
    if value is None:
        if is_required(field):
            raise FieldError(path, "None", "a value: there is no default")
        return
    if place.parent is not None:
        _check_alone(message, place.parent, name, path)
        message = getattr(message, place.parent.name)
    _check_alone(message, field, name, path)
    try:
        _set(message, field, value, path)
    except FieldError:
        raise
    except (TypeError, ValueError, KeyError) as err:
        expected = f"a value of {field.name}'s type"
        raise FieldError(path, repr(value)[:_MAX_SHOWN], expected) from err


def _check_alone(message: Message, field: FieldDescriptor, name: str, path: str) -> None:
    oneof = field.containing_oneof
    other = None if oneof is None else message.WhichOneof(oneof.name)
    if other is not None and other != field.name:
        raise FieldError(path, f"both {other} and {name}", "one of them")


def _set(message: Message, field: FieldDescriptor, value: Any, path: str) -> None:
    if is_map(field):
        getattr(message, field.name).update(value)
    elif field.is_repeated:
        if isinstance(value, str | bytes):
            raise FieldError(path, repr(value)[:_MAX_SHOWN], "a list")
        items = getattr(message, field.name)
        if field.message_type is None:
            items.extend(_scalar(field, item, path) for item in value)
        else:
            for index, item in enumerate(value):
                _set_child(items.add(), item, f"{path}[{index}]")
        # An empty list is a choice too, where it stands for a member of a oneof.
        message.SetInParent()
    elif field.message_type is not None:
        child = getattr(message, field.name)
        child.SetInParent()
        _set_child(child, value, path)
    else:
        setattr(message, field.name, _scalar(field, value, path))


def _set_child(child: Message, value: Any, path: str) -> None:
    if isinstance(value, Message):
        child.CopyFrom(value)
    elif isinstance(child, Timestamp):
        if isinstance(value, str):
            child.FromJsonString(value)
        elif isinstance(value, datetime):
            child.FromDatetime(value)
        else:
            child.FromNanoseconds(round(value * _NANOS))
    elif isinstance(child, Tensor) and isinstance(value, np.ndarray):
        child.CopyFrom(encode_array(cast("np.ndarray[Any, Any]", value)))
    else:
        fill(child, value, path)


def _scalar(field: FieldDescriptor, value: Any, path: str) -> Any:
    if field.enum_type is not None:
        return enum_number(field.enum_type, str(value), field=path)
    if field.type == FieldDescriptor.TYPE_BYTES and isinstance(value, str):
        return base64.b64decode(value, validate=True)
    return value
