"""Whether a window's sums and gradient may become a step, and the step where they may.

A step that may not be taken changes no weight and no moment. Nothing here waits for a device but
the optimizer's own norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from torch import Tensor

from ratoon.train.config import NumericsGuard
from ratoon.train.loss.spec import OptimStep
from ratoon.train.loss.sums import LossSums
from ratoon.train.optim.choice import Optimizer
from ratoon.train.optim.gradients import GradientSums
from ratoon.train.report.step_report import SkipReason

WARNINGS: Mapping[SkipReason, str] = MappingProxyType(
    {
        SkipReason.NO_TOKENS: "no token counts in this window",
        SkipReason.NON_FINITE_LOSS: "the loss is not finite",
        SkipReason.NON_FINITE_GRADIENT: "the gradient is not finite",
        SkipReason.GRADIENT_NORM: "the gradient norm is above max_grad_norm_to_step",
        SkipReason.REFERENCE_KL: "the KL to the reference is above max_reference_kl_to_step",
        SkipReason.SAMPLER_KL: "the KL to the sampler is above max_sampler_kl_to_step",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedOutcome:
    """`grad_norm` as in the report: None where the optimizer was not asked. `changed`: its own."""

    grad_norm: float | None
    skip_reason: SkipReason | None
    changed: Tensor | None = None


def guarded_step(
    optimizer: Optimizer,
    gradients: GradientSums,
    sums: LossSums,
    divisor: float,
    step: OptimStep,
    guard: NumericsGuard,
) -> GuardedOutcome:
    """Step on the gradient sums unless there is a reason not to; `divisor` 0: no token counts."""
    reason = reason_in_sums(sums, divisor, guard)
    if reason is not None:
        return GuardedOutcome(grad_norm=None, skip_reason=reason)
    limit = guard.max_grad_norm_to_step
    limited = replace(step, max_norm_to_step=math.inf if limit is None else limit)
    outcome = optimizer.step(gradients.sums(), divisor, limited)
    if outcome.skipped:
        is_finite = math.isfinite(outcome.grad_norm)
        reason = SkipReason.GRADIENT_NORM if is_finite else SkipReason.NON_FINITE_GRADIENT
    return GuardedOutcome(grad_norm=outcome.grad_norm, skip_reason=reason, changed=outcome.changed)


def reason_in_sums(sums: LossSums, divisor: float, guard: NumericsGuard) -> SkipReason | None:
    """Why a window is not stepped on, as far as its sums say. A KL that is no number is too far."""
    if divisor == 0:
        return SkipReason.NO_TOKENS
    if not math.isfinite(sums.loss):
        return SkipReason.NON_FINITE_LOSS
    if _is_above(sums.kl, sums.weight, guard.max_reference_kl_to_step):
        return SkipReason.REFERENCE_KL
    if _is_above(sums.sampler_kl, sums.sampler_terms, guard.max_sampler_kl_to_step):
        return SkipReason.SAMPLER_KL
    return None


def _is_above(total: float, weight: float, limit: float | None) -> bool:
    """Whether the mean, rounded as in the report, is not known to be within the limit."""
    return limit is not None and weight != 0 and not total * (1.0 / weight) <= limit
