"""One optimizer step of all ranks: judged on each of them before any writes state, then taken.

A step that is not good on every rank is taken on none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from types import MappingProxyType

from ratoon.train.loss.spec import OptimStep
from ratoon.train.loss.sums import LossSums
from ratoon.train.named_gradients import NamedGradients, tensor_norms
from ratoon.train.numerics import peak_memory_bytes
from ratoon.train.optim.adamw import norm_of_blocks
from ratoon.train.optim.bf16_adamw import rounding_warning
from ratoon.train.optim.state import StateBounds
from ratoon.train.optim.step_size import StepSize
from ratoon.train.ranks.group import RankGroup
from ratoon.train.ranks.rank import Rank, Stepped
from ratoon.train.rollout_figures import FoundRollouts
from ratoon.train.spec import TrainerSpec
from ratoon.train.verdicts import skip_offenders
from ratoon.warning_kinds import WarningKind, warn
from ratoon_proto.types import NumericsGuard, SkipReason, StepReport, TensorGradNorm

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
    if norm == 0 and not (step.step_on_zero_gradient or step.allow_empty):
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


def run_optimizer_step(
    ranks: RankGroup,
    named: NamedGradients,
    spec: TrainerSpec,
    step: OptimStep,
    sums: LossSums,
    divisor: float,
    base: StepReport,
    found: FoundRollouts | None = None,
) -> StepReport:
    """Divide the ranks' gradient sums, clip and step, or skip the step and say why.

    Args:
        ranks: All ranks, whose sums are of one window.
        named: Names of the gradients.
        spec: The policy.
        step: The step.
        sums: The window's loss sums.
        divisor: What divides its gradients; 0 if no token counts.
        base: The report so far.
        found: The window's last forward-backward, for whom a skipped step is named.

    Returns:
        `base` with what became of the step; its norms are after division and before clipping.
    """
    reason, norm = _judge(ranks, spec, step, sums, divisor)
    wants_norms = step.tensor_grad_norms and divisor
    norms = _tensor_norms(ranks, named, divisor) if wants_norms else ()
    own, stepped = ranks.own, list[Stepped]()
    if reason is None:
        assert norm is not None, "it was measured before a step is taken"
        stepped = ranks.exchange(Rank.step, norm, divisor, step)
        warnings = rounding_warning(spec.kept_states, step.learning_rate)
    else:
        text = f"{WARNINGS[reason]}: the step was skipped"
        offenders = () if found is None else skip_offenders(found, reason)
        warnings = (warn(WarningKind.STEP_SKIPPED, text, offenders),)
    planned = [each.planned_memory_bytes for each in stepped] or [own.planned_memory_bytes]
    peaks = [each.peak_memory_bytes for each in stepped]
    return replace(
        base,
        skipped=reason is not None,
        skip_reason=reason,
        learning_rate=step.learning_rate,
        grad_norm=norm,
        tensor_grad_norms=norms,
        **StepSize.norms([each.size for each in stepped]),
        changed_share=_changed_share(named, stepped) if step.changed_share else None,
        peak_memory_bytes=max(peaks, default=peak_memory_bytes(own.model.device)),
        planned_memory_bytes=max((each for each in planned if each is not None), default=None),
        warnings=(*base.warnings, *warnings),
    )


def _judge(
    ranks: RankGroup, spec: TrainerSpec, step: OptimStep, sums: LossSums, divisor: float
) -> tuple[SkipReason | None, float | None]:
    """The reason to skip the step, and the norm of the divided gradient if it was measured."""
    reason = reason_in_sums(sums, divisor, spec.guard)
    if not divisor:
        return reason, None
    bounds = StateBounds.over(ranks.exchange(Rank.reduce_sums))
    if reason is not None:
        return reason, None
    norm = _grad_norm(ranks, divisor)
    reason = reason_in_norm(norm, step, spec.guard)
    if reason is None and ranks.own.optimizer.bounds_after(bounds, norm, step) is None:
        is_finite = all(ranks.all(Rank.stays_finite, norm, divisor, step))
        reason = None if is_finite else SkipReason.NON_FINITE_STEP
    return reason, norm


def _grad_norm(ranks: RankGroup, divisor: float) -> float:
    """Norm of the added up and divided sums; infinite if their dtype cannot hold it."""
    in_order = ranks.own.shares.in_order
    norm = norm_of_blocks(
        lambda exactly: [*chain.from_iterable(in_order(ranks.all(Rank.norms, exactly)))]
    )
    norm /= divisor
    return math.inf if norm > ranks.own.optimizer.max_norm else norm


def _tensor_norms(
    ranks: RankGroup, named: NamedGradients, divisor: float
) -> tuple[TensorGradNorm, ...]:
    parts = ranks.own.shares.in_order(ranks.all(Rank.part_norms))
    return tensor_norms(parts, named.by_parameter(), divisor)


def _changed_share(named: NamedGradients, stepped: list[Stepped]) -> float | None:
    """The share over all ranks; None if the step was skipped or weights are not bfloat16."""
    changed = [each.changed for each in stepped if each.changed is not None]
    if not stepped or len(changed) < len(stepped):
        return None
    return sum(changed) / named.num_elements
