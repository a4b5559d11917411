"""Base types of all JSON models: strict scalars and arrays.

An integer may be written 253.0 but not "253" or true; nothing is rounded, truncated or guessed.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar, cast

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, PydanticCustomError

from ratoon_proto.codec import encode_array


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


ItemT = TypeVar("ItemT")
# Report only the first wrong item: there may be many.
Each = Annotated[list[ItemT], Field(fail_fast=True)]


class Tensor(WireModel):
    """Little-endian bytes in C order, in base64; their length must match dtype and shape."""

    dtype: Literal["bool", "uint8", "uint16", "int32", "int64", "float16", "float32", "float64"]
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
