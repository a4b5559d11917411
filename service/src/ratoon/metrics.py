"""Every metric of the service, declared once, and the totals that `/metrics` shows.

Labels are bounded: kinds, states, phases, methods, ids of existing policies and their receivers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

POLICY_LABEL = "policy_id"
RECEIVER_LABEL = "receiver_id"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One change: added to a counter, set on a gauge, observed by a histogram."""

    metric: str
    labels: tuple[str, ...]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """Drops every series that has these labels, whatever others it has; of one metric, or of all
    metrics where `metric` is empty."""

    labels: Mapping[str, str]
    metric: str = ""


Change = Sample | Gone


@dataclass(frozen=True, slots=True)
class Metric:
    """`labels` in the order in which `sample` takes their values."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()

    def sample(self, value: float, *labels: str) -> Sample:
        assert len(labels) == len(self.labels), f"{self.name} has labels {self.labels}"
        return Sample(metric=self.name, labels=labels, value=value)

    def newest(self, value: float | None, *labels: str) -> Change:
        """A sample of a figure that exists; no series of one that does not, nor an older value."""
        if value is not None:
            return self.sample(value, *labels)
        return Gone(labels=dict(zip(self.labels, labels, strict=True)), metric=self.name)


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, MetricKind.COUNTER, text, labels)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, MetricKind.GAUGE, text, labels)


OPERATIONS = _counter(
    "ratoon_operations_total", "Journaled operations that entered a state.", "kind", "state"
)
UNSEQUENCED_FORWARDS = _counter(
    "ratoon_unsequenced_forwards_total", "Forwards without a key that entered a state.", "state"
)
TOKENS = _counter(
    "ratoon_tokens_total",
    "Tokens of forward-backwards: unshared (each rollout alone), packed, trained.",
    "count",
)
MICRO_BATCHES = _counter("ratoon_micro_batches_total", "Micro-batches of forward-backwards.")
DROPPED_SEQUENCES = _counter(
    "ratoon_dropped_sequences_total", "Rollouts left out of the loss.", "reason"
)
CLAMPED_TERMS = _counter(
    "ratoon_clamped_terms_total", "Terms of forward-backwards that a clamp held.", "term"
)
SKIPPED_STEPS = _counter("ratoon_skipped_steps_total", "Optimizer steps skipped, by why.", "reason")
REFUSALS = _counter(
    "ratoon_refusals_total",
    "Calls refused: authentication, authorization or an exhausted limit.",
    "reason",
    "key_id",
)
REQUESTS = _counter("ratoon_requests_total", "Requests answered.", "transport", "method", "code")
PHASE_SECONDS = Metric(
    "ratoon_phase_seconds", MetricKind.HISTOGRAM, "Seconds of an operation by phase.", ("phase",)
)
REQUEST_SECONDS = Metric(
    "ratoon_request_seconds",
    MetricKind.HISTOGRAM,
    "Seconds to answer a request.",
    ("transport", "method"),
)
OPEN_OPERATIONS = _gauge(
    "ratoon_open_operations", "Operations that are queued or running.", POLICY_LABEL, "state"
)
POLICY_VERSION = _gauge("ratoon_policy_version", "Version of the weights.", POLICY_LABEL)
PUBLISHED_VERSION = _gauge(
    "ratoon_published_version", "Newest version that can be fetched.", POLICY_LABEL
)
PUBLISH_SECONDS = Metric(
    "ratoon_publish_seconds",
    MetricKind.HISTOGRAM,
    "Seconds from a version's end of step until it can be fetched.",
)
PUBLISH_FAILURES = _counter("ratoon_publish_failures_total", "Versions not published.")
RECEIVER_LAG = _gauge(
    "ratoon_receiver_lag_versions",
    "Newest published version less what the receiver serves.",
    POLICY_LABEL,
    RECEIVER_LABEL,
)
TOKEN_REDUCTION = _gauge(
    "ratoon_token_reduction_ratio", "Replicated over packed tokens, newest batch.", POLICY_LABEL
)
RANK_GAP = _gauge(
    "ratoon_rank_gap_ratio",
    "Longest rank's share of the newest plan over the mean one, less 1.",
    POLICY_LABEL,
)
GRAD_NORM = _gauge("ratoon_grad_norm", "Gradient norm of the newest step.", POLICY_LABEL)
CHANGED_SHARE = _gauge(
    "ratoon_changed_share", "Bfloat16 weights whose bits the newest step changed.", POLICY_LABEL
)
LOSS = _gauge("ratoon_loss", "Loss of the newest batch.", POLICY_LABEL)
CLIP_FRACTION = _gauge(
    "ratoon_clip_fraction", "Tokens that the clip holds, by bound.", POLICY_LABEL, "bound"
)
CLIP_FRACTION_BY_SIGN = _gauge(
    "ratoon_clip_fraction_by_sign",
    "Tokens that the clip holds, by the sign of their advantage.",
    POLICY_LABEL,
    "sign",
)
RATIO_QUANTILE = _gauge(
    "ratoon_ratio_quantile", "Quantiles of the importance ratio.", POLICY_LABEL, "quantile"
)
# The gauge that each figure of a report sets, and its labels after the policy's. A report covers
# the newest batch, or the whole window of an OptimStep; training.proto says what each figure is.
REPORT_GAUGES: Mapping[str, tuple[Metric, tuple[str, ...]]] = {
    "loss": (LOSS, ()),
    "clip_fraction_low": (CLIP_FRACTION, ("low",)),
    "clip_fraction_high": (CLIP_FRACTION, ("high",)),
    "clip_fraction_dual": (CLIP_FRACTION, ("dual",)),
    "clip_fraction_positive": (CLIP_FRACTION_BY_SIGN, ("positive",)),
    "clip_fraction_negative": (CLIP_FRACTION_BY_SIGN, ("negative",)),
    "ratio_min": (RATIO_QUANTILE, ("0",)),
    "ratio_p01": (RATIO_QUANTILE, ("0.01",)),
    "ratio_p50": (RATIO_QUANTILE, ("0.5",)),
    "ratio_p99": (RATIO_QUANTILE, ("0.99",)),
    "ratio_max": (RATIO_QUANTILE, ("1",)),
    **{
        name: (_gauge(f"ratoon_{name}", text, POLICY_LABEL), ())
        for name, text in (
            ("kl", "KL estimate to the reference, nats per token."),
            ("old_kl", "KL estimate of the old policy to this one, nats per token."),
            ("sampler_kl", "KL estimate of the sampler to the policy, nats per token."),
            ("sampler_gap_mean", "Mean of log-prob less the sampler's, nats."),
            ("sampler_gap_abs_mean", "Mean distance of log-prob and the sampler's, nats."),
            ("sampler_gap_max", "Largest distance of log-prob and the sampler's, nats."),
            ("entropy", "Mean entropy, nats."),
            ("router_aux_loss", "Mean balance loss of a rollout's routers, over all layers."),
            ("route_mismatch", "Share of recorded routes that are not the routers' own."),
            ("route_conflicts", "Tokens packed again because recorded routes differ."),
            ("ratio_mean", "Mean importance ratio."),
            ("correction_masked_fraction", "Tokens that the rollout correction masks."),
            ("correction_truncated_fraction", "Tokens whose weight it holds at its bound."),
            ("correction_weight_mean", "Mean weight of the rollout correction."),
            ("correction_ess_fraction", "Effective sample size of its weights over tokens."),
            ("reward_mean", "Mean reward."),
            ("reward_std", "Standard deviation of rewards."),
            ("advantage_mean", "Mean advantage of counted tokens."),
            ("advantage_std", "Standard deviation of advantages of counted tokens."),
            ("zero_variance_fraction", "Groups whose rewards are all equal."),
            ("truncated_fraction", "Rollouts marked truncated."),
            ("response_length_mean", "Mean response length, tokens."),
            ("response_length_max", "Longest response, tokens."),
            ("staleness_mean", "Mean versions since sampling."),
            ("token_staleness_mean", "Mean versions since each response token was sampled."),
            ("staleness_max", "Most versions since sampling."),
        )
    },
}

ROUTER_MAX_LOAD = _gauge(
    "ratoon_router_max_load_ratio",
    "Choices of a layer's busiest expert over the mean, the layer where that is most.",
    POLICY_LABEL,
)
ROUTER_UNUSED_EXPERTS = _gauge(
    "ratoon_router_unused_experts", "Experts that no token visits, of all layers.", POLICY_LABEL
)
ROUTER_ENTROPY = _gauge(
    "ratoon_router_entropy",
    "Mean entropy of a router, nats, the layer where that is least.",
    POLICY_LABEL,
)
TOKEN_RATE = _gauge(
    "ratoon_tokens_per_second", "Replicated tokens per second, newest batch.", POLICY_LABEL
)
PEAK_MEMORY = _gauge("ratoon_peak_memory_bytes", "Most memory that a step has taken.", POLICY_LABEL)
PLANNED_MEMORY = _gauge(
    "ratoon_planned_memory_bytes",
    "Most memory of a GPU that the step was planned to take.",
    POLICY_LABEL,
)
SELF_CHECKS = _counter(
    "ratoon_self_checks_total",
    "Rollouts run packed and alone: within the limits of rounding, or exceeded.",
    "outcome",
)
SELF_CHECK_LOGPROB_MAX = _gauge(
    "ratoon_self_check_logprob_max_difference",
    "Largest log-prob difference in nats, packed against alone, newest self-check.",
    POLICY_LABEL,
)
SELF_CHECK_LOGPROB_MEAN = _gauge(
    "ratoon_self_check_logprob_mean_difference",
    "Mean log-prob difference in nats, packed against alone, newest self-check.",
    POLICY_LABEL,
)
SELF_CHECK_GRADIENT = _gauge(
    "ratoon_self_check_gradient_difference_ratio",
    "Relative gradient difference, packed against alone, newest self-check.",
    POLICY_LABEL,
)
SELF_CHECK_WORST_PARAMETER = _gauge(
    "ratoon_self_check_worst_parameter_difference_ratio",
    "Largest relative gradient difference of a parameter, newest self-check.",
    POLICY_LABEL,
)
CHECKPOINTS = _counter(
    "ratoon_checkpoints_total",
    "Automatic checkpoints written or failed, and any that were unusable.",
    "outcome",
)
RECOVERIES = _counter(
    "ratoon_recoveries_total",
    "Lost workers: replayed, rebased, rolled back or stopped; lost journals: lost or adopted.",
    "outcome",
)
REPLAYED_OPERATIONS = _counter(
    "ratoon_replayed_operations_total", "Operations that a recovery has run again."
)
BACKEND = _gauge(
    "ratoon_backend_info", "The kernel backend in use: 1.", POLICY_LABEL, "op", "backend"
)


def _declared() -> Iterator[Metric]:
    """All metrics of this module in the order in which they are declared."""
    for value in globals().values():
        if isinstance(value, Metric):
            yield value
        elif value is REPORT_GAUGES:
            yield from (metric for metric, _ in REPORT_GAUGES.values())


METRICS: tuple[Metric, ...] = tuple(dict.fromkeys(_declared()))


class MetricsSink(Protocol):
    """Where a process sends its changes; never waits and never raises."""

    def send(self, changes: Sequence[Change]) -> None: ...


class MetricsTotals:
    """Owns a registry with one collector per declared metric."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._collectors: dict[str, Counter | Gauge | Histogram] = {
            metric.name: _collector(metric, self._registry) for metric in METRICS
        }

    def send(self, changes: Sequence[Change]) -> None:
        """Add changes to the totals. Raises `KeyError` for a sample of an undeclared metric."""
        for change in changes:
            if isinstance(change, Gone):
                self._forget(change)
                continue
            collector = self._collectors[change.metric]
            series = collector.labels(*change.labels) if change.labels else collector
            if isinstance(series, Counter):
                series.inc(change.value)
            elif isinstance(series, Gauge):
                series.set(change.value)
            else:
                series.observe(change.value)

    def render(self) -> bytes:
        """Prometheus text format 0.0.4."""
        return generate_latest(self._registry)

    def _forget(self, gone: Gone) -> None:
        for metric in METRICS:
            if gone.metric in ("", metric.name) and gone.labels.keys() <= {*metric.labels}:
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
