"""Operations as changes of metrics, and as lines of the log. Pure.

The operations counter has one sample per journaled transition, so its sums match the journal's. The
gauges of reports are a function of the newest batch and the newest step alone, so they can be made
again from the journal.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from ratoon import metrics
from ratoon.engine.journal.records import JournalState, OperationRecord
from ratoon.engine.journal.steps import warning_kinds
from ratoon.engine.types import CheckpointInfo, FailedResult, ForwardResult
from ratoon.metrics import Change, Gone, Metric, Sample
from ratoon.model.spec import FolderBase, ModelInfo, PresetBase
from ratoon.train.spec import TrainerSpec
from ratoon_proto.types import (
    ImportResult,
    LoraTuning,
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
        return [metrics.UNSEQUENCED_FORWARDS.sample(1, record.policy_id, state.public)]
    return [_operations(1, record.policy_id, record.kind, state.public)]


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


def journal_counts(counts: Mapping[tuple[str, str, str], int]) -> list[Change]:
    """Initial counters of a new process: records by (policy, kind, journal state)."""
    changes: list[Change] = []
    for (policy_id, kind, name), count in counts.items():
        state, of_kind = JournalState(name), (policy_id, OperationKind(kind))
        changes.append(_operations(count, *of_kind, OperationState.QUEUED))
        if state is not JournalState.ACCEPTED:
            changes.append(_operations(count, *of_kind, state.public))
    return changes


def _operations(count: int, policy_id: str, kind: OperationKind, state: OperationState) -> Sample:
    # A DeletePolicy outlives its policy, whose series end.
    return metrics.OPERATIONS.sample(count, "" if kind.is_lifecycle else policy_id, kind, state)


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


def policy(policy_id: str, trainer: TrainerSpec, info: ModelInfo | None) -> list[Change]:
    """What a policy is, and its counters at 0, so that a rate sees the first count too."""
    spec, num_workers = trainer.model, trainer.parallel.num_workers
    model = preset = ""
    match spec.base:
        case PresetBase(name=preset):
            pass
        case FolderBase(folder=folder):
            model = Path(folder).name
    tuning = f"lora, rank {spec.tuning.rank}" if isinstance(spec.tuning, LoraTuning) else "full"
    shard = info.shard if info is not None else ""
    layout = "1 worker" if num_workers == 1 else f"{num_workers} workers, shard {shard}"
    what = (model, preset, tuning, spec.dtype, trainer.device, layout)
    changes: list[Change] = [metrics.POLICY.sample(1, policy_id, *what)]
    if info is not None:
        backend = info.attention_backend
        changes.append(metrics.BACKEND.sample(1, policy_id, "tree_attention", backend))
    return [*changes, *(zero for metric in metrics.METRICS for zero in metric.zeros(policy_id))]


def ended(record: OperationRecord) -> list[Change]:
    """Samples of an operation that has ended: the counts of its report, and its gauges."""
    match record.result:
        case StepResult(report=report):
            return [*_counts(record, report), *_gauges(record, report)]
        case ForwardResult(report=report):
            return _seconds(record.policy_id, report.seconds)
        case _:
            return []


def shown_again(policy_id: str, records: Iterable[OperationRecord]) -> list[Change]:
    """Gauges of reports as the journal has them; `records`: those of the newest batch and of the
    newest step, in seq order."""
    changes = [*_figures(policy_id, None), *_of_batch(policy_id, None)]
    for record in records:
        if isinstance(record.result, StepResult):
            changes += _gauges(record, record.result.report)
    return changes


def _counts(record: OperationRecord, report: StepReport) -> list[Change]:
    policy_id, changes = record.policy_id, _seconds(record.policy_id, report.seconds)
    changes += [metrics.WARNINGS.sample(1, policy_id, each.kind) for each in report.warnings]
    if record.effect.takes_step:
        reason = report.skip_reason
        changes.append(
            metrics.STEPS.sample(1, policy_id)
            if reason is None
            else metrics.SKIPPED_STEPS.sample(1, policy_id, reason)
        )
    if record.effect.computes_gradients:
        changes += _batch_counts(policy_id, report)
    return changes


def _batch_counts(policy_id: str, report: StepReport) -> list[Change]:
    counts: tuple[tuple[Metric, str, int], ...] = (
        (metrics.TOKENS, "unshared", report.unshared_tokens),
        (metrics.TOKENS, "packed", report.packed_tokens),
        (metrics.TOKENS, "trained", report.trained_tokens),
        (metrics.DROPPED_SEQUENCES, "stale", report.dropped_stale),
        (metrics.DROPPED_SEQUENCES, "truncated", report.dropped_truncated),
        (metrics.DROPPED_SEQUENCES, "zero_variance", report.dropped_zero_variance),
        (metrics.CLAMPED_TERMS, "ratio", report.clamped_ratios),
        (metrics.CLAMPED_TERMS, "kl", report.clamped_kls),
        (metrics.CLAMPED_TERMS, "sampler_gap", report.clamped_sampler_gaps),
    )
    changes: list[Change] = [metric.sample(count, policy_id, of) for metric, of, count in counts]
    bad = Counter(each.reason for each in report.bad_rollouts)
    changes += [metrics.DROPPED_SEQUENCES.sample(n, policy_id, of) for of, n in bad.items()]
    changes.append(metrics.MICRO_BATCHES.sample(report.num_micro_batches, policy_id))
    if (check := report.self_check) is not None:
        changes += _self_check_counts(policy_id, check)
    return changes


def self_checked(policy_id: str, check: SelfCheckReport) -> list[Change]:
    """A self-check that came before a publication, and is in no operation's report."""
    return [*_self_check_counts(policy_id, check), *_self_check_gauges(policy_id, check)]


