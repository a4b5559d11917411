"""Wire enums to the service's own and back, and the one table of what an unset enum means.

Enters an enum number with the field that held it, leaves a member. Invariant: a wire value and a
member correspond by name alone (LOSS_KIND_GRPO, `LossKind.GRPO`), so neither can drift unnoticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from ratoon.api.convert.checks import required
from ratoon.engine.types import (
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

E = TypeVar("E", bound=StrEnum)


class WireEnum(Protocol):
    """A generated enum, such as `training_pb2.LossKind`."""

    def Name(self, number: Any) -> str: ...
    def Value(self, name: str) -> Any: ...
    def keys(self) -> list[str]: ...
    def values(self) -> list[Any]: ...


# What an enum that the caller left out stands for. An enum that is not here has no default of its
# own: it is required (`from_wire`) or its absence means something else (`optional_from_wire`).
DEFAULTS: Mapping[type[StrEnum], StrEnum] = {
    ModelDtype: ModelDtype.FLOAT32,
    OnChangedNumerics: OnChangedNumerics.STOP,
    PublishKind: PublishKind.EVERY,
    Recovery: Recovery.REPLAY,
    ReferencePolicy: ReferencePolicy.NONE,
    SamplerLogprobsKind: SamplerLogprobsKind.UNSPECIFIED,
    Sequencing: Sequencing.CLIENT,
    SharedTokens: SharedTokens.SUM,
}


def prefix(wire: WireEnum) -> str:
    """What all value names of a wire enum begin with, taken from value 0: `LOSS_KIND_`."""
    return wire.Name(0).removesuffix("UNSPECIFIED")


def choices(wire: WireEnum) -> str:
    names = [name.removeprefix(prefix(wire)).lower() for name in wire.keys()[1:]]
    return "one of " + ", ".join(names)


def optional_from_wire(field: str, number: int, wire: WireEnum, enum: type[E]) -> E | None:
    """The member of a wire number; None where it was left out."""
    if number == 0:
        return None
    if number not in wire.values():
        raise invalid(field, f"enum value {number}", choices(wire))
    return enum[wire.Name(number).removeprefix(prefix(wire))]


def from_wire(field: str, number: int, wire: WireEnum, enum: type[E]) -> E:
    """The member of a wire number, or the enum's default.

    Raises INVALID_ARGUMENT for a number that this version does not know, and for an enum without a
    default that was left out.
    """
    member = optional_from_wire(field, number, wire, enum)
    if member is not None:
        return member
    default = DEFAULTS.get(enum)
    if default is None:
        raise required(field, choices(wire))
    assert isinstance(default, enum)
    return default


def to_wire(wire: WireEnum, member: StrEnum) -> Any:
    """The wire number of a member."""
    return wire.Value(f"{prefix(wire)}{member.name}")
