"""What the caller asked of an optimizer step, judged and completed. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from ratoon.errors import invalid, shown
from ratoon.train.loss.kinds import require
from ratoon.train.loss.spec import CounterDivisor, NoDivisor, Normalisation, OptimStep
from ratoon_proto.types import (
    AdamWConfig,
    DivideBy,
    LearningRateSchedule,
    MuonConfig,
    OptimStepConfig,
    ParameterGroup,
    ScheduleKind,
    TokenWeight,
)

DEFAULT_MAX_GRAD_NORM = 1.0
# Far beyond every recipe; within them no float32 of a step overflows by these numbers alone.
_MAX_LEARNING_RATE = 1e4
_MAX_STEPS = 2**53
_MAX_NS_STEPS = 20
_MAX_GROUPS = 64
_MAX_PATTERN = 256
_SMALLEST = 1e-30
_LARGEST = 1e30
_RATES = f"a number from 0 to {_MAX_LEARNING_RATE:g}"
_RANGE = f"a number from {_SMALLEST:g} to {_LARGEST:g}"


def check_optim(request: OptimStepConfig, policy: AdamWConfig) -> None:
    """Check the numbers, with the policy's where the request has none, but without the window;
    `resolve_optim` does it too.

    Raises `RatoonError` INVALID_ARGUMENT naming the field.
    """
    rate, constant = request.learning_rate, request.divide_constant
    if rate is not None:
        require("optim.learning_rate", rate, 0 <= rate <= _MAX_LEARNING_RATE, _RATES)
    elif policy.schedule is None:
        raise invalid("optim.learning_rate", "none", f"{_RATES}: the policy has no schedule")
    else:
        rate = policy.schedule.learning_rate
    check_adamw("optim", request)
    if request.max_grad_norm:
        _require_in_range("optim.max_grad_norm", request.max_grad_norm, "0 (no clipping), or ")
    if constant is not None:
        _require_in_range("optim.divide_constant", constant)
        if request.divide_by not in (None, DivideBy.CONSTANT):
            expected = f"absent: optim.divide_by is {request.divide_by}"
            raise invalid("optim.divide_constant", constant, expected)
    elif request.divide_by is DivideBy.CONSTANT:
        raise invalid("optim.divide_constant", "none", _RANGE)
    own = request.weight_decay
    decay = policy.weight_decay if own is None else own
    factor = max_lr_factor(policy)
    if rate * factor * decay > 1:
        # More would turn the sign of every weight.
        name, got, other = ("learning_rate", rate, f"weight_decay, {decay:g}, here the policy's")
        if own is not None:
            name, got, other = ("weight_decay", own, f"learning_rate, {rate:g}")
        other += f", and lr_factor, {factor:g}" if factor > 1 else ""
        raise invalid(f"optim.{name}", got, f"at most 1 when multiplied by {other}")


def check_adamw(path: str, config: AdamWConfig | OptimStepConfig) -> None:
    """Check what is set of AdamW's numbers, of a policy or of one step.

    Raises `RatoonError` INVALID_ARGUMENT naming the field below `path`.
    """
    for name, beta in (("beta1", config.beta1), ("beta2", config.beta2)):
        if beta is not None:
            require(f"{path}.{name}", beta, 0 <= beta < 1, "a number in [0, 1)")
    if config.eps is not None:
        _require_in_range(f"{path}.eps", config.eps)
    if (decay := config.weight_decay) is not None:
        most = f"a number from 0 to {_LARGEST:g}"
        require(f"{path}.weight_decay", decay, 0 <= decay <= _LARGEST, most)


def check_muon(path: str, muon: MuonConfig) -> None:
    """Check Muon's numbers. Raises `RatoonError` INVALID_ARGUMENT naming the field below `path`."""
    is_mean = 0 <= muon.momentum < 1
    require(f"{path}.momentum", muon.momentum, is_mean, "a number in [0, 1)")
    num_steps = muon.ns_steps
    require(f"{path}.ns_steps", num_steps, 1 <= num_steps <= _MAX_NS_STEPS, f"1 to {_MAX_NS_STEPS}")


