"""Facts about a field from the descriptors of `ratoon.v1`: its place in JSON, its enum's short
names, and what the .proto files say of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, cast

from google.protobuf.descriptor import (
    Descriptor,
    EnumDescriptor,
    FieldDescriptor,
    MethodDescriptor,
    OneofDescriptor,
)

from ratoon_proto.bases import UNSPECIFIED
from ratoon_proto.v1 import options_pb2


class FieldError(ValueError):
    """A value that a field does not take; `field` is its path from the message asked for."""

    def __init__(self, field: str, got: str, expected: str) -> None:
        super().__init__(f"{field}: got {got}, expected {expected}")
        self.field = field
        self.got = got
        self.expected = expected


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Place of a JSON name in a message: a field of the message itself or of a flat one."""

    field: FieldDescriptor
    parent: FieldDescriptor | None


@cache
def json_places(message: Descriptor) -> Mapping[str, Place]:
    """Fields by their names in JSON; the fields of a flat message stand for it."""
    places: dict[str, Place] = {}
    for field in fields_of(message):
        if field.message_type is None or not is_flat(field.message_type):
            places[field.name] = Place(field=field, parent=None)
            continue
        for child in fields_of(field.message_type):
            places[child.name] = Place(field=child, parent=field)
    return places


def fields_of(message: Any) -> Iterable[FieldDescriptor]:
    """Returns the fields of a descriptor, whose type depends on the protobuf implementation in
    use."""
    return message.fields


@cache
def is_required(field: FieldDescriptor) -> bool:
    return cast("Any", field.GetOptions()).Extensions[options_pb2.required]


def list_dtype(field: FieldDescriptor) -> str:
    """dtype of the tensor that a plain JSON list becomes; "" where there is none."""
    return cast("Any", field.GetOptions()).Extensions[options_pb2.list_dtype]


def default_text(field: FieldDescriptor) -> str:
    """What absence means, as the .proto file says it; "" where it says nothing."""
    return cast("Any", field.GetOptions()).Extensions[options_pb2.default_value]


def is_from_zero(message: Descriptor) -> bool:
    return cast("Any", message.GetOptions()).Extensions[options_pb2.from_zero]


def is_one_field(union: OneofDescriptor) -> bool:
    return cast("Any", union.GetOptions()).Extensions[options_pb2.one_field]


@cache
def is_flat(message: Descriptor) -> bool:
    return cast("Any", message.GetOptions()).Extensions[options_pb2.flat]


def http_route(method: MethodDescriptor) -> tuple[str, str] | None:
    """HTTP method and path; None where a call is not offered there."""
    verb, _, path = cast("Any", method.GetOptions()).Extensions[options_pb2.http].partition(" ")
    return (verb, path) if path else None


@cache
def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def enum_names(enum: EnumDescriptor) -> list[str]:
    """Short names of all values but the unspecified one: `grpo` of `LOSS_KIND_GRPO`."""
    return [enum_name(enum, number) for number in sorted(enum.values_by_number) if number]


def enum_name(enum: EnumDescriptor, number: int) -> str:
    """Short name; a number that only a newer peer knows is `unspecified`."""
    value = enum.values_by_number.get(number)
    return UNSPECIFIED if value is None else value.name.removeprefix(_prefix(enum)).lower()


def enum_number(enum: EnumDescriptor, name: str, *, field: str) -> int:
    """Raises FieldError naming `field` and the names there are."""
    value = enum.values_by_name.get(f"{_prefix(enum)}{name.upper()}")
    if value is None:
        raise FieldError(field, repr(name), one_of(enum))
    return value.number


def one_of(enum: EnumDescriptor) -> str:
    return "one of " + ", ".join(enum_names(enum))


def _prefix(enum: EnumDescriptor) -> str:
    return enum.values_by_number[0].name.removesuffix("UNSPECIFIED")


def comment(full_name: str) -> str:
    """The .proto comment of a message, field, enum or method; "": none."""
    return _comments().get(full_name, "")


@cache
def _comments() -> Mapping[str, str]:
    return json.loads(files("ratoon_proto.v1").joinpath("comments.json").read_text("utf-8"))
