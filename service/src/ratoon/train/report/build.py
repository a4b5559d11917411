"""From sums and counters to the report's means; the loss is divided as its gradient is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from ratoon.model.route_counts import RouteSums
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.packed import UpdatePlan
from ratoon.train.gradient_window import Totals, divide_number
from ratoon.train.loss.clamp import clamp_k3
from ratoon.train.loss.histogram import quantile
from ratoon.train.loss.spec import CounterDivisor, NoDivisor
from ratoon.train.loss.sums import LossSums
from ratoon.train.loss.warnings import sum_warnings
from ratoon.train.passes import ForwardColumns
from ratoon.train.prepare import Prepared
from ratoon.train.report.batch_sums import BatchSums, of_batch
from ratoon.train.report.usage import Usage
from ratoon.train.self_check import SelfCheckOutcome
from ratoon_proto.types import DivideBy, PhaseSeconds, RouterReport, StepReport


def forward_backward_report(
    prepared: Prepared, totals: Totals, seconds: PhaseSeconds, usage: Usage
) -> StepReport:
    """Report of one forward-backward. Its losses are divided by the loss's own counter; by 1 where
    that is a constant, which only the step knows."""
    by = prepared.loss.default_divide_by
    own = NoDivisor() if by in (DivideBy.CONSTANT, DivideBy.NONE) else CounterDivisor(counter=by)
    report = _with_packing(StepReport(), prepared.plan, seconds, usage)
    counters = totals.counters
    divisor = divide_number(own, counters) if counters.tokens else 0.0
    report = _with_totals(report, totals, divisor)
    warnings = (*prepared.warnings, *sum_warnings(prepared.loss, totals.sums))
    return replace(report, warnings=warnings)


def with_ranks(report: StepReport, plan: UpdatePlan, rank_seconds: tuple[float, ...]) -> StepReport:
    """`report` with what each of several ranks did; of one, nothing."""
    if not rank_seconds:
        return report
    return replace(report, rank_seconds=rank_seconds, rank_gap=plan.rank_gap)


def with_self_check(report: StepReport, outcome: SelfCheckOutcome) -> StepReport:
    """`report` with what the self-check saw."""
    warnings = (*report.warnings, *outcome.warnings)
    return replace(report, self_check=outcome.report, warnings=warnings)


def step_report(
    base: StepReport, totals: Totals, divisor: float, *, seconds: Mapping[str, float]
) -> StepReport:
    """`base` with the figures of a whole window and the optimizer's seconds."""
    report = _with_totals(base, totals, divisor)
    return replace(report, seconds=replace(report.seconds, optimizer=seconds["optimizer"]))


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
        _with_batch(_with_packing(StepReport(), plan, seconds, usage), of_batch(batch)),
        entropy=float(columns.entropy_J[mask_J].mean(dtype=np.float64)) if mask_J.any() else None,
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
        sampler_gap_mean=float(gap.mean()),
        sampler_gap_abs_mean=float(np.abs(gap).mean()),
        sampler_gap_max=float(np.abs(gap).max()),
        clamped_sampler_gaps=int(is_clamped.sum()),
    )


def _with_totals(report: StepReport, totals: Totals, divisor: float) -> StepReport:
    """All that adds up over the calls of a window."""
    report = _with_means(report, totals.sums, divisor, has_kl=totals.has_kl)
    report = _with_correction(
        _with_sampler(_with_ratio(report, totals.sums), totals.sums), totals.sums
    )
    report = _with_batch(report, totals.batch)
    counters = totals.counters
    return replace(
        report,
        routers=_routers(totals.routes),
        route_mismatch=_route_mismatch(totals.routes),
        num_groups=counters.groups,
        num_sequences=counters.sequences,
        trained_tokens=counters.tokens,
    )


def _with_means(report: StepReport, sums: LossSums, divisor: float, *, has_kl: bool) -> StepReport:
    """Losses over `divisor`; KL and entropy weighted as the loss; the rest over counted terms.

    Means other than the losses are over what was run. A mean over nothing is None.
    """
    return replace(
        report,
        loss=_scaled(sums.loss, divisor),
        policy_gradient_loss=_scaled(sums.policy_gradient, divisor),
        kl=_scaled(sums.kl, sums.weight) if has_kl else None,
        entropy=_scaled(sums.entropy, sums.weight),
        router_aux_loss=_scaled(sums.balance, sums.weight) if sums.balance else None,
        clip_fraction_low=_scaled(sums.clipped_low, sums.terms),
        clip_fraction_high=_scaled(sums.clipped_high, sums.terms),
        clip_fraction_dual=_scaled(sums.clipped_dual, sums.terms),
        clip_fraction_positive=_mean(sums.positive_clipped, sums.positive_terms),
        clip_fraction_negative=_mean(sums.negative_clipped, sums.negative_terms),
        clamped_ratios=int(sums.clamped_ratios),
        clamped_kls=int(sums.clamped_kls),
        clamped_sampler_gaps=int(sums.clamped_sampler_gaps),
    )