def check_groups(path: str, groups: Sequence[ParameterGroup]) -> None:
    """Check a policy's parameter groups without its parameters; `check_patterns` does it with them.

    Raises `RatoonError` INVALID_ARGUMENT naming the field below `path`.
    """
    require(path, len(groups), len(groups) <= _MAX_GROUPS, f"at most {_MAX_GROUPS} groups")
    for index, group in enumerate(groups):
        where, length = f"{path}[{index}]", len(group.pattern)
        if not 1 <= length <= _MAX_PATTERN:
            expected = f"a pattern of 1 to {_MAX_PATTERN} characters"
            raise invalid(f"{where}.pattern", f"{length} characters", expected)
        factor = group.lr_factor
        require(f"{where}.lr_factor", factor, 0 <= factor <= _MAX_LEARNING_RATE, _RATES)


def check_patterns(path: str, groups: Sequence[ParameterGroup], names: Iterable[str]) -> None:
    """Raises `RatoonError` INVALID_ARGUMENT for a pattern that matches none of the parameters'
    `names`, or one that another group matches."""
    groups_of = {name: matching(groups, name) for name in names}
    matched = {index for own in groups_of.values() for index in own}
    for index, group in enumerate(groups):
        if index not in matched:
            expected = "a pattern of a trained parameter's name"
            raise invalid(f"{path}[{index}].pattern", shown(group.pattern), expected)
    for name, (first, *others) in ((name, own) for name, own in groups_of.items() if own):
        if others:
            expected = f"one that leaves {name} to {path}[{first}]"
            raise invalid(
                f"{path}[{others[0]}].pattern", shown(groups[others[0]].pattern), expected
            )


def matching(groups: Sequence[ParameterGroup], name: str) -> list[int]:
    """The groups, by index, whose patterns match a parameter's name."""
    return [i for i, group in enumerate(groups) if fnmatchcase(name, group.pattern)]


def max_lr_factor(config: AdamWConfig) -> float:
    """The largest factor of a step's learning rate, of parameters in no group too."""
    return max((1.0, *(group.lr_factor for group in config.groups)))


def check_schedule(path: str, schedule: LearningRateSchedule) -> None:
    """Check a policy's schedule. Raises `RatoonError` INVALID_ARGUMENT naming the field below
    `path`."""
    rate, warmup, total = schedule.learning_rate, schedule.warmup_steps, schedule.total_steps
    require(f"{path}.learning_rate", rate, 0 <= rate <= _MAX_LEARNING_RATE, _RATES)
    require(f"{path}.warmup_steps", warmup, 0 <= warmup <= _MAX_STEPS, f"0 to {_MAX_STEPS}")
    share = schedule.final_share
    require(f"{path}.final_share", share, 0 <= share <= 1, "a number from 0 to 1")
    if schedule.kind is ScheduleKind.CONSTANT:
        for name, value in (("total_steps", total), ("final_share", share)):
            require(f"{path}.{name}", value, not value, "absent: kind is constant")
        return
    expected = f"more than warmup_steps, {warmup}, to {_MAX_STEPS}"
    require(f"{path}.total_steps", total, warmup < total <= _MAX_STEPS, expected)


def scheduled_rate(schedule: LearningRateSchedule, num_steps: int) -> float:
    """Learning rate of the step after `num_steps`, by the rule of `LearningRateSchedule`."""
    warmup, share = schedule.warmup_steps, schedule.final_share
    if num_steps < warmup:
        return schedule.learning_rate * (num_steps + 1) / (warmup + 1)
    if schedule.kind is ScheduleKind.CONSTANT:
        return schedule.learning_rate
    done = min(1.0, (num_steps - warmup) / (schedule.total_steps - warmup))
    is_cosine = schedule.kind is ScheduleKind.COSINE
    left = (1.0 + math.cos(math.pi * done)) / 2.0 if is_cosine else 1.0 - done
    return schedule.learning_rate * (share + (1.0 - share) * left)


