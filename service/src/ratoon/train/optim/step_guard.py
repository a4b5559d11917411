"""Whether a window's sums and gradient may become a step. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from ratoon.train.loss.spec import OptimStep
from ratoon.train.loss.sums import LossSums
from ratoon_proto.types import NumericsGuard, SkipReason

WARNINGS: Mapping[SkipReason, str] = MappingProxyType(
    {
        SkipReason.NO_TOKENS: "no token counts in this window",
        SkipReason.NON_FINITE_LOSS: "the loss is not finite",
        SkipReason.NON_FINITE_GRADIENT: "the gradient is not finite",
        SkipReason.GRADIENT_NORM: "the gradient norm is above max_grad_norm_to_step",
        SkipReason.REFERENCE_KL: "the KL to the reference is above max_reference_kl_to_step",
        SkipReason.SAMPLER_KL: "the KL to the sampler is above max_sampler_kl_to_step",
        SkipReason.NON_FINITE_STEP: "the step would make weights or moments that are not finite",
        SkipReason.ZERO_GRADIENT: "the gradient is zero, and step_on_zero_gradient is off",
    }
)


def reason_in_norm(norm: float, step: OptimStep, guard: NumericsGuard) -> SkipReason | None:
    """Why a gradient of this norm, after division, is not stepped on."""
    if not math.isfinite(norm):
        return SkipReason.NON_FINITE_GRADIENT
    if norm == 0 and not step.step_on_zero_gradient:
        return SkipReason.ZERO_GRADIENT
    limit = guard.max_grad_norm_to_step
    return None if limit is None or norm <= limit else SkipReason.GRADIENT_NORM


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