def _with_ratio(report: StepReport, sums: LossSums) -> StepReport:
    """How far the policy is from the old one."""
    report = replace(report, old_kl=_mean(sums.old_kl, sums.old_terms))
    if not sums.ratio_terms:
        return report

    def ratio_at(share: float) -> float:
        # A bin's middle may be beyond all of its ratios.
        ratio = math.exp(quantile(sums.log_ratios, share))
        return min(max(ratio, sums.ratio_min), sums.ratio_max)

    return replace(
        report,
        ratio_mean=sums.ratio / sums.ratio_terms,
        ratio_min=sums.ratio_min,
        ratio_max=sums.ratio_max,
        ratio_p01=ratio_at(0.01),
        ratio_p50=ratio_at(0.5),
        ratio_p99=ratio_at(0.99),
    )


def _with_correction(report: StepReport, sums: LossSums) -> StepReport:
    """What the correction and its mask do."""
    weight, square = sums.correction_weight, sums.correction_square
    return replace(
        report,
        correction_masked_fraction=_mean(sums.correction_masked, sums.corrected),
        correction_truncated_fraction=_mean(sums.correction_truncated, sums.corrected),
        correction_weight_mean=_mean(weight, sums.corrected),
        correction_ess_fraction=_mean(weight * weight / square if square else 0.0, sums.corrected),
    )


def _with_sampler(report: StepReport, sums: LossSums) -> StepReport:
    """How far the policy is from the sampler."""
    return replace(
        report,
        sampler_kl=_mean(sums.sampler_kl, sums.sampler_terms),
        sampler_gap_mean=_mean(sums.sampler_gap, sums.sampler_terms),
        sampler_gap_abs_mean=_mean(sums.sampler_gap_abs, sums.sampler_terms),
        sampler_gap_max=sums.sampler_gap_max if sums.sampler_terms else None,
    )


def _with_batch(report: StepReport, sums: BatchSums) -> StepReport:
    """What was sent, and what of it was dropped."""
    rewards, advantages = sums.rewards, sums.advantages
    return replace(
        report,
        reward_mean=rewards.mean if rewards.count else None,
        reward_std=rewards.std if rewards.count else None,
        advantage_mean=advantages.mean if advantages.count else None,
        advantage_std=advantages.std if advantages.count else None,
        zero_variance_fraction=_mean(sums.flat_groups, sums.rewarded_groups),
        truncated_fraction=_mean(sums.truncated, sums.rollouts) or 0.0,
        response_length_mean=_mean(sums.response_tokens, sums.rollouts) or 0.0,
        response_length_max=int(sums.response_tokens_max),
        staleness_mean=_mean(sums.staleness, sums.dated_rollouts),
        staleness_max=int(sums.staleness_max) if sums.dated_rollouts else None,
        token_staleness_mean=_mean(sums.token_staleness, sums.dated_tokens),
        dropped_stale=int(sums.dropped_stale),
        dropped_truncated=int(sums.dropped_truncated),
        dropped_zero_variance=int(sums.dropped_zero_variance),
        zero_advantage_sequences=int(sums.not_run),
        route_conflicts=int(sums.route_conflicts),
    )


def _routers(routes: RouteSums) -> tuple[RouterReport, ...]:
    reports: list[RouterReport] = []
    for layer, (*load, tokens, entropy, _, _) in zip(routes.layers, routes.sums, strict=True):
        reports.append(
            RouterReport(
                layer=layer,
                max_load=max(load) * len(load) / sum(load),
                unused_experts=load.count(0.0),
                entropy=entropy / tokens,
            )
        )
    return tuple(reports)


def _route_mismatch(routes: RouteSums) -> float | None:
    """Over layers, of tokens with recorded experts those whose router would take others."""
    sums = [of_layer[-2:] for of_layer in routes.sums]
    return _mean(sum(other for _, other in sums), sum(recorded for recorded, _ in sums))


def _mean(total: float, count: float) -> float | None:
    return total / count if count else None


def _scaled(total: float, weight: float) -> float | None:
    """A mean that is rounded as the guard of a step rounds it."""
    return total * (1.0 / weight) if weight else None


def _with_packing(
    report: StepReport, plan: UpdatePlan, seconds: PhaseSeconds, usage: Usage
) -> StepReport:
    wall_s = seconds.plan + seconds.forward + seconds.backward
    return replace(
        report,
        unshared_tokens=plan.unshared_tokens,
        packed_tokens=plan.packed_tokens,
        token_reduction=_mean(plan.unshared_tokens, plan.packed_tokens),
        attention_pair_reduction=_mean(plan.replicated_pairs, plan.packed_pairs),
        num_micro_batches=len(plan.micro_batches),
        seconds=seconds,
        tokens_per_second=_mean(plan.unshared_tokens, wall_s) if plan.packed_tokens else None,
        hardware_mfu=usage.hardware_mfu,
        logical_mfu=usage.logical_mfu,
        peak_memory_bytes=usage.peak_memory_bytes,
    )
