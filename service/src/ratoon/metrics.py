"""Every metric of the service, declared once, and the totals that `/metrics` shows.

Labels are bounded: kinds, states, phases, methods, ids of existing policies and their receivers.
Whatever is of one policy has its id as first label. `scripts/metrics_files.py` writes the table of
docs/operations.md and Grafana's dashboard from here.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ratoon.warning_kinds import WarningKind
from ratoon_proto.types import SkipReason

POLICY_LABEL = "policy_id"
RECEIVER_LABEL = "receiver_id"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One change: added to a counter, observed by a histogram, set on a gauge, which has no series
    any more where `value` is None."""

    metric: str
    labels: tuple[str, ...]
    value: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """Drops every series that has these labels, whatever others it has."""

    labels: Mapping[str, str]


Change = Sample | Gone


@dataclass(frozen=True, slots=True)
class Metric:
    """`labels` in the order in which `sample` takes their values. `values`: all that a label can
    have, of the last labels, for which they are known here."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])

    def sample(self, value: float | None, *labels: str) -> Sample:
        """A change of the series with these labels; `value` None: the gauge has none now."""
        assert len(labels) == len(self.labels), f"{self.name} has labels {self.labels}"
        assert value is not None or self.kind is MetricKind.GAUGE
        for place, known in enumerate(self.values.values(), start=len(labels) - len(self.values)):
            assert labels[place] in known, f"{self.name}: {labels[place]}"
        return Sample(metric=self.name, labels=labels, value=value)

    def zeros(self, policy_id: str) -> Iterator[Sample]:
        """Every series that this counter can have of one policy, at 0."""
        if self.kind is MetricKind.COUNTER and {*self.labels} - {*self.values} == {POLICY_LABEL}:
            for labels in itertools.product(*self.values.values()):
                yield self.sample(0, policy_id, *labels)


def _counter(name: str, text: str, *labels: str, **values: Iterable[str]) -> Metric:
    """`values`: labels whose values are known, behind the others."""
    known = {label: tuple(map(str, each)) for label, each in values.items()}
    return Metric(name, MetricKind.COUNTER, text, (*labels, *known), known)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, MetricKind.GAUGE, text, labels)


def _histogram(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, MetricKind.HISTOGRAM, text, labels)


BUILD = _gauge("ratoon_build_info", "1: the versions in use.", "version", "python", "torch")
REQUESTS = _counter(
    "ratoon_requests_total",
    "Answered requests; `code` is HTTP's status or the name of gRPC's.",
    *("transport", "method", "code"),
)
REQUEST_SECONDS = _histogram(
    "ratoon_request_seconds",
    "Seconds to answer a request, long polls included.",
    *("transport", "method"),
)
TINKER_UNKNOWN_FIELDS = _counter(
    "ratoon_tinker_unknown_fields_total",
    "Requests of the Tinker wire with fields that this version does not know; the log names them.",
    "call",
)
REFUSALS = _counter(
    "ratoon_refusals_total",
    "Refused calls: `reason` is `details.resource`, else the code in lower case; `key_id` is empty "
    "without a key.",
    *("reason", "key_id"),
)

POLICY = _gauge(
    "ratoon_policy_info",
    "1: what the policy is. `model` is the name of its folder, `layout` its workers and how they "
    "are sharded.",
    *(POLICY_LABEL, "model", "preset", "tuning", "dtype", "device", "layout"),
)
BACKEND = _gauge(
    "ratoon_backend_info", "1: the kernel backend in use.", POLICY_LABEL, "op", "backend"
)
POLICY_FAILED = _gauge(
    "ratoon_policy_failed", "1 if the policy is FAILED until somebody acts, else 0.", POLICY_LABEL
)
POLICY_RELEASED = _gauge(
    "ratoon_policy_released",
    "1 while the policy is put away and has no worker, else 0.",
    POLICY_LABEL,
)
OPERATIONS = _counter(
    "ratoon_operations_total",
    "Operations in the journal that entered a state: each counts as `queued` and in its later "
    "states. Creations and deletions have an empty `policy_id`.",
    *(POLICY_LABEL, "kind", "state"),
)
UNSEQUENCED_FORWARDS = _counter(
    "ratoon_unsequenced_forwards_total",
    "Forwards without a key, which are not in the journal, that entered a state.",
    *(POLICY_LABEL, "state"),
)
OPEN_OPERATIONS = _gauge(
    "ratoon_open_operations", "Operations that are `queued` or `running`.", POLICY_LABEL, "state"
)
POLICY_VERSION = _gauge("ratoon_policy_version", "Version of the weights.", POLICY_LABEL)
PUBLISHED_VERSION = _gauge(
    "ratoon_published_version", "Newest version that can be fetched.", POLICY_LABEL
)
PUBLISH_SECONDS = _histogram(
    "ratoon_publish_seconds",
    "Seconds from the end of a step until its version can be fetched.",
    POLICY_LABEL,
)
PUBLISH_FAILURES = _counter(
    "ratoon_publish_failures_total", "Versions that could not be published.", POLICY_LABEL
)
RECEIVER_LAG = _gauge(
    "ratoon_receiver_lag_versions",
    "Newest published version minus the version that the receiver reported by AckWeights; below 0 "
    "it serves a version that a LoadCheckpoint abandoned. The series ends with the receiver: the "
    "longest silent of more than 64, or one that serves nothing.",
    *(POLICY_LABEL, RECEIVER_LABEL),
)
CHECKPOINTS = _counter(
    "ratoon_checkpoints_total",
    "Automatic checkpoints `written` or `failed`, and all `unusable` ones.",
    POLICY_LABEL,
    outcome=("written", "failed", "unusable"),
)
RECOVERIES = _counter(
    "ratoon_recoveries_total",
    "Lost workers: `replayed`, `rebased`, `rolled_back` (`recovery: fail`), `stopped` (the policy "
    "is FAILED). A journal that lost its end: `lost` (accepted), `adopted` (a checkpoint).",
    POLICY_LABEL,
    outcome=("replayed", "rebased", "rolled_back", "stopped", "lost", "adopted"),
)
REPLAYED_OPERATIONS = _counter(
    "ratoon_replayed_operations_total", "Operations replayed by recoveries.", POLICY_LABEL
)

STEPS = _counter("ratoon_steps_total", "Optimizer steps taken.", POLICY_LABEL)
SKIPPED_STEPS = _counter(
    "ratoon_skipped_steps_total",
    "Optimizer steps that were skipped, by `skip_reason`.",
    POLICY_LABEL,
    reason=SkipReason,
)
WARNINGS = _counter(
    "ratoon_warnings_total",
    "Warnings of reports, by the kinds of docs/runbook.md.",
    POLICY_LABEL,
    kind=WarningKind,
)
TOKENS = _counter(
    "ratoon_tokens_total",
    "Tokens of forward-backwards: `unshared` (each rollout alone), `packed`, `trained`.",
    POLICY_LABEL,
    count=("unshared", "packed", "trained"),
)
MICRO_BATCHES = _counter(
    "ratoon_micro_batches_total", "Micro-batches of forward-backwards.", POLICY_LABEL
)
DROPPED_SEQUENCES = _counter(
    "ratoon_dropped_sequences_total",
    "Rollouts left out of the loss.",
    POLICY_LABEL,
    reason=("stale", "truncated", "zero_variance", "length", "token", "reward", "logprob", "alone"),
)
CLAMPED_TERMS = _counter(
    "ratoon_clamped_terms_total",
    "Clamped terms: the loss's `ratio`, the `kl` term, the `sampler_gap` in `sampler_kl`.",
    POLICY_LABEL,
    term=("ratio", "kl", "sampler_gap"),
)
SELF_CHECKS = _counter(
    "ratoon_self_checks_total",
    "Self-checks, rollouts run packed and alone: `within` the limits of rounding, or `exceeded`.",
    POLICY_LABEL,
    outcome=("within", "exceeded"),
)
PHASE_SECONDS = _histogram(
    "ratoon_phase_seconds",
    "Seconds of an operation in `plan`, `forward`, `backward`, `optimizer`, `publish`, `digest`, "
    "`self_check`.",
    *(POLICY_LABEL, "phase"),
)
LAST_STEP = _gauge(
    "ratoon_last_step_timestamp_seconds",
    "Unix time at which the newest optimizer step ended, taken or skipped.",
    POLICY_LABEL,
)

# The gauges below are of the newest report, a batch's or an OptimStep's, whose seq this is.
REPORT_SEQ = _gauge(
    "ratoon_report_seq",
    "Seq of the newest report. This and all gauges below it are of that report: of a batch, or of "
    "an OptimStep's whole window. One that it lacks has no series.",
    POLICY_LABEL,
)
_CLIP_FRACTION = _gauge(
    "ratoon_clip_fraction",
    "Share of tokens clipped at `low` or `high`; `dual`: those of `high` that the dual clip holds.",
    *(POLICY_LABEL, "bound"),
)
_CLIP_FRACTION_BY_SIGN = _gauge(
    "ratoon_clip_fraction_by_sign",
    "Share of tokens clipped, of those whose advantage is `positive` or `negative`.",
    *(POLICY_LABEL, "sign"),
)
_RATIO_QUANTILE = _gauge(
    "ratoon_ratio_quantile",
    "Importance ratio: `0` the smallest, `0.01`, `0.5`, `0.99` from a histogram, `1` the largest.",
    *(POLICY_LABEL, "quantile"),
)
_LENGTH_QUANTILE = _gauge(
    "ratoon_response_length_quantile",
    "Response tokens of a rollout: `0.5`, `0.9`, `0.99`, `1` the longest.",
    *(POLICY_LABEL, "quantile"),
)


def _of_report(**texts: str) -> dict[str, tuple[Metric, str]]:
    """Gauges that have the name of their figure, by figure."""
    return {name: (_gauge(f"ratoon_{name}", texts[name], POLICY_LABEL), "") for name in texts}


# Gauge of each figure of a report, and the value of its second label; "": it has none.
# training.proto says what each figure is.
REPORT_GAUGES: Mapping[str, tuple[Metric, str]] = {
    **_of_report(
        loss="Mean loss.",
        kl="KL estimate to the reference, nats per token.",
        old_kl="KL(old || policy), k3 estimate, nats per token: drift of the steps since "
        "`old_logprobs`.",
        sampler_kl="KL(sampler || policy), k3 estimate, nats per token.",
        teacher_kl="KL(policy || teacher) over the teacher's likeliest tokens and all others as "
        "one, nats per token.",
        teacher_mass="Mass of the teacher's likeliest tokens by the teacher, mean.",
        policy_mass="Their mass by the policy, mean.",
        value_loss="Loss of the value head, without its coefficient.",
        value_mean="Mean value of counted tokens.",
        return_mean="Mean return of counted tokens.",
        explained_variance="1 - Var(return - value) / Var(return): near 1 a critic that knows, 0 "
        "and below one that a constant replaces.",
        value_clip_fraction="Share of tokens whose value the clip holds.",
        sampler_gap_mean="Log-prob minus the sampler's, signed mean, nats.",
        sampler_gap_abs_mean="Mean absolute value of that gap, nats.",
        sampler_gap_max="Largest absolute value of that gap, nats.",
        entropy="Mean entropy, nats.",
    ),
    "clip_fraction_low": (_CLIP_FRACTION, "low"),
    "clip_fraction_high": (_CLIP_FRACTION, "high"),
    "clip_fraction_dual": (_CLIP_FRACTION, "dual"),
    "clip_fraction_positive": (_CLIP_FRACTION_BY_SIGN, "positive"),
    "clip_fraction_negative": (_CLIP_FRACTION_BY_SIGN, "negative"),
    "ratio_min": (_RATIO_QUANTILE, "0"),
    "ratio_p01": (_RATIO_QUANTILE, "0.01"),
    "ratio_p50": (_RATIO_QUANTILE, "0.5"),
    "ratio_p99": (_RATIO_QUANTILE, "0.99"),
    "ratio_max": (_RATIO_QUANTILE, "1"),
    "response_length_p50": (_LENGTH_QUANTILE, "0.5"),
    "response_length_p90": (_LENGTH_QUANTILE, "0.9"),
    "response_length_p99": (_LENGTH_QUANTILE, "0.99"),
    "response_length_max": (_LENGTH_QUANTILE, "1"),
    **_of_report(
        response_length_mean="Mean response tokens of a rollout.",
        ratio_mean="Mean importance ratio.",
        correction_masked_fraction="Share of tokens that the rollout correction masks.",
        correction_truncated_fraction="Share of tokens whose weight it caps at `high`.",
        correction_weight_mean="Mean of its weights as applied, 0 where masked.",
        correction_ess_fraction="Effective sample size of its weights over the number of tokens.",
        reward_mean="Mean reward of all rollouts as sent.",
        reward_std="Standard deviation of these rewards.",
        reward_min="Least of these rewards.",
        reward_max="Largest of these rewards.",
        advantage_mean="Mean advantage of counted tokens.",
        advantage_std="Standard deviation of these advantages.",
        zero_variance_fraction="Share of groups whose rewards are all equal, dropped or not.",
        truncated_fraction="Share of rollouts marked `truncated`.",
        staleness_mean="Versions between sampling and now, mean over rollouts that name theirs.",
        token_staleness_mean="Versions between sampling and now, mean over response tokens, each "
        "by its version span.",
        staleness_max="Versions between sampling and now, maximum over rollouts.",
        router_aux_loss="If the loss balances experts: mean balance loss of a rollout, summed over "
        "layers, without its coefficient; 1 per layer if load is even.",
        route_mismatch="If rollouts have recorded routes: share, over tokens and layers, that the "
        "policy's own routers would send to other experts.",
        route_conflicts="Tokens packed again because rollouts that share them recorded different "
        "routes.",
        learning_rate="Learning rate of the step.",
        grad_norm="Gradient norm of the step, before clipping.",
        weight_norm="Norm of the trained weights after the step, estimated from a sample.",
        update_norm="Norm of what the step changed of them, estimated from the same sample.",
        step_kl="KL(weights before the step || after), k3 estimate, nats per token; measured only "
        "where the update is unusually large.",
        changed_share="Share of bfloat16 weights whose bits the step changed, if it was asked to "
        "count them.",
        planned_memory_bytes="Planned maximum memory use of a GPU; the planner is wrong if the "
        "peak exceeds it by more than 4% of the GPU.",
    ),
}
ROUTER_MAX_LOAD = _gauge(
    "ratoon_router_max_load_ratio",
    "For models with experts: load of a layer's busiest expert over the mean of its experts, "
    "maximum over layers.",
    POLICY_LABEL,
)
ROUTER_UNUSED_EXPERTS = _gauge(
    "ratoon_router_unused_experts", "Experts that no token visits, over all layers.", POLICY_LABEL
)
ROUTER_ENTROPY = _gauge(
    "ratoon_router_entropy",
    "Mean entropy of a router's probabilities, nats, minimum over layers.",
    POLICY_LABEL,
)

# Gauges of the newest batch, by the figure of its report: an OptimStep, which packs nothing, leaves
# them.
BATCH_GAUGES: Mapping[str, Metric] = {
    "token_reduction": _gauge(
        "ratoon_token_reduction_ratio",
        "Unshared over packed tokens: the saving from shared prefixes. This and all gauges below "
        "it are of the newest batch.",
        POLICY_LABEL,
    ),
    "rank_gap": _gauge(
        "ratoon_rank_gap_ratio",
        "With several devices: modelled excess of the longest rank's share over the mean share; "
        "the other ranks wait for it.",
        POLICY_LABEL,
    ),
    "tokens_per_second": _gauge(
        "ratoon_tokens_per_second", "Unshared tokens per second.", POLICY_LABEL
    ),
    "peak_memory_bytes": _gauge(
        "ratoon_peak_memory_bytes",
        "Largest memory use of a step: of the GPU, else of the worker's process.",
        POLICY_LABEL,
    ),
}
# Gauges of the newest batch's self-check, by the figure of its report; a batch may have none.
SELF_CHECK_GAUGES: Mapping[str, Metric] = {
    "logprob_max_difference": _gauge(
        "ratoon_self_check_logprob_max_difference",
        "Largest log-prob difference of the self-check, if the batch had one, nats.",
        POLICY_LABEL,
    ),
    "logprob_mean_difference": _gauge(
        "ratoon_self_check_logprob_mean_difference",
        "Mean log-prob difference of the self-check, nats.",
        POLICY_LABEL,
    ),
    "gradient_difference": _gauge(
        "ratoon_self_check_gradient_difference_ratio",
        "Relative gradient difference of the self-check.",
        POLICY_LABEL,
    ),
    "worst_parameter_difference": _gauge(
        "ratoon_self_check_worst_parameter_difference_ratio",
        "Relative gradient difference of the self-check, of the parameter where it is largest.",
        POLICY_LABEL,
    ),
}


def _declared() -> Iterator[Metric]:
    """All metrics of this module in the order in which they are declared."""
    for value in globals().values():
        if isinstance(value, Metric):
            yield value
        elif value is REPORT_GAUGES:
            yield from (metric for metric, _ in REPORT_GAUGES.values())
        elif value is BATCH_GAUGES or value is SELF_CHECK_GAUGES:
            yield from value.values()


METRICS: tuple[Metric, ...] = tuple({metric.name: metric for metric in _declared()}.values())


class MetricsSink(Protocol):
    """Where a process sends its changes; never waits and never raises."""

    def send(self, changes: Sequence[Change]) -> None: ...


class MetricsTotals:
    """Owns a registry with one collector per declared metric.

    Changes that are sent together are shown together. `send` never waits for a `render` in another
    thread, which applies what was sent meanwhile.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._collectors: dict[str, Counter | Gauge | Histogram] = {
            metric.name: _collector(metric, self._registry) for metric in METRICS
        }
        self._sent: deque[Sequence[Change]] = deque()
        self._lock = threading.Lock()

    def send(self, changes: Sequence[Change]) -> None:
        """Add changes to the totals. Raises `KeyError` for a sample of an undeclared metric."""
        self._sent.append(changes)
        if self._lock.acquire(blocking=False):
            try:
                self._apply()
            finally:
                self._lock.release()

    def render(self) -> bytes:
        """Prometheus text format 0.0.4."""
        with self._lock:
            self._apply()
            return generate_latest(self._registry)

    def _apply(self) -> None:
        while self._sent:
            for change in self._sent.popleft():
                if isinstance(change, Gone):
                    self._forget(change)
                else:
                    self._change(change)

    def _change(self, change: Sample) -> None:
        collector = self._collectors[change.metric]
        if change.value is None:
            collector.remove(*change.labels)
            return
        series = collector.labels(*change.labels) if change.labels else collector
        if isinstance(series, Counter):
            series.inc(change.value)
        elif isinstance(series, Gauge):
            series.set(change.value)
        else:
            series.observe(change.value)

    def _forget(self, gone: Gone) -> None:
        for metric in METRICS:
            if gone.labels.keys() <= {*metric.labels}:
                self._collectors[metric.name].remove_by_labels(dict(gone.labels))


def _collector(metric: Metric, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    match metric.kind:
        case MetricKind.COUNTER:
            return Counter(metric.name, metric.help, metric.labels, registry=registry)
        case MetricKind.GAUGE:
            return Gauge(metric.name, metric.help, metric.labels, registry=registry)
        case MetricKind.HISTOGRAM:
            return Histogram(
                metric.name, metric.help, metric.labels, registry=registry, buckets=_SECONDS
            )
