"""Pydantic models of messages, made from descriptors: types, names, enums, comments.

Requests are strict; service.proto and its imports say which fields are required.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from enum import StrEnum
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Annotated, Any, cast

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.timestamp_pb2 import Timestamp
from pydantic import ConfigDict, Field, create_model

from ratoon.api.contract import SERVICE
from ratoon.api.http.schema import base
from ratoon.api.http.schema.base import WireModel
from ratoon.api.http.schema.examples import EXAMPLES
from ratoon_proto.fields import (
    enum_name,
    enum_names,
    fields_of,
    http_route,
    is_map,
    is_required,
    json_places,
    list_dtype,
)
from ratoon_proto.fill import FLOATS
from ratoon_proto.v1 import operation_pb2
from ratoon_proto.v1.tensor_pb2 import Tensor

_PLACE = re.compile(r"\{(\w+)\}")
_STRICT: Mapping[int, Any] = MappingProxyType(
    {
        FieldDescriptor.TYPE_BOOL: base.Bool,
        FieldDescriptor.TYPE_BYTES: base.Bytes,
        FieldDescriptor.TYPE_DOUBLE: base.Float,
        FieldDescriptor.TYPE_INT32: base.Int32,
        FieldDescriptor.TYPE_INT64: base.Int64,
        FieldDescriptor.TYPE_STRING: base.Text,
        FieldDescriptor.TYPE_UINT64: base.UInt64,
    }
)
_PLAIN: Mapping[int, Any] = MappingProxyType(
    {
        FieldDescriptor.TYPE_BOOL: bool,
        FieldDescriptor.TYPE_BYTES: base.Bytes,
        FieldDescriptor.TYPE_DOUBLE: float,
        FieldDescriptor.TYPE_INT32: int,
        FieldDescriptor.TYPE_INT64: int,
        FieldDescriptor.TYPE_STRING: str,
        FieldDescriptor.TYPE_UINT64: int,
    }
)
_LISTS: Mapping[str, Any] = MappingProxyType(
    {"int32": base.Tokens, "float32": base.Values, "bool": base.Flags}
)


@cache
def model_of(message: Descriptor, without: frozenset[str] = frozenset()) -> type[WireModel]:
    """The model of `message`, `without` the fields that are not in the body."""
    if message.full_name == Tensor.DESCRIPTOR.full_name:
        return base.Tensor
    strict = message.full_name in _requested()
    fields = {
        name: _request_field(place.field) if strict else _answer_field(place.field)
        for name, place in json_places(message).items()
        if name not in without
    }
    return _made(message.name, comment(message.full_name), fields)


def body_of(method: MethodDescriptor) -> type[WireModel] | None:
    """The model of a call's body over HTTP; None for a call that has none."""
    verb, path = http_route(method) or ("", "")
    if verb not in ("POST", "PUT"):
        return None
    model = model_of(method.input_type, frozenset(_PLACE.findall(path)))
    return model if model.model_fields else None


@cache
def error_body() -> type[WireModel]:
    """`{"error": ErrorDetail}`."""
    detail = model_of(operation_pb2.ErrorDetail.DESCRIPTOR)
    doc = "The body of every answer that is no success."
    return _made("ErrorBody", doc, {"error": (detail, ...)})


@cache
def _comments() -> Mapping[str, str]:
    return json.loads(files("ratoon_proto.v1").joinpath("comments.json").read_text("utf-8"))


def comment(full_name: str) -> str:
    """The .proto comment of a message, field or method; "": none."""
    return _comments().get(full_name, "")


def _made(name: str, doc: str, fields: Mapping[str, Any]) -> type[WireModel]:
    parent = WireModel
    if name in EXAMPLES:
        config = ConfigDict(json_schema_extra={"examples": [cast("Any", EXAMPLES[name])]})
        parent = cast("type[WireModel]", type(name, (WireModel,), {"model_config": config}))
    return create_model(name, __base__=parent, __doc__=doc or None, **cast("Any", fields))


@cache
def _requested() -> frozenset[str]:
    """Names of all request messages, and of the messages within them."""

    def below(message: Descriptor) -> Iterator[str]:
        yield message.full_name
        for field in fields_of(message):
            if field.message_type is not None:
                yield from below(field.message_type)

    return frozenset(name for method in SERVICE.methods for name in below(method.input_type))


def _request_field(field: FieldDescriptor) -> tuple[Any, Any]:
    kind: Any = _LISTS.get(list_dtype(field)) or _type(field, _STRICT)
    if field.is_repeated:
        # Report only the first wrong item: there may be many.
        kind = Annotated[list[kind], Field(fail_fast=True)]
    if is_required(field):
        return _described(field, kind), ...
    return _described(field, kind | None), None


def _answer_field(field: FieldDescriptor) -> tuple[Any, Any]:
    """Always present; null for an absent message, and for a number that is not finite."""
    if is_map(field):
        return _described(field, dict[str, str]), ...
    kind = _type(field, _PLAIN)
    if field.is_repeated:
        return _described(field, list[kind]), ...
    may_be_null = not is_required(field) and (field.has_presence or field.type in FLOATS)
    return _described(field, kind | None if may_be_null else kind), ...


def _described(field: FieldDescriptor, kind: Any) -> Any:
    text = comment(field.full_name)
    return Annotated[kind, Field(description=text)] if text else kind


def _type(field: FieldDescriptor, scalars: Mapping[int, Any]) -> Any:
    if field.message_type is not None:
        is_time = field.message_type.full_name == Timestamp.DESCRIPTOR.full_name
        return datetime if is_time else model_of(field.message_type)
    return _enum(field.enum_type) if field.enum_type is not None else scalars[field.type]


@cache
def _enum(enum: EnumDescriptor) -> type[StrEnum]:
    members = {name.upper(): name for name in enum_names(enum)}
    made = cast("type[StrEnum]", StrEnum(enum.name, members))
    own = [
        f"`{enum_name(enum, value.number)}`: {text}"
        for value in enum.values
        if value.number and (text := comment(f"{enum.full_name}.{value.name}"))
    ]
    made.__doc__ = " ".join([comment(enum.full_name), *own]).strip() or None
    return made
