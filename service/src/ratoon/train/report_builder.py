"""From sums and counters to the report's means.

Enters what a pass and a step did, leaves a `StepReport`. Invariant: a mean is a sum divided by what
the loss counts; the loss itself is divided as the gradient is.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.packed import UpdatePlan
from ratoon.train.canary import CanaryOutcome
from ratoon.train.config import DivideBy
from ratoon.train.loss.clamp import clamp_k3
from ratoon.train.loss.sums import LossSums
from ratoon.train.loss.warnings import sum_warnings
from ratoon.train.loss_spec import CounterDivisor, NoDivisor
from ratoon.train.passes import ForwardColumns
from ratoon.train.prepare import Prepared
from ratoon.train.report import PhaseSeconds, StepReport
from ratoon.train.usage import Usage
from ratoon.train.window import divide_number


def forward_backward_report(
    prepared: Prepared, sums: LossSums, seconds: PhaseSeconds, usage: Usage, *, version: int
) -> StepReport:
    """Report of one forward-backward. Its losses are divided by the loss's own counter; by 1 where
    that is a constant, which only the step knows."""
    batch, selection, counters = prepared.batch, prepared.selection, prepared.counters
    by = prepared.loss.default_divide_by
    own = NoDivisor() if by in (DivideBy.CONSTANT, DivideBy.NONE) else CounterDivisor(counter=by)
    report = _with_means(
        StepReport(), sums, divide_number(own, counters), has_kl=prepared.loss.kl is not None
    )
    report = _with_packing(report, prepared.plan, seconds, usage)
    report = _with_staleness(report, prepared, version)
    return replace(
        report,
        reward_mean=None if batch.rewards is None else float(batch.rewards.mean()),
        num_groups=counters.groups,
        num_sequences=counters.sequences,
        trained_tokens=counters.tokens,
        dropped_stale=selection.dropped_stale,
        dropped_truncated=selection.dropped_truncated,
        dropped_zero_variance=selection.dropped_zero_variance,
        zero_advantage_sequences=int(np.count_nonzero(prepared.not_run_S)),
        warnings=(*prepared.warnings, *sum_warnings(prepared.loss, sums)),
    )


def with_canary(report: StepReport, outcome: CanaryOutcome) -> StepReport:
    """`report` with what the canary saw."""
    warnings = (*report.warnings, *outcome.warnings)
    return replace(report, canary=outcome.report, warnings=warnings)


def step_report(
    base: StepReport, sums: LossSums, divisor: float, *, has_kl: bool, seconds: float
) -> StepReport:
    """`base` with the means of a whole window and the optimizer's seconds."""
    report = _with_means(base, sums, divisor, has_kl=has_kl)
    return replace(report, seconds=replace(report.seconds, optimizer=seconds))


def forward_report(
    batch: RolloutBatch,
    plan: UpdatePlan,
    columns: ForwardColumns,
    seconds: PhaseSeconds,
    usage: Usage,
) -> StepReport:
    """Report of one Forward, over all trained tokens of the batch."""
    mask_J = batch.loss_mask
    report = replace(
        _with_packing(StepReport(), plan, seconds, usage),
        entropy=float(columns.entropy_J[mask_J].mean(dtype=np.float64)),
        reward_mean=None if batch.rewards is None else float(batch.rewards.mean()),
        num_groups=batch.num_groups,
        num_sequences=batch.num_sequences,
        trained_tokens=int(mask_J.sum()),
    )
    raw_J = np.repeat(batch.sampler_is_raw, np.diff(batch.response_offsets))
    usable_J = mask_J & ~raw_J
    if batch.sampler_logprobs is None or not usable_J.any():
        return report
    gap = columns.logprob_J[usable_J].astype(np.float64) - batch.sampler_logprobs[usable_J]
    kl, is_clamped = clamp_k3(torch.from_numpy(gap))
    return replace(
        report,
        sampler_kl=float(kl.mean()),
        sampler_gap_max=float(np.abs(gap).max()),
        clamped_sampler_gaps=int(is_clamped.sum()),
    )


def _with_means(report: StepReport, sums: LossSums, divisor: float, *, has_kl: bool) -> StepReport:
    """Losses over `divisor`; KL and entropy weighted as the loss; the rest over counted terms.

    Means other than the losses are over what was run.
    """
    by_divisor = 1.0 / divisor if divisor else 0.0
    by_weight = 1.0 / sums.weight if sums.weight else 0.0
    by_terms = 1.0 / sums.terms if sums.terms else 0.0
    has_sampler = sums.sampler_terms > 0
    return replace(
        report,
        loss=sums.loss * by_divisor,
        policy_gradient_loss=sums.policy_gradient * by_divisor,
        kl=sums.kl * by_weight if has_kl else None,
        entropy=sums.entropy * by_weight,
        clip_fraction_low=sums.clipped_low * by_terms,
        clip_fraction_high=sums.clipped_high * by_terms,
        ratio_max=sums.ratio_max,
        sampler_kl=sums.sampler_kl / sums.sampler_terms if has_sampler else None,
        sampler_gap_max=sums.sampler_gap_max if has_sampler else None,
        clip_fraction_positive=_share(sums.positive_clipped, sums.positive_terms),
        clip_fraction_negative=_share(sums.negative_clipped, sums.negative_terms),
        clamped_ratios=int(sums.clamped_ratios),
        clamped_kls=int(sums.clamped_kls),
        clamped_sampler_gaps=int(sums.clamped_sampler_gaps),
    )


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _with_packing(
    report: StepReport, plan: UpdatePlan, seconds: PhaseSeconds, usage: Usage
) -> StepReport:
    wall_s = seconds.plan + seconds.forward + seconds.backward
    return replace(
        report,
        replicated_tokens=plan.replicated_tokens,
        packed_tokens=plan.packed_tokens,
        token_reduction=plan.replicated_tokens / plan.packed_tokens if plan.packed_tokens else 0.0,
        attention_pair_reduction=(
            plan.replicated_pairs / plan.packed_pairs if plan.packed_pairs else 0.0
        ),
        num_micro_batches=len(plan.micro_batches),
        seconds=seconds,
        tokens_per_second=plan.replicated_tokens / wall_s if wall_s > 0 else 0.0,
        hardware_mfu=usage.hardware_mfu,
        logical_mfu=usage.logical_mfu,
        peak_memory_bytes=usage.peak_memory_bytes,
    )


def _with_staleness(report: StepReport, prepared: Prepared, version: int) -> StepReport:
    """Versions between sampling and now, over kept rollouts that say theirs."""
    sampled_S = prepared.batch.policy_version
    said_S = prepared.selection.kept_S & (sampled_S >= 0)
    if not said_S.any():
        return report
    age = version - sampled_S[said_S]
    return replace(report, staleness_mean=float(age.mean()), staleness_max=int(age.max()))
