"""Metrics and logs: totals of all processes, text that Prometheus takes, no local variables."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
import structlog

from ratoon import metrics
from ratoon.engine.policy import telemetry
from ratoon.log import configure_logging, get_logger
from ratoon.metrics import METRICS, POLICY_LABEL, RECEIVER_LABEL, Gone, MetricKind, MetricsTotals
from ratoon_proto.types import (
    OperationKind,
    PhaseSeconds,
    RouterReport,
    SelfCheckReport,
    SkipReason,
    StepReport,
    StepResult,
)


def series(totals: MetricsTotals) -> dict[str, float]:
    """Values by series, without the `_created` ones."""
    lines = totals.render().decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in pairs if "_created" not in name}


def test_counters_add_gauges_replace_histograms_count() -> None:
    totals = MetricsTotals()
    for value in (2.0, 3.0):
        totals.send(
            [
                metrics.OPERATIONS.sample(value, "update", "done"),
                metrics.LOSS.sample(value, "p"),
                metrics.PHASE_SECONDS.sample(value, "plan"),
                metrics.MICRO_BATCHES.sample(value),
            ]
        )
    shown = series(totals)
    assert shown['ratoon_operations_total{kind="update",state="done"}'] == 5
    assert shown['ratoon_loss{policy_id="p"}'] == 3
    assert shown['ratoon_phase_seconds_count{phase="plan"}'] == 2
    assert shown['ratoon_phase_seconds_sum{phase="plan"}'] == 5
    assert shown["ratoon_micro_batches_total"] == 5


def test_a_policy_that_is_gone_has_no_series() -> None:
    totals = MetricsTotals()
    totals.send([metrics.LOSS.sample(1, "p"), metrics.LOSS.sample(2, "q")])
    totals.send([metrics.BACKEND.sample(1, "p", "tree_attention", "reference")])
    totals.send([Gone(labels={POLICY_LABEL: "p"})])
    policies = {name for name in series(totals) if "policy_id" in name}
    assert policies == {'ratoon_loss{policy_id="q"}'}


def test_a_receiver_that_is_gone_leaves_the_others() -> None:
    totals = MetricsTotals()
    totals.send([metrics.RECEIVER_LAG.sample(1, policy, name) for policy in "pq" for name in "ab"])
    totals.send([metrics.LOSS.sample(1, "p")])
    totals.send([Gone(labels={POLICY_LABEL: "p", RECEIVER_LABEL: "a"})])
    assert {name for name in series(totals) if "policy_id" in name} == {
        'ratoon_receiver_lag_versions{policy_id="p",receiver_id="b"}',
        'ratoon_receiver_lag_versions{policy_id="q",receiver_id="a"}',
        'ratoon_receiver_lag_versions{policy_id="q",receiver_id="b"}',
        'ratoon_loss{policy_id="p"}',
    }


def test_names_follow_the_prometheus_rules() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"ratoon_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)
        assert metric.help.endswith(".")


def test_a_report_becomes_the_samples_of_its_numbers() -> None:
    report = StepReport(
        loss=0.5,
        kl=None,
        grad_norm=math.inf,
        unshared_tokens=60,
        packed_tokens=20,
        trained_tokens=10,
        token_reduction=3.0,
        num_micro_batches=4,
        dropped_stale=2,
        skipped=True,
        skip_reason=SkipReason.NON_FINITE_GRADIENT,
        seconds=PhaseSeconds(forward=1.5),
    )
    totals = MetricsTotals()
    result = StepResult(version=1, report=report)
    totals.send(telemetry.result("p", OperationKind.UPDATE, result))
    shown = series(totals)
    assert shown['ratoon_tokens_total{count="unshared"}'] == 60
    assert shown['ratoon_tokens_total{count="packed"}'] == 20
    assert shown['ratoon_tokens_total{count="trained"}'] == 10
    assert shown['ratoon_token_reduction_ratio{policy_id="p"}'] == 3
    assert shown['ratoon_grad_norm{policy_id="p"}'] == math.inf
    assert shown['ratoon_skipped_steps_total{reason="non_finite_gradient"}'] == 1
    assert shown['ratoon_dropped_sequences_total{reason="stale"}'] == 2
    assert 'ratoon_kl{policy_id="p"}' not in shown
    assert shown['ratoon_phase_seconds_sum{phase="forward"}'] == 1.5
    assert 'ratoon_phase_seconds_sum{phase="plan"}' not in shown


# Numbers of a report that are no gauges of their own: counted, shown otherwise, or of one call.
_ELSEWHERE = {
    "policy_gradient_loss",
    "num_groups",
    "num_sequences",
    "trained_tokens",
    "unshared_tokens",
    "packed_tokens",
    "attention_pair_reduction",
    "num_micro_batches",
    "hardware_mfu",
    "logical_mfu",
    "dropped_stale",
    "dropped_truncated",
    "dropped_zero_variance",
    "zero_advantage_sequences",
}


def test_routers_are_shown_by_their_worst_layer() -> None:
    routers = (
        RouterReport(layer=0, max_load=1.5, unused_experts=2, entropy=1.25),
        RouterReport(layer=3, max_load=4.5, unused_experts=1, entropy=0.25),
        RouterReport(layer=4, max_load=2.5, unused_experts=0, entropy=0.75),
    )
    totals = MetricsTotals()
    report = replace(StepReport(), routers=routers)
    totals.send(telemetry.result("p", OperationKind.UPDATE, StepResult(version=1, report=report)))
    shown = series(totals)
    assert shown['ratoon_router_max_load_ratio{policy_id="p"}'] == 4.5
    assert shown['ratoon_router_unused_experts{policy_id="p"}'] == 3
    assert shown['ratoon_router_entropy{policy_id="p"}'] == 0.25
    dense = MetricsTotals()
    result = StepResult(version=1, report=StepReport())
    dense.send(telemetry.result("p", OperationKind.UPDATE, result))
    assert not any(name.startswith("ratoon_router") for name in series(dense))


@pytest.mark.parametrize("kind", [OperationKind.UPDATE, OperationKind.OPTIM_STEP])
def test_every_figure_of_a_report_is_shown(kind: OperationKind) -> None:
    """Red before: of what is watched in training, six figures were metrics."""
    numbers = {
        field.name: 1000.0 + place
        for place, field in enumerate(fields(StepReport))
        if str(field.type).split(" ")[0] in ("float", "int") and field.name not in _ELSEWHERE
    }
    if kind is OperationKind.OPTIM_STEP:
        # Of batches alone: a step has packed nothing.
        of_batches = (
            *("token_reduction", "tokens_per_second", "peak_memory_bytes"),
            *("planned_memory_bytes", "rank_gap"),
        )
        numbers = {
            name: value
            for name, value in numbers.items()
            if name not in of_batches and not name.startswith("clamped_")
        }
    totals = MetricsTotals()
    report = replace(StepReport(), **numbers)
    totals.send(telemetry.result("p", kind, StepResult(version=1, report=report)))
    shown = set(series(totals).values())
    assert {name for name, value in numbers.items() if value not in shown} == set()


def test_a_figure_that_a_newer_report_has_not_is_shown_no_more() -> None:
    """An entropy, KL or gradient norm of an older batch stood beside figures of the newest one."""
    router = RouterReport(layer=0, max_load=1.5, unused_experts=2, entropy=1.25)
    old = StepReport(
        loss=0.5,
        kl=0.25,
        entropy=1.5,
        clip_fraction_low=0.1,
        clip_fraction_high=0.2,
        token_reduction=3.0,
        tokens_per_second=10.0,
        rank_gap=0.1,
        grad_norm=2.0,
        changed_share=0.3,
        planned_memory_bytes=7,
        routers=(router,),
        self_check=SelfCheckReport(
            sequence=0, tokens=1, logprob_max_difference=0.5, logprob_mean_difference=0.25
        ),
    )
    totals = MetricsTotals()
    for policy in "pq":
        result = StepResult(version=1, report=old)
        totals.send(telemetry.result(policy, OperationKind.UPDATE, result))
    before = set(series(totals))
    result = StepResult(version=1, report=StepReport(loss=0.75, clip_fraction_high=0.3))
    totals.send(telemetry.result("p", OperationKind.UPDATE, result))
    gone = (
        *("kl", "entropy", "token_reduction_ratio", "tokens_per_second", "rank_gap_ratio"),
        *("grad_norm", "changed_share", "planned_memory_bytes", "router_max_load_ratio"),
        *("router_unused_experts", "router_entropy"),
    )
    expected = {f'ratoon_{name}{{policy_id="p"}}' for name in gone}
    # Self-checks have a time of their own, and another policy its own figures.
    assert before - set(series(totals)) == {
        *expected,
        'ratoon_clip_fraction{bound="low",policy_id="p"}',
    }
    assert series(totals)['ratoon_loss{policy_id="p"}'] == 0.75


def test_a_quantile_and_a_clip_have_the_names_of_what_they_are() -> None:
    report = StepReport(ratio_min=0.5, ratio_p99=1.5, ratio_max=2.5, clip_fraction_dual=0.25)
    totals = MetricsTotals()
    totals.send(telemetry.result("p", OperationKind.UPDATE, StepResult(version=1, report=report)))
    shown = series(totals)
    for quantile, value in (("0", 0.5), ("0.99", 1.5), ("1", 2.5)):
        assert shown[f'ratoon_ratio_quantile{{policy_id="p",quantile="{quantile}"}}'] == value
    assert shown['ratoon_clip_fraction{bound="dual",policy_id="p"}'] == 0.25
    assert not any(name.startswith("ratoon_reward_mean") for name in shown)


def test_a_self_check_becomes_gauges_and_a_count() -> None:
    self_check = SelfCheckReport(
        sequence=3,
        tokens=40,
        logprob_max_difference=0.5,
        logprob_mean_difference=0.25,
        gradient_difference=None,
        worst_parameter_difference=math.nan,
        exceeds_limits=True,
        seconds=2.0,
    )
    totals = MetricsTotals()
    for kind in (OperationKind.UPDATE, OperationKind.FORWARD_BACKWARD, OperationKind.OPTIM_STEP):
        for one in (self_check, replace(self_check, exceeds_limits=False), None):
            result = StepResult(version=1, report=StepReport(self_check=one))
            totals.send(telemetry.result("p", kind, result))
    shown = series(totals)
    assert shown['ratoon_self_checks_total{outcome="exceeded"}'] == 2
    assert shown['ratoon_self_checks_total{outcome="within"}'] == 2
    assert shown['ratoon_self_check_logprob_max_difference{policy_id="p"}'] == 0.5
    assert shown['ratoon_self_check_logprob_mean_difference{policy_id="p"}'] == 0.25
    assert 'ratoon_self_check_gradient_difference_ratio{policy_id="p"}' not in shown
    assert math.isnan(shown['ratoon_self_check_worst_parameter_difference_ratio{policy_id="p"}'])
    assert shown['ratoon_phase_seconds_sum{phase="self_check"}'] == 8


def test_new_totals_start_from_the_journal() -> None:
    totals = MetricsTotals()
    counts = {("update", "applied"): 3, ("update", "accepted"): 2, ("save_checkpoint", "failed"): 1}
    totals.send(telemetry.journal_counts(counts))
    shown = series(totals)
    assert shown['ratoon_operations_total{kind="update",state="queued"}'] == 5
    assert shown['ratoon_operations_total{kind="update",state="done"}'] == 3
    assert shown['ratoon_operations_total{kind="save_checkpoint",state="failed"}'] == 1


@pytest.fixture
def _logging_as_before() -> Iterator[None]:
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.mark.usefixtures("_logging_as_before")
def test_a_logged_exception_shows_no_local_variables(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info")
    secret_tokens = [12345678]
    try:
        raise ValueError(f"{len(secret_tokens)} tokens")
    except ValueError:
        get_logger("test").exception("failed", seq=3)
    get_logger("test").debug("not shown")
    lines = capsys.readouterr().err.splitlines()
    event = json.loads(lines[0])
    assert (event["event"], event["seq"], event["component"]) == ("failed", 3, "test")
    assert "12345678" not in lines[0]
    assert len(lines) == 1


def test_an_unknown_log_level_is_refused() -> None:
    with pytest.raises(ValueError, match="log_level"):
        configure_logging("loud")
