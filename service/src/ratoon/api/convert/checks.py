"""Reads and checks single fields and messages of requests, and fills messages of answers.

Errors name the field as callers do. An id that passes is safe in a file name, a URL and a log line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from enum import StrEnum
from typing import TypeVar

from google.protobuf.message import Message

from ratoon.errors import RatoonError, invalid, shown
from ratoon_proto import records
from ratoon_proto.fields import FieldError
from ratoon_proto.fill import fill

POLICY_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
UPLOAD_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
# Not "." or "..": a checkpoint is a folder of that name.
CHECKPOINT_ID = re.compile(r"(?!\.{1,2}$)[a-zA-Z0-9._-]{1,64}")
VERSION_NAME = CHECKPOINT_ID
RECEIVER_ID = re.compile(r"[a-zA-Z0-9._-]{1,64}")
OPERATION_ID = re.compile(r"[a-zA-Z0-9._:-]{1,128}")
# xxh3-128 in hexadecimal.
DIGEST = re.compile(r"[0-9a-f]{32}")
# The folder is that of a tokenizer's named chat templates.
FILE_NAME = re.compile(
    r"((additional_chat_templates|value_head)/)?(?!\.{1,2}$)[a-zA-Z0-9._-]{1,255}"
)
INT32_MAX = 2**31 - 1
T = TypeVar("T")
EnumT = TypeVar("EnumT", bound=StrEnum)
MessageT = TypeVar("MessageT", bound=Message)


def matched(field: str, value: str, pattern: re.Pattern[str]) -> str:
    """`value`, if all of it matches `pattern`. Raises INVALID_ARGUMENT."""
    if pattern.fullmatch(value) is None:
        raise invalid(field, shown(value), f"text of the form {pattern.pattern}")
    return value


def policy_of_operation(operation_id: str) -> str:
    """The policy that an operation's id begins with; no part of either has a dot."""
    return operation_id.rpartition(".")[0]


def at_least(field: str, value: int, least: int) -> int:
    if value < least:
        raise invalid(field, value, f"at least {least}")
    return value


def positive(field: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise invalid(field, value, "a finite number above 0")
    return value


def not_negative(field: str, value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise invalid(field, value, "a finite number of at least 0")
    return value


def required(field: str, expected: str) -> RatoonError:
    """The error for a missing field."""
    return invalid(field, "nothing", expected)


def read(message: Message, kind: type[T], path: str) -> T:
    """Read a value of class `kind` from a request's message, whose place is `path`.

    Raises INVALID_ARGUMENT for a missing field without a default, and for an unknown enum.
    """
    try:
        return records.from_proto(message, kind, path, is_request=True)
    except FieldError as err:
        raise invalid(err.field, err.got, err.expected) from err


def read_enum(message: Message, name: str, kind: type[EnumT], path: str) -> EnumT:
    """Read one enum of a request's message; `path` is its place.

    Raises INVALID_ARGUMENT for an unknown value.
    """
    try:
        return records.read_enum(message, name, kind, path)
    except FieldError as err:
        raise invalid(err.field, err.got, err.expected) from err


def write(message: MessageT, value: object, *, skip: Collection[str] = ()) -> MessageT:
    """Fill `message` from `value`, except the fields in `skip`; times are Unix seconds."""
    fill(message, value, skip=skip)
    return message
