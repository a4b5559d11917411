"""Valid inputs to hostile ones.

In: bytes, messages or JSON values, and a seeded generator. Out: something near them that no honest
peer sends. Invariant: the same generator state gives the same result.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar, cast

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from ratoon_proto.codec import decode_tensor, encode_array
from ratoon_proto.v1.tensor_pb2 import Tensor

MessageT = TypeVar("MessageT", bound=Message)
_BYTES = (
    b"",
    b"\x00",
    b"\xff" * 10,
    b"\x80" * 9 + b"\x01",
    b"\x00\x00\x80\x7f",
    b"\x00\x00\xc0\xff",
    b"[" * 64,
    b'{"a":' * 32,
    b"\xed\xa0\x80",
    b"../../etc/passwd",
    b"%s%n",
    b"NaN",
    b"1e999",
    b"\xff\xff\xff\x7f",
)
_INTEGERS = (0, 1, -1, 2**31 - 1, -(2**31), 2**31, 2**32, 2**63 - 1, -(2**63), 2**64, 10**30)
_FLOATS = (0.0, -0.0, 1e-45, 3.5e38, -1e308, float("inf"), float("-inf"), float("nan"), 1e-3)
_TEXTS = (
    "",
    ".",
    "..",
    "a/b",
    "../x",
    "x" * 5000,
    "\x00",
    "\u202e",
    "é",
    "int32",
    "object",
    "float16",
    "<U4",
    "None",
)
_MAGNITUDES = (0.0, 1e-320, 1e-46, 1e-40, 1e-30, 1e-6, 0.3, 1.0, 1.5, 30.0, 1e6, 1e19, 1e30)
_BEYOND = (3.4e38, 3.5e38, 1e39, 1e300, 1.7e308, math.inf)
_HOSTILE_NUMBERS = (
    math.nan,
    *(sign * value for value in (*_MAGNITUDES, *_BEYOND) for sign in (1.0, -1.0)),
)
_MOST_EDITS = 4
_MOST_BYTES = 20_000


def mutated_bytes(dice: random.Random, corpus: Sequence[bytes]) -> bytes:
    """An input of the corpus after one to four edits."""
    data = bytearray(dice.choice(corpus))
    for _ in range(dice.randint(1, _MOST_EDITS)):
        start = dice.randrange(len(data) + 1)
        stop = min(start + dice.choice((0, 1, 1, 2, 4, 16, 64)), len(data))
        match dice.randrange(6):
            case 0:
                data[start:stop] = dice.randbytes(stop - start)
            case 1:
                data[start:stop] = dice.choice(_BYTES)
            case 2:
                del data[start:stop]
            case 3:
                data[start:start] = data[start:stop] * dice.choice((1, 2, 16))
            case 4:
                other = dice.choice(corpus)
                data[start:] = other[dice.randrange(len(other) + 1) :]
            case _:
                for position in range(start, stop):
                    data[position] ^= 1 << dice.randrange(8)
    return bytes(data[:_MOST_BYTES])


def mutated_message(dice: random.Random, corpus: Sequence[Message]) -> Message:
    """A message of the corpus with one to four fields that its type allows and sense does not."""
    message = type(corpus[0])()
    message.CopyFrom(dice.choice(corpus))
    for _ in range(dice.randint(1, _MOST_EDITS)):
        _edit_message(dice, message)
    return message


def _edit_message(dice: random.Random, message: Message) -> None:
    """Walk down at random, and change where the walk ends."""
    while True:
        fields = list(message.DESCRIPTOR.fields)
        if not fields:
            return
        present = [field for field, _ in message.ListFields()]
        is_here = dice.random() < 0.3 or not present
        field = cast("FieldDescriptor", dice.choice(fields if is_here else present))
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            _edit_field(dice, message, field)
            return
        child: Any = getattr(message, field.name)
        if field.is_repeated:
            if not child or dice.random() < 0.1:
                child.add()
            elif dice.random() < 0.1:
                del child[dice.randrange(len(child))]
                return
            child = dice.choice(child)
        elif dice.random() < 0.1:
            message.ClearField(field.name)
            return
        else:
            child.SetInParent()
        message = child


def _edit_field(dice: random.Random, message: Message, field: FieldDescriptor) -> None:
    if dice.random() < 0.15 or field.message_type is not None:
        message.ClearField(field.name)
        return
    value = _value_of(dice, field, getattr(message, field.name))
    try:
        if field.is_repeated:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)
    except (ValueError, TypeError):
        # Out of the field's range: no bytes could say it.
        return


def _value_of(dice: random.Random, field: FieldDescriptor, old: Any) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            if field.type == FieldDescriptor.TYPE_BYTES:
                return mutated_bytes(dice, [old if isinstance(old, bytes) else b"\x00" * 8])
            return dice.choice(_TEXTS)
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return dice.choice(_FLOATS)
        case FieldDescriptor.CPPTYPE_BOOL:
            return dice.random() < 0.5
        case _:
            return dice.choice((*_INTEGERS, 2, 3, 7, 100))


def mutated_json(dice: random.Random, corpus: Sequence[Any]) -> bytes:
    """A JSON document of the corpus with one to four values changed, or its bytes."""
    document = json.loads(json.dumps(dice.choice(corpus)))
    for _ in range(dice.randint(1, _MOST_EDITS)):
        _edit_json(dice, document)
    data = json.dumps(document).encode()
    return mutated_bytes(dice, [data]) if dice.random() < 0.2 else data


def _edit_json(dice: random.Random, node: Any) -> None:
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = dice.choice(keys)
        if isinstance(node[key], (dict, list)) and node[key] and dice.random() < 0.85:
            node = node[key]
            continue
        break
    if dice.random() < 0.2:
        del node[key]
    elif dice.random() < 0.1 and isinstance(node, dict):
        node[dice.choice(_TEXTS)] = node[key]
    else:
        node[key] = dice.choice(
            (
                dice.choice(_INTEGERS),
                dice.choice(_FLOATS),
                dice.choice(_TEXTS),
                None,
                True,
                [],
                {},
                [[]],
                [node[key]] * 3,
                {"a": node[key]},
            )
        )


def changed_fields(dice: random.Random, request: MessageT) -> MessageT:
    """A copy of which one to three fields, there or not, hold something hostile of their type.

    Unlike those of `mutated_message` most copies are well formed: arrays are arrays of their kind.
    """
    message = type(request)()
    message.CopyFrom(request)
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        _change(dice, message)
    return message


def _change(dice: random.Random, message: Message) -> None:
    """Change one leaf, a scalar or an array, whether the messages around it are there or not."""
    *parents, leaf = dice.choice(_leaves(message.DESCRIPTOR))
    place: Any = message
    for field in parents:
        items = getattr(place, field.name)
        if field.is_repeated:
            place = dice.choice(items) if items and dice.random() < 0.95 else items.add()
        else:
            place = items
            place.SetInParent()
    if leaf.message_type is None:
        _set(dice, place, leaf)
    elif leaf.message_type.fields:
        _change_element(dice, getattr(place, leaf.name))
    else:
        getattr(place, leaf.name).SetInParent()


@cache
def _leaves(message: Any) -> list[tuple[Any, ...]]:
    """The fields on the way to each leaf of a message's type."""
    found: list[tuple[Any, ...]] = []
    for field in message.fields:
        child = field.message_type
        if child is None or child.name == "Tensor" or not child.fields:
            found.append((field,))
        else:
            found += [(field, *rest) for rest in _leaves(child)]
    return found