def _self_check_counts(policy_id: str, check: SelfCheckReport) -> list[Change]:
    outcome = "exceeded" if check.exceeds_limits else "within"
    return [
        metrics.SELF_CHECKS.sample(1, policy_id, outcome),
        metrics.PHASE_SECONDS.sample(check.seconds, policy_id, "self_check"),
    ]


def _self_check_gauges(policy_id: str, check: SelfCheckReport | None) -> Iterator[Change]:
    for name, metric in metrics.SELF_CHECK_GAUGES.items():
        yield metric.sample(None if check is None else getattr(check, name), policy_id)


def _gauges(record: OperationRecord, report: StepReport) -> Iterator[Change]:
    """Every gauge of a report, so that none of an older one is left beside them."""
    policy_id, effect = record.policy_id, record.effect
    yield metrics.REPORT_SEQ.sample(record.seq, policy_id)
    yield from _figures(policy_id, report)
    if effect.computes_gradients:
        yield from _of_batch(policy_id, report)
    if effect.takes_step:
        yield metrics.LAST_STEP.sample(record.finished_at, policy_id)


def _figures(policy_id: str, report: StepReport | None) -> Iterator[Change]:
    """Figures of a batch, or of the whole window of an OptimStep; None: there is neither.

    Values that are not finite are shown as they are.
    """
    for name, (metric, label) in metrics.REPORT_GAUGES.items():
        value = None if report is None else getattr(report, name)
        yield metric.sample(value, policy_id, *([label] if label else []))
    routers = () if report is None else report.routers
    # The report has these figures for each layer.
    unused = sum(each.unused_experts for each in routers) if routers else None
    yield metrics.ROUTER_MAX_LOAD.sample(
        max((each.max_load for each in routers), default=None), policy_id
    )
    yield metrics.ROUTER_UNUSED_EXPERTS.sample(unused, policy_id)
    yield metrics.ROUTER_ENTROPY.sample(
        min((each.entropy for each in routers), default=None), policy_id
    )


def _of_batch(policy_id: str, report: StepReport | None) -> Iterator[Change]:
    """What packing a batch saved and took, and its self-check; None: there is no batch."""
    for name, metric in metrics.BATCH_GAUGES.items():
        yield metric.sample(None if report is None else getattr(report, name), policy_id)
    yield from _self_check_gauges(policy_id, None if report is None else report.self_check)


def _seconds(policy_id: str, seconds: PhaseSeconds) -> list[Change]:
    return [
        metrics.PHASE_SECONDS.sample(value, policy_id, phase)
        for phase, value in asdict(seconds).items()
        if value > 0 and math.isfinite(value)
    ]
