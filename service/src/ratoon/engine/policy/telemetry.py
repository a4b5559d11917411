"""Operations as changes of metrics, and as lines of the log. Pure.

The operations counter has one sample per journaled transition, so its sums match the journal's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict

from ratoon import metrics
from ratoon.engine.commands import effect_of
from ratoon.engine.journal.records import JournalState, OperationRecord
from ratoon.engine.journal.steps import warning_kinds
from ratoon.engine.types import CheckpointInfo, FailedResult, ForwardResult, OperationResult
from ratoon.metrics import Change, Gone, Metric
from ratoon.model.spec import ModelInfo
from ratoon_proto.types import (
    ImportResult,
    OperationKind,
    OperationState,
    PhaseSeconds,
    SelfCheckReport,
    StepReport,
    StepResult,
)


def entered(record: OperationRecord, state: JournalState) -> list[Change]:
    """An operation entered a state."""
    if record.seq == 0 and record.kind is OperationKind.FORWARD:
        return [metrics.UNSEQUENCED_FORWARDS.sample(1, state.public)]
    return [metrics.OPERATIONS.sample(1, record.kind, state.public)]


def line(record: OperationRecord) -> dict[str, object]:
    """The fields of the log's line about an operation that has ended; absent ones are left out."""
    start, end, result = record.started_at, record.finished_at, record.result
    fields: dict[str, object] = {
        "policy_id": record.policy_id,
        "seq": record.seq or None,
        "kind": record.kind.value,
        "state": record.state.public.value,
        # A clock that was set back measures nothing.
        "seconds": None if start is None or end is None else round(max(end - start, 0.0), 3),
    }
    match result:
        case StepResult(report=report) | ForwardResult(report=report):
            fields |= {"version": result.version, **_line(report)}
        case CheckpointInfo() | ImportResult():
            fields["version"] = result.version
        case FailedResult(error=error):
            # Its text may have what the caller has sent.
            fields |= {"error": error["code"], "field": error["field"] or None}
        case _:
            pass
    return {name: value for name, value in fields.items() if value is not None}


def _line(report: StepReport) -> dict[str, object]:
    clips = (report.clip_fraction_low, report.clip_fraction_high)
    return {
        "groups": report.num_groups,
        "token_reduction": report.token_reduction,
        "reward": report.reward_mean,
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "sampler_kl": report.sampler_kl,
        "kl": report.kl,
        "clip": None if clips == (None, None) else sum(clip or 0.0 for clip in clips),
        "skip_reason": report.skip_reason and report.skip_reason.value,
        "warnings": warning_kinds(report) or None,
    }


def journal_counts(counts: Mapping[tuple[str, str], int]) -> list[Change]:
    """Initial counters of a new process: records by (kind, journal state)."""
    changes: list[Change] = []
    for (kind, name), count in counts.items():
        state = JournalState(name)
        changes.append(metrics.OPERATIONS.sample(count, kind, OperationState.QUEUED))
        if state is not JournalState.ACCEPTED:
            changes.append(metrics.OPERATIONS.sample(count, kind, state.public))
    return changes


def open_operations(policy_id: str, num_queued: int, num_running: int) -> list[Change]:
    return [
        metrics.OPEN_OPERATIONS.sample(num_queued, policy_id, OperationState.QUEUED),
        metrics.OPEN_OPERATIONS.sample(num_running, policy_id, OperationState.RUNNING),
    ]


def versions(policy_id: str, version: int, published: tuple[int, ...]) -> list[Change]:
    changes: list[Change] = [metrics.POLICY_VERSION.sample(version, policy_id)]
    if published:
        changes.append(metrics.PUBLISHED_VERSION.sample(published[-1], policy_id))
    return changes


def receiver_lags(policy_id: str, lags: Mapping[str, int]) -> list[Change]:
    return [metrics.RECEIVER_LAG.sample(lag, policy_id, name) for name, lag in lags.items()]


def receivers_gone(policy_id: str, receiver_ids: Iterable[str]) -> list[Change]:
    """The lag of these receivers is no longer known."""
    of_policy = {metrics.POLICY_LABEL: policy_id}
    return [Gone(labels={**of_policy, metrics.RECEIVER_LABEL: name}) for name in receiver_ids]


def model(policy_id: str, info: ModelInfo) -> list[Change]:
    return [metrics.BACKEND.sample(1, policy_id, "tree_attention", info.attention_backend)]