def _set(dice: random.Random, message: Message, field: Any) -> None:
    if dice.random() < 0.05:
        message.ClearField(field.name)
        return
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_DOUBLE:
            value: Any = dice.choice(_HOSTILE_NUMBERS)
        case FieldDescriptor.CPPTYPE_STRING:
            value = dice.choice(_TEXTS)
        case FieldDescriptor.CPPTYPE_BOOL:
            value = dice.random() < 0.5
        case FieldDescriptor.CPPTYPE_ENUM:
            value = dice.choice([*field.enum_type.values_by_number, 99])
        case _:
            value = dice.choice((*_INTEGERS, 2, 3, 7, 100))
    try:
        if field.is_repeated:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)
    except (ValueError, TypeError):
        # Out of the field's range: no bytes could say it.
        return


def _change_element(dice: random.Random, tensor: Tensor) -> None:
    """One value of an array, which stays an array; an array of floats where there was none."""
    array = np.array(decode_tensor(tensor, max_bytes=2**20)) if tensor.dtype else np.zeros(2)
    if not array.size:
        return
    if array.dtype.kind == "f":
        array = array.astype(dice.choice((np.float32, np.float64)))
        with np.errstate(over="ignore"):
            array[dice.randrange(len(array))] = dice.choice(_HOSTILE_NUMBERS)
    elif array.dtype.kind == "i":
        array[dice.randrange(len(array))] = dice.choice((0, -1, 63, 64, 2**31 - 1, -(2**31)))
    tensor.CopyFrom(encode_array(array))
