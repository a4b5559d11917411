"""Base classes of the generated value classes, and the few methods that they have."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Any, Self, cast

UNSPECIFIED = "unspecified"
# Every field of a report is in one group; docs/train.md has the same table.
REPORT_GROUPS: Mapping[str, tuple[str, ...]] = {
    group: tuple(names.split())
    for group, names in {
        "loss": "loss policy_gradient_loss kl entropy router_aux_loss teacher_kl teacher_mass "
        "policy_mass value_loss value_mean return_mean explained_variance value_clip_fraction",
        "rewards": "reward_mean reward_std reward_min reward_max advantage_mean advantage_std "
        "zero_variance_fraction zero_advantage_sequences groups",
        "sampler": "sampler_kl sampler_gap_mean sampler_gap_abs_mean sampler_gap_max "
        "clamped_sampler_gaps staleness_mean staleness_max token_staleness_mean route_mismatch",
        "ratio": "ratio_mean ratio_min ratio_p01 ratio_p50 ratio_p99 ratio_max old_kl "
        "clip_fraction_low clip_fraction_high clip_fraction_dual clip_fraction_positive "
        "clip_fraction_negative clamped_ratios clamped_kls correction_masked_fraction "
        "correction_truncated_fraction correction_weight_mean correction_ess_fraction",
        "step": "learning_rate grad_norm tensor_grad_norms update_norm weight_norm step_kl "
        "step_kl_tokens changed_share skipped skip_reason",
        "batch": "num_groups num_sequences trained_tokens response_length_mean response_length_p50 "
        "response_length_p90 response_length_p99 response_length_max truncated_fraction "
        "dropped_stale dropped_truncated dropped_zero_variance dropped_bad bad_rollouts "
        "tokens_outside_mask",
        "packing": "unshared_tokens packed_tokens token_reduction attention_pair_reduction "
        "num_micro_batches route_conflicts",
        "speed": "seconds tokens_per_second hardware_mfu logical_mfu rank_seconds rank_gap "
        "peak_memory_bytes planned_memory_bytes",
        "checks": "warnings self_check routers",
    }.items()
}


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
        **kinds: For each field its class: an enum of its text, `tuple` of a list or of one text, or
            a class that text alone describes. What is none of them stays as it is: `to_proto`
            refuses it, and names the field.
    """
    for name, kind in kinds.items():
        given = getattr(value, name)
        if kind is tuple and isinstance(given, str):
            given = [given]
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
        if report.warnings:
            shown.append(f"warnings: {' '.join(str(each.kind) for each in report.warnings)}")
        return ", ".join(shown)

    def to_dict(self, *, grouped: bool = False) -> dict[str, Any]:
        """The figures by name, as JSON and loggers take them; what was not computed is left out.

        `grouped`: by the groups of `REPORT_GROUPS`, then by name.
        """
        plain = _plain(self)
        if not grouped:
            return plain
        return {
            group: {name: plain[name] for name in names if name in plain}
            for group, names in REPORT_GROUPS.items()
        }


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
