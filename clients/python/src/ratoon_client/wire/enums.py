"""Enum values by their short names: `LOSS_KIND_GRPO` is `grpo`."""

from __future__ import annotations

from google.protobuf.descriptor import EnumDescriptor

from ratoon_client.errors import InvalidArgumentError

UNSPECIFIED = "unspecified"


def enum_number(enum: EnumDescriptor, name: str, *, field: str) -> int:
    """Raises InvalidArgumentError naming `field` and the names there are."""
    value = enum.values_by_name.get(f"{_prefix(enum)}{name.upper()}")
    if value is None:
        names = ", ".join(enum_name(enum, number) for number in enum.values_by_number if number)
        raise InvalidArgumentError(field, repr(name), f"one of {names}")
    return value.number


def enum_name(enum: EnumDescriptor, number: int) -> str:
    """A number that a newer service knows is `unspecified` here."""
    value = enum.values_by_number.get(number)
    if value is None:
        return UNSPECIFIED
    return value.name.removeprefix(_prefix(enum)).lower()


def _prefix(enum: EnumDescriptor) -> str:
    return enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
