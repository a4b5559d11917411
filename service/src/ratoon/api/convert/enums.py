"""Enums of a policy's spec and of rollouts, and the one table of what an unset enum means."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from ratoon.api.convert.checks import required
from ratoon.engine.types import (
    ImportMode,
    OnChangedNumerics,
    PublishKind,
    Recovery,
    ReferencePolicy,
    Sequencing,
)
from ratoon.errors import invalid
from ratoon.model.spec import ModelDtype
from ratoon.rollout.raw import SamplerLogprobsKind
from ratoon.train.config import SharedTokens
from ratoon_proto.fields import enum_name, one_of

E = TypeVar("E", bound=StrEnum)


# Meaning of an enum that the caller left out. One that is not listed here is required, or its
# absence means something else.
DEFAULTS: Mapping[type[StrEnum], StrEnum] = {
    ImportMode: ImportMode.FULL,
    ModelDtype: ModelDtype.FLOAT32,
    OnChangedNumerics: OnChangedNumerics.STOP,
    PublishKind: PublishKind.EVERY,
    Recovery: Recovery.REPLAY,
    ReferencePolicy: ReferencePolicy.NONE,
    SamplerLogprobsKind: SamplerLogprobsKind.UNSPECIFIED,
    Sequencing: Sequencing.CLIENT,
    SharedTokens: SharedTokens.SUM,
}


def from_wire(message: Message, name: str, enum: type[E], path: str) -> E:
    """The member that a field holds, or the enum's default.

    Raises INVALID_ARGUMENT for an unknown number, and for a missing enum without a default.
    """
    field = cast("FieldDescriptor", message.DESCRIPTOR.fields_by_name[name])
    assert field.enum_type is not None
    number = getattr(message, name)
    if number == 0:
        default = DEFAULTS.get(enum)
        if default is None:
            raise required(path, one_of(field.enum_type))
        assert isinstance(default, enum)
        return default
    if number not in field.enum_type.values_by_number:
        raise invalid(path, f"enum value {number}", one_of(field.enum_type))
    return enum(enum_name(field.enum_type, number))
