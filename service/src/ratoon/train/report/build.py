"""From sums and counters to the report's means; the loss is divided as its gradient is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from ratoon.model.route_counts import RouteSums
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.packed import UpdatePlan
from ratoon.train.additive import mean
from ratoon.train.config import DivideBy
from ratoon.train.gradient_window import Totals, divide_number
from ratoon.train.loss.clamp import clamp_k3
from ratoon.train.loss.spec import CounterDivisor, NoDivisor
from ratoon.train.loss.warnings import sum_warnings
from ratoon.train.passes import ForwardColumns
from ratoon.train.prepare import Prepared
from ratoon.train.report.batch_sums import of_batch
from ratoon.train.report.step_report import PhaseSeconds, RouterReport, StepReport
from ratoon.train.report.usage import Usage
from ratoon.train.self_check import SelfCheckOutcome


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
        _with_packing(StepReport(), plan, seconds, usage),
        **of_batch(batch).figures(),
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
    """`report` with all that adds up over the calls of a window."""
    counters = totals.counters
    return replace(
        report,
        **totals.sums.figures(divisor, has_kl=totals.has_kl),
        **totals.batch.figures(),
        routers=_routers(totals.routes),
        route_mismatch=_route_mismatch(totals.routes),
        num_groups=counters.groups,
        num_sequences=counters.sequences,
        trained_tokens=counters.tokens,
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
    return mean(sum(other for _, other in sums), sum(recorded for recorded, _ in sums))


def _with_packing(
    report: StepReport, plan: UpdatePlan, seconds: PhaseSeconds, usage: Usage
) -> StepReport:
    wall_s = seconds.plan + seconds.forward + seconds.backward
    return replace(
        report,
        unshared_tokens=plan.unshared_tokens,
        packed_tokens=plan.packed_tokens,
        token_reduction=mean(plan.unshared_tokens, plan.packed_tokens),
        attention_pair_reduction=mean(plan.replicated_pairs, plan.packed_pairs),
        num_micro_batches=len(plan.micro_batches),
        seconds=seconds,
        tokens_per_second=mean(plan.unshared_tokens, wall_s) if plan.packed_tokens else None,
        hardware_mfu=usage.hardware_mfu,
        logical_mfu=usage.logical_mfu,
        peak_memory_bytes=usage.peak_memory_bytes,
    )
