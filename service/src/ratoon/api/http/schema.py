"""JSON bodies: pydantic models made from the messages of `ratoon.v1`, with their comments.

Names, enums and comments come from the descriptors; service.proto and its imports say which fields
are required. Requests are strict: an integer may be written 253.0 but not "253" or true; nothing is
rounded, truncated or guessed.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from enum import StrEnum
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Literal, cast

import numpy as np
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.timestamp_pb2 import Timestamp
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    WithJsonSchema,
    create_model,
)
from pydantic_core import CoreSchema, PydanticCustomError

from ratoon.api.contract import SERVICE
from ratoon_proto.codec import encode_array
from ratoon_proto.fields import (
    comment,
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
from ratoon_proto.v1 import operation_pb2, tensor_pb2

_PLACE = re.compile(r"\{(\w+)\}")
_SPEC = {
    "policy_id": "tiny-grpo",
    "preset": "tiny",
    "full": {},
    "optimizer": {"beta1": 0.9, "beta2": 0.95, "weight_decay": 0.01},
    "dtype": "float32",
    "seed": 7,
    "sequencing": "client",
}
_GROUPS = [
    {
        "group_id": "question-1",
        "prompt": [81, 58, 32, 50, 43, 50],
        "rollouts": [
            {"response": [52], "sampler_logprobs": [-0.25], "reward": 1.0},
            {"response": [53], "sampler_logprobs": [-2.5], "reward": 0.0},
        ],
    }
]
_BATCH = {"groups": _GROUPS}

EXAMPLES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "PolicySpec": _SPEC,
        "CreatePolicyRequest": {"spec": _SPEC},
        "RolloutGroup": _GROUPS[0],
        "UploadPartRequest": _BATCH,
        "UpdateRequest": {
            "seq": 1,
            "batch": _BATCH,
            "loss": {"kind": "grpo"},
            "optim": {"learning_rate": 1e-5, "max_grad_norm": 1.0},
        },
        "ForwardBackwardRequest": {"seq": 1, "batch": _BATCH, "loss": {"kind": "ppo_clip"}},
        "OptimStepRequest": {"seq": 2, "optim": {"learning_rate": 1e-5}},
        "DiscardGradientsRequest": {"seq": 3},
        "ForwardRequest": {"batch": _BATCH, "with_entropy": True},
        "SaveCheckpointRequest": {"seq": 4, "checkpoint_id": "after-warmup"},
        "LoadCheckpointRequest": {"seq": 5},
        "PublishVersionRequest": {"seq": 7, "name": "after-warmup", "ttl_s": 86400.0},
        "ImportWeightsRequest": {
            "seq": 6,
            "model_folder": "outer-step-12",
            "mode": "full",
            "expected_version": 12,
        },
    }
)


class WireModel(BaseModel):
    """A message of `ratoon.v1` as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _whole(value: object) -> object:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _utf8(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as err:
        raise PydanticCustomError("utf8", "expected text that UTF-8 can hold") from err
    return value


def _base64(value: object) -> object:
    if not isinstance(value, str):
        raise PydanticCustomError("base64", "expected base64 text")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as err:
        raise PydanticCustomError("base64", "expected base64 text") from err


_Int = Annotated[int, Field(strict=True), BeforeValidator(_whole)]
Int32 = Annotated[_Int, Field(ge=-(2**31), lt=2**31)]
Int64 = Annotated[_Int, Field(ge=-(2**63), lt=2**63)]
UInt64 = Annotated[_Int, Field(ge=0, lt=2**64)]
Float = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Bool = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True), AfterValidator(_utf8)]
Bytes = Annotated[
    bytes,
    BeforeValidator(_base64),
    WithJsonSchema({"type": "string", "contentEncoding": "base64", "format": "byte"}),
]


class Tensor(WireModel):
    """Little-endian bytes in C order, in base64; their length must match dtype and shape."""

    dtype: Literal[
        "bool", "uint8", "uint16", "uint32", "int32", "int64", "float16", "float32", "float64"
    ]
    shape: list[Annotated[Int64, Field(ge=0)]] = Field(default=[], max_length=8)
    data: Bytes = b""


class _ListOr:
    """In the schema: a plain JSON list, or the tensor that the annotated type already is."""

    def __init__(self, item: dict[str, Any]) -> None:
        self._item = item

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"anyOf": [{"type": "array", "items": self._item}, handler(schema)]}


