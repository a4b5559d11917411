"""From sums and counters to the report's means; the loss is divided as its gradient is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ratoon.model.router import RouteSums
from ratoon.rollout.packed import UpdatePlan
from ratoon.train.additive import mean
from ratoon.train.gradient_window import Totals, divide_number
from ratoon.train.loss.ratios import clamp_k3
from ratoon.train.loss.spec import CounterDivisor, NoDivisor
from ratoon.train.loss.warnings import sum_warnings
from ratoon.train.optimizer_step import StepOutcome
from ratoon.train.passes import ForwardColumns, PassTotals
from ratoon.train.prepare import Prepared, PreparedForward
from ratoon.train.report.batch_sums import of_batch
from ratoon.train.report.usage import Usage
from ratoon.train.self_check import SelfCheckOutcome
from ratoon_proto.types import DivideBy, PhaseSeconds, RouterReport, StepReport


def forward_backward_report(
    prepared: Prepared,
    totals: Totals,
    done: PassTotals,
    usage: Usage,
    self_check: SelfCheckOutcome,
) -> StepReport:
    """Report of one forward-backward.

    Its losses are divided by the loss's own counter; by 1 if that is a constant, which only the
    step knows.
    """
    by = prepared.loss.default_divide_by
    own = NoDivisor() if by in (DivideBy.CONSTANT, DivideBy.NONE) else CounterDivisor(counter=by)
    divisor = divide_number(own, totals.counters) if totals.counters.tokens else 0.0
    seconds = PhaseSeconds(plan=prepared.seconds, forward=done.forward_s, backward=done.backward_s)
    report = _packing_report(prepared.plan, seconds, usage, done.rank_seconds)
    sums = sum_warnings(prepared.loss, totals.sums)
    return replace(
        _with_totals(report, totals, divisor),
        self_check=self_check.report,
        warnings=(*prepared.warnings, *sums, *self_check.warnings),
    )


def step_report(
    base: StepReport, outcome: StepOutcome, totals: Totals, divisor: float, optimizer_s: float
) -> StepReport:
    """`base` with the figures of a whole window and of its optimizer step."""
    return replace(
        _with_totals(base, totals, divisor),
        grad_norm=outcome.grad_norm,
        tensor_grad_norms=outcome.tensor_grad_norms,
        changed_share=outcome.changed_share,
        skipped=outcome.skip_reason is not None,
        skip_reason=outcome.skip_reason,
        warnings=(*base.warnings, *outcome.warnings),
        peak_memory_bytes=outcome.peak_memory_bytes,
        planned_memory_bytes=outcome.planned_memory_bytes,
        seconds=replace(base.seconds, optimizer=optimizer_s),
    )


def forward_report(prepared: PreparedForward, columns: ForwardColumns, usage: Usage) -> StepReport:
    """Report of one Forward, over all trained tokens of the batch."""
    batch, mask_J = prepared.batch, prepared.batch.loss_mask
    seconds = PhaseSeconds(plan=prepared.seconds, forward=columns.forward_s)
    report = replace(
        _packing_report(prepared.plan, seconds, usage, columns.rank_seconds),
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
    """Share of recorded routes, over all layers, that the routers would not take themselves."""
    sums = [of_layer[-2:] for of_layer in routes.sums]
    return mean(sum(other for _, other in sums), sum(recorded for recorded, _ in sums))


def _packing_report(
    plan: UpdatePlan, seconds: PhaseSeconds, usage: Usage, rank_seconds: tuple[float, ...]
) -> StepReport:
    """What a plan packed, and how fast it ran; `rank_seconds` is empty on a single rank."""
    wall_s = seconds.plan + seconds.forward + seconds.backward
    return StepReport(
        unshared_tokens=plan.unshared_tokens,
        packed_tokens=plan.packed_tokens,
        token_reduction=mean(plan.unshared_tokens, plan.packed_tokens),
        attention_pair_reduction=mean(plan.replicated_pairs, plan.packed_pairs),
        num_micro_batches=len(plan.micro_batches),
        seconds=seconds,
        rank_seconds=rank_seconds,
        rank_gap=plan.rank_gap if rank_seconds else None,
        tokens_per_second=mean(plan.unshared_tokens, wall_s) if plan.packed_tokens else None,
        hardware_mfu=usage.hardware_mfu,
        logical_mfu=usage.logical_mfu,
        peak_memory_bytes=usage.peak_memory_bytes,
    )