def _require_in_range(field: str, value: float, otherwise: str = "") -> None:
    require(field, value, _SMALLEST <= value <= _LARGEST, otherwise + _RANGE)


def resolve_optim(
    request: OptimStepConfig, normalisation: Normalisation, policy: AdamWConfig, num_steps: int = 0
) -> OptimStep:
    """Fill in the policy's weight decay, what its schedule says after `num_steps` steps, and the
    window's divisor.

    Raises `RatoonError` INVALID_ARGUMENT naming the field.
    """
    check_optim(request, policy)
    divide_by = _resolve_divide_by(request, normalisation)
    rate = request.learning_rate
    if rate is None:
        assert policy.schedule is not None, "it is checked"
        rate = scheduled_rate(policy.schedule, num_steps)
    return OptimStep(
        learning_rate=rate,
        weight_decay=policy.weight_decay if request.weight_decay is None else request.weight_decay,
        max_grad_norm=_resolve_max_grad_norm(request, divide_by),
        divisor=_resolve_divisor(request, divide_by),
        tensor_grad_norms=request.tensor_grad_norms,
        changed_share=request.changed_share,
        step_on_zero_gradient=request.step_on_zero_gradient,
        beta1=request.beta1,
        beta2=request.beta2,
        eps=request.eps,
    )


def resolve_empty(request: OptimStepConfig, policy: AdamWConfig, num_steps: int = 0) -> OptimStep:
    """The step of a window without gradients, which nothing divides. Raises as `resolve_optim`."""
    check_optim(request, policy)
    undivided = replace(request, divide_by=DivideBy.NONE, divide_constant=None)
    nothing = Normalisation(token_weight=TokenWeight.PER_TOKEN, default_divide_by=DivideBy.NONE)
    return resolve_optim(undivided, nothing, policy, num_steps)


def _resolve_max_grad_norm(request: OptimStepConfig, divide_by: DivideBy) -> float:
    """Sums that nothing divides have a norm that grows with the batch: they have no default."""
    norm = request.max_grad_norm
    if norm is None:
        return math.inf if divide_by is DivideBy.NONE else DEFAULT_MAX_GRAD_NORM
    return norm or math.inf


def _resolve_divide_by(request: OptimStepConfig, normalisation: Normalisation) -> DivideBy:
    default = normalisation.default_divide_by
    divide_by = request.divide_by or default
    if divide_by is None:
        raise invalid("optim.divide_by", "none", "one: the losses of this window differ in theirs")
    if default is DivideBy.CONSTANT and divide_by is not DivideBy.CONSTANT:
        raise invalid("optim.divide_by", divide_by, "constant: dr_grpo divides by a constant")
    # A sequence's weights add up to 1 already: over tokens that is no mean of anything.
    is_per_sequence = normalisation.token_weight is TokenWeight.PER_SEQUENCE
    if is_per_sequence and divide_by is DivideBy.TOKENS:
        raise invalid(
            "optim.divide_by",
            divide_by,
            f"one that agrees with token_weight {normalisation.token_weight}",
        )
    return divide_by


def _resolve_divisor(request: OptimStepConfig, divide_by: DivideBy) -> CounterDivisor | NoDivisor:
    if divide_by is DivideBy.CONSTANT:
        if request.divide_constant is None:
            raise invalid("optim.divide_constant", "none", _RANGE)
        return CounterDivisor(counter=DivideBy.SEQUENCES, times=request.divide_constant)
    if request.divide_constant is not None:
        raise invalid(
            "optim.divide_constant",
            request.divide_constant,
            f"absent: this window is divided by {divide_by}",
        )
    if divide_by is DivideBy.NONE:
        return NoDivisor()
    return CounterDivisor(counter=divide_by)
