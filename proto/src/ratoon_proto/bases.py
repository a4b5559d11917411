"""Base classes of the generated value classes, and the few methods that they have."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Any, Self, cast

UNSPECIFIED = "unspecified"


class WireEnum(StrEnum):
    """An enum of proto3, by the short names of its values.

    Enums of proto3 are open: an answer may hold a value that only a newer service knows. Such a
    value is `unspecified`, which is a member of the class but is not listed among its members.
    """

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if value != UNSPECIFIED:
            return None
        unknown = str.__new__(cls, UNSPECIFIED)
        unknown._name_ = UNSPECIFIED.upper()
        unknown._value_ = UNSPECIFIED
        return unknown


def as_declared(value: object, **kinds: type[Any]) -> None:
    """Convert fields of a new value that callers may give as plain text or as a list.

    Args:
        value: A frozen dataclass, in its `__post_init__`.
        **kinds: For each field its class: an enum of its text, `tuple` of a list, or a class that
            text alone describes. What is none of them stays as it is: `to_proto` refuses it, and
            names the field.
    """
    for name, kind in kinds.items():
        given = getattr(value, name)
        if isinstance(given, list if kind is tuple else str) and not isinstance(given, kind):
            with suppress(ValueError):  # An enum has no such value.
                object.__setattr__(value, name, kind(given))


class OperationKindMethods:
    """Methods of `OperationKind`."""

    @property
    def is_lifecycle(self) -> bool:
        """Whether it creates or deletes a policy; such an operation has no command and no seq."""
        return self in ("create_policy", "delete_policy")


class OperationStateMethods:
    """Methods of `OperationState`."""

    @property
    def is_final(self) -> bool:
        """Whether the operation has ended, in whatever way."""
        return self in ("done", "failed", "cancelled")


class OperationMethods:
    """Methods of `Operation`."""

    __slots__ = ()

    @property
    def is_final(self) -> bool:
        """Whether the operation has ended, in whatever way."""
        operation: Any = self
        return operation.state.is_final


class SkipReasonMethods:
    """Methods of `SkipReason`."""

    @property
    def is_of_numbers(self) -> bool:
        """Whether numbers were at fault; otherwise the batch held nothing to learn from."""
        return self not in ("no_tokens", "zero_gradient")


class StepWarningMethods:
    """Methods of `StepWarning`."""

    __slots__ = ()

    def __str__(self) -> str:
        """Its message."""
        warning: Any = self
        return warning.message


class StepReportMethods:
    """Methods of `StepReport`."""

    __slots__ = ()

    def __str__(self) -> str:
        """The figures that a training loop prints, in one line; `none` was not computed."""
        report: Any = self
        shown = [
            f"reward {_figure(report.reward_mean, '.3g')}",
            f"loss {_figure(report.loss, '+.3g')}",
            f"sampler KL {_figure(report.sampler_kl, '.1e')}",
            f"gradient norm {_figure(report.grad_norm, '.3g')}",
        ]
        if report.kl is not None:
            shown.append(f"KL {report.kl:.1e}")
        if report.ratio_min is not None and report.ratio_max is not None:
            shown.append(f"ratio {report.ratio_min:.3f} to {report.ratio_max:.3f}")
            clipped = (report.clip_fraction_low or 0.0) + (report.clip_fraction_high or 0.0)
            shown.append(f"clipped {clipped:.1%}")
        if report.staleness_mean is not None:
            shown.append(f"staleness {report.staleness_mean:.1f}, at most {report.staleness_max}")
        dropped = report.dropped_stale + report.dropped_truncated + report.dropped_zero_variance
        if dropped:
            shown.append(f"dropped {dropped}")
        if report.skipped:
            shown.append(f"skipped: {report.skip_reason or UNSPECIFIED}")
        return ", ".join(shown)

    def to_dict(self) -> dict[str, Any]:
        """The figures by name, as JSON and loggers take them; what was not computed is left out."""
        return _plain(self)


class StepResultMethods:
    """Methods of `StepResult`."""

    __slots__ = ()

    @property
    def skipped(self) -> bool:
        """Whether its optimizer step was skipped; `report.skip_reason` says why."""
        result: Any = self
        return result.report.skipped

    def __str__(self) -> str:
        """The version and the report's figures, in one line."""
        result: Any = self
        return f"version {result.version}, {result.report}"


def _plain(value: Any) -> Any:
    """A value without classes of ours and without fields that are None."""
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in cast("tuple[Any, ...]", value)]
    if not is_dataclass(value):
        return value
    named = ((field.name, getattr(value, field.name)) for field in fields(value))
    return {name: _plain(item) for name, item in named if item is not None}


def _figure(value: float | None, form: str) -> str:
    return "none" if value is None else format(value, form)