def _from_list(dtype: str, allowed: frozenset[type], expected: str) -> Callable[[object], object]:
    """A validator that turns a JSON list into a one-dimensional `Tensor`.

    Types are compared as a set, not value by value: a list may have a million items.
    """

    def convert(value: object) -> object:
        if not isinstance(value, list):
            return value
        items = cast("list[object]", value)
        if set(map(type, items)) <= allowed:
            array = _exact_array(items, dtype)
        else:
            array = next(i for i, item in enumerate(items) if type(item) not in allowed)
        if isinstance(array, int):
            context = {"expected": expected, "index": array}
            raise PydanticCustomError("array", "expected {expected}", context)
        tensor = encode_array(array)
        return Tensor.model_construct(
            dtype=tensor.dtype, shape=list(tensor.shape), data=tensor.data
        )

    return convert


def _exact_array(items: list[Any], dtype: str) -> np.ndarray[Any, Any] | int:
    """The array of `items`, or the index of the first that the dtype does not hold."""
    target = np.dtype(dtype)
    holds_floats = target.kind == "f" or float in map(type, items)
    try:
        wide = np.array(items, dtype=np.float64 if holds_floats else np.int64)
    except OverflowError:
        most = 2**1024 if holds_floats else 2**63
        return next(i for i, item in enumerate(items) if abs(item) >= most)
    if target.kind != "i":
        with np.errstate(over="ignore"):
            narrow = wide.astype(target)
        # What overflows is refused with its place, by the number that was sent.
        return wide if np.isinf(narrow).any() else narrow
    bounds = np.iinfo(target)
    fits = (wide >= bounds.min) & (wide <= bounds.max) & (wide == np.rint(wide))
    return wide.astype(target) if fits.all() else int(np.argmin(fits))


_INTEGER = {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1}
Tokens = Annotated[
    Tensor,
    BeforeValidator(_from_list("int32", frozenset({int, float}), "integers of 32 bits")),
    _ListOr(_INTEGER),
]
Values = Annotated[
    Tensor,
    BeforeValidator(_from_list("float32", frozenset({int, float}), "numbers")),
    _ListOr({"type": "number"}),
]
Flags = Annotated[
    Tensor,
    BeforeValidator(_from_list("bool", frozenset({bool}), "true or false")),
    _ListOr({"type": "boolean"}),
]
# Python's type of each scalar: in requests, and in answers.
_SCALARS: Mapping[int, tuple[Any, Any]] = MappingProxyType(
    {
        FieldDescriptor.TYPE_BOOL: (Bool, bool),
        FieldDescriptor.TYPE_BYTES: (Bytes, Bytes),
        FieldDescriptor.TYPE_DOUBLE: (Float, float),
        FieldDescriptor.TYPE_FLOAT: (Float, float),
        FieldDescriptor.TYPE_INT32: (Int32, int),
        FieldDescriptor.TYPE_INT64: (Int64, int),
        FieldDescriptor.TYPE_STRING: (Text, str),
        FieldDescriptor.TYPE_UINT64: (UInt64, int),
    }
)
_LISTS: Mapping[str, Any] = MappingProxyType({"int32": Tokens, "float32": Values, "bool": Flags})


@cache
def model_of(message: Descriptor, without: frozenset[str] = frozenset()) -> type[WireModel]:
    """The model of `message`, `without` the fields that are not in the body."""
    if message.full_name == tensor_pb2.Tensor.DESCRIPTOR.full_name:
        return Tensor
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
    kind: Any = _LISTS.get(list_dtype(field)) or _type(field, is_request=True)
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
    kind = _type(field, is_request=False)
    if field.is_repeated:
        item = kind | None if field.type in FLOATS else kind
        return _described(field, list[item]), ...
    may_be_null = not is_required(field) and (field.has_presence or field.type in FLOATS)
    return _described(field, kind | None if may_be_null else kind), ...


def _described(field: FieldDescriptor, kind: Any) -> Any:
    text = comment(field.full_name)
    return Annotated[kind, Field(description=text)] if text else kind


def _type(field: FieldDescriptor, *, is_request: bool) -> Any:
    if field.message_type is not None:
        is_time = field.message_type.full_name == Timestamp.DESCRIPTOR.full_name
        return datetime if is_time else model_of(field.message_type)
    if field.enum_type is not None:
        return enum_of(field.enum_type)
    strict, plain = _SCALARS[field.type]
    return strict if is_request else plain


@cache
def enum_of(enum: EnumDescriptor) -> type[StrEnum]:
    """The enum's short names, with their comments."""
    members = {name.upper(): name for name in enum_names(enum)}
    made = cast("type[StrEnum]", StrEnum(enum.name, members))
    own = [
        f"`{enum_name(enum, value.number)}`: {text}"
        for value in enum.values
        if value.number and (text := comment(f"{enum.full_name}.{value.name}"))
    ]
    made.__doc__ = " ".join([comment(enum.full_name), *own]).strip() or None
    return made