def result(policy_id: str, kind: OperationKind, result: OperationResult) -> list[Change]:
    """Samples of a finished operation's report."""
    match result:
        case StepResult(report=report):
            changes = _seconds(report.seconds) + _figures(policy_id, report)
            effect = effect_of(kind)
            if effect.computes_gradients:
                changes += _batch(policy_id, report) + _self_check(policy_id, report.self_check)
            if effect.takes_step:
                changes += _step(policy_id, report)
            return changes
        case ForwardResult(report=report):
            return _seconds(report.seconds)
        case _:
            return []


def _figures(policy_id: str, report: StepReport) -> list[Change]:
    """Figures of a batch, or of the whole window of an OptimStep."""
    figures = [
        metric.newest(getattr(report, name), policy_id, *labels)
        for name, (metric, labels) in metrics.REPORT_GAUGES.items()
    ]
    routers = report.routers
    # The report has these figures for each layer.
    return figures + _gauges(
        policy_id,
        (metrics.ROUTER_MAX_LOAD, max((each.max_load for each in routers), default=None)),
        (
            metrics.ROUTER_UNUSED_EXPERTS,
            sum(each.unused_experts for each in routers) if routers else None,
        ),
        (metrics.ROUTER_ENTROPY, min((each.entropy for each in routers), default=None)),
    )


def _batch(policy_id: str, report: StepReport) -> list[Change]:
    return [
        metrics.TOKENS.sample(report.unshared_tokens, "unshared"),
        metrics.TOKENS.sample(report.packed_tokens, "packed"),
        metrics.TOKENS.sample(report.trained_tokens, "trained"),
        metrics.MICRO_BATCHES.sample(report.num_micro_batches),
        metrics.DROPPED_SEQUENCES.sample(report.dropped_stale, "stale"),
        metrics.DROPPED_SEQUENCES.sample(report.dropped_truncated, "truncated"),
        metrics.DROPPED_SEQUENCES.sample(report.dropped_zero_variance, "zero_variance"),
        metrics.CLAMPED_TERMS.sample(report.clamped_ratios, "ratio"),
        metrics.CLAMPED_TERMS.sample(report.clamped_kls, "kl"),
        metrics.CLAMPED_TERMS.sample(report.clamped_sampler_gaps, "sampler_gap"),
        *_gauges(
            policy_id,
            (metrics.TOKEN_REDUCTION, report.token_reduction),
            (metrics.RANK_GAP, report.rank_gap),
            (metrics.TOKEN_RATE, report.tokens_per_second),
            (metrics.PEAK_MEMORY, report.peak_memory_bytes),
        ),
    ]


def _self_check(policy_id: str, self_check: SelfCheckReport | None) -> list[Change]:
    if self_check is None:
        return []
    return [
        metrics.SELF_CHECKS.sample(1, "exceeded" if self_check.exceeds_limits else "within"),
        metrics.PHASE_SECONDS.sample(self_check.seconds, "self_check"),
        *_gauges(
            policy_id,
            (metrics.SELF_CHECK_LOGPROB_MAX, self_check.logprob_max_difference),
            (metrics.SELF_CHECK_LOGPROB_MEAN, self_check.logprob_mean_difference),
            (metrics.SELF_CHECK_GRADIENT, self_check.gradient_difference),
            (metrics.SELF_CHECK_WORST_PARAMETER, self_check.worst_parameter_difference),
        ),
    ]


def _step(policy_id: str, report: StepReport) -> list[Change]:
    reason = report.skip_reason
    skipped = [] if reason is None else [metrics.SKIPPED_STEPS.sample(1, reason)]
    gauges = _gauges(
        policy_id,
        (metrics.GRAD_NORM, report.grad_norm),
        (metrics.CHANGED_SHARE, report.changed_share),
        (metrics.PLANNED_MEMORY, report.planned_memory_bytes),
    )
    return [*skipped, *gauges]


def _gauges(policy_id: str, *values: tuple[Metric, float | None]) -> list[Change]:
    """One gauge a figure; non-finite values are shown as they are."""
    return [metric.newest(value, policy_id) for metric, value in values]


def _seconds(seconds: PhaseSeconds) -> list[Change]:
    return [
        metrics.PHASE_SECONDS.sample(value, phase)
        for phase, value in asdict(seconds).items()
        if value > 0 and math.isfinite(value)
    ]
