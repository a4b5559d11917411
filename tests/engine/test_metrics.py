"""Metrics and logs: totals of all processes, text that Prometheus takes, no local variables."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import structlog
from prometheus_client import generate_latest

from ratoon import metrics
from ratoon.engine.journal.records import JournalState, OperationRecord
from ratoon.engine.policy import telemetry
from ratoon.log import configure_logging, get_logger
from ratoon.metrics import METRICS, POLICY_LABEL, RECEIVER_LABEL, Gone, MetricKind, MetricsTotals
from ratoon.model.spec import FolderBase, ModelInfo
from ratoon.warning_kinds import WarningKind, warn
from ratoon_proto.types import (
    BadRollout,
    BadRolloutReason,
    LoraTuning,
    OperationKind,
    ParallelLayout,
    PhaseSeconds,
    RouterReport,
    SelfCheckReport,
    SkipReason,
    StepReport,
    StepResult,
)
from tests.engine.harness import life_record, policy_spec, trainer_spec

INFO = ModelInfo(
    num_parameters=1,
    num_trainable_parameters=1,
    vocab_size=1,
    max_sequence_tokens=1,
    attention_backend="reference",
)
LORA = LoraTuning(rank=8, alpha=16.0)
LOSS, _ = metrics.REPORT_GAUGES["loss"]


def ended(
    report: StepReport, kind: OperationKind = OperationKind.UPDATE, seq: int = 1, policy: str = "p"
) -> OperationRecord:
    """An applied operation with this report, whose seq is its time."""
    return replace(
        life_record(policy, f"{policy}.{seq}", kind),
        seq=seq,
        state=JournalState.APPLIED,
        result=StepResult(version=1, report=report),
        finished_at=float(seq),
    )


def shown_after(*records: OperationRecord) -> dict[str, float]:
    totals = MetricsTotals()
    for record in records:
        totals.send(telemetry.ended(record))
    return series(totals)


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
                metrics.OPERATIONS.sample(value, "p", "update", "done"),
                LOSS.sample(value, "p"),
                metrics.PHASE_SECONDS.sample(value, "p", "plan"),
                metrics.MICRO_BATCHES.sample(value, "p"),
            ]
        )
    shown = series(totals)
    assert shown['ratoon_operations_total{kind="update",policy_id="p",state="done"}'] == 5
    assert shown['ratoon_loss{policy_id="p"}'] == 3
    assert shown['ratoon_phase_seconds_count{phase="plan",policy_id="p"}'] == 2
    assert shown['ratoon_phase_seconds_sum{phase="plan",policy_id="p"}'] == 5
    assert shown['ratoon_micro_batches_total{policy_id="p"}'] == 5


def test_a_policy_that_is_gone_has_no_series() -> None:
    totals = MetricsTotals()
    totals.send([LOSS.sample(1, "p"), LOSS.sample(2, "q")])
    totals.send([metrics.BACKEND.sample(1, "p", "tree_attention", "reference")])
    totals.send([Gone(labels={POLICY_LABEL: "p"})])
    policies = {name for name in series(totals) if "policy_id" in name}
    assert policies == {'ratoon_loss{policy_id="q"}'}


def test_a_receiver_that_is_gone_leaves_the_others() -> None:
    totals = MetricsTotals()
    totals.send([metrics.RECEIVER_LAG.sample(1, policy, name) for policy in "pq" for name in "ab"])
    totals.send([LOSS.sample(1, "p")])
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
        bad_rollouts=(
            BadRollout(reason=BadRolloutReason.STALE),
            BadRollout(reason=BadRolloutReason.TOKEN),
        ),
        skipped=True,
        skip_reason=SkipReason.NON_FINITE_GRADIENT,
        seconds=PhaseSeconds(forward=1.5),
        warnings=(warn(WarningKind.CLIPPED_MOST, "?"), warn(WarningKind.CLIPPED_MOST, "?")),
    )
    shown = shown_after(ended(report))
    assert shown['ratoon_tokens_total{count="unshared",policy_id="p"}'] == 60
    assert shown['ratoon_tokens_total{count="packed",policy_id="p"}'] == 20
    assert shown['ratoon_tokens_total{count="trained",policy_id="p"}'] == 10
    assert shown['ratoon_token_reduction_ratio{policy_id="p"}'] == 3
    assert shown['ratoon_grad_norm{policy_id="p"}'] == math.inf
    assert shown['ratoon_skipped_steps_total{policy_id="p",reason="non_finite_gradient"}'] == 1
    assert shown['ratoon_dropped_sequences_total{policy_id="p",reason="stale"}'] == 3
    assert shown['ratoon_dropped_sequences_total{policy_id="p",reason="token"}'] == 1
    assert shown['ratoon_warnings_total{kind="clipped_most",policy_id="p"}'] == 2
    assert 'ratoon_kl{policy_id="p"}' not in shown
    assert shown['ratoon_phase_seconds_sum{phase="forward",policy_id="p"}'] == 1.5
    assert 'ratoon_phase_seconds_sum{phase="plan",policy_id="p"}' not in shown
    assert 'ratoon_steps_total{policy_id="p"}' not in shown


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
    "dropped_bad",
    "dropped_stale",
    "dropped_truncated",
    "dropped_zero_variance",
    "zero_advantage_sequences",
    "step_kl_tokens",
    "tokens_outside_mask",
}


def test_routers_are_shown_by_their_worst_layer() -> None:
    routers = (
        RouterReport(layer=0, max_load=1.5, unused_experts=2, entropy=1.25),
        RouterReport(layer=3, max_load=4.5, unused_experts=1, entropy=0.25),
        RouterReport(layer=4, max_load=2.5, unused_experts=0, entropy=0.75),
    )
    shown = shown_after(ended(replace(StepReport(), routers=routers)))
    assert shown['ratoon_router_max_load_ratio{policy_id="p"}'] == 4.5
    assert shown['ratoon_router_unused_experts{policy_id="p"}'] == 3
    assert shown['ratoon_router_entropy{policy_id="p"}'] == 0.25
    dense = shown_after(ended(StepReport()))
    assert not any(name.startswith("ratoon_router") for name in dense)


@pytest.mark.parametrize("kind", [OperationKind.UPDATE, OperationKind.OPTIM_STEP])
def test_every_figure_of_a_report_is_shown(kind: OperationKind) -> None:
    """Red before: of what is watched in training, six figures were metrics."""
    numbers = {
        field.name: 1000.0 + place
        for place, field in enumerate(fields(StepReport))
        if str(field.type).split(" ")[0] in ("float", "int") and field.name not in _ELSEWHERE
    }
    if kind is OperationKind.OPTIM_STEP:
        # Only batches have these figures: a step has packed nothing.
        numbers = {
            name: value
            for name, value in numbers.items()
            if name not in metrics.BATCH_GAUGES and not name.startswith("clamped_")
        }
    shown = set(shown_after(ended(replace(StepReport(), **numbers), kind)).values())
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
    new = StepReport(loss=0.75, clip_fraction_high=0.3)
    after = shown_after(*(ended(old, policy=policy) for policy in "pq"), ended(new, seq=2))
    of_p = {name: value for name, value in after.items() if 'policy_id="p"' in name}
    alone = shown_after(ended(new, seq=2))
    assert {name: of_p[name] for name in _gauge_series("p") if name in of_p} == {
        name: value for name, value in alone.items() if name in _gauge_series("p")
    }
    assert after['ratoon_loss{policy_id="p"}'] == 0.75
    assert after['ratoon_entropy{policy_id="q"}'] == 1.5


def _gauge_series(policy: str) -> set[str]:
    """Names of all series that gauges of a report can have."""
    names = (*metrics.REPORT_GAUGES, *metrics.BATCH_GAUGES)
    whole: dict[str, Any] = dict.fromkeys(names, 1.0)
    differences: dict[str, Any] = dict.fromkeys(metrics.SELF_CHECK_GAUGES, 1.0)
    check = SelfCheckReport(sequence=0, tokens=1, **differences)
    router = RouterReport(layer=0, max_load=1.5, unused_experts=2, entropy=1.25)
    report = replace(StepReport(), **whole, self_check=check, routers=(router,))
    shown = shown_after(ended(report, policy=policy))
    gauges = {metric.name for metric in METRICS if metric.kind is MetricKind.GAUGE}
    return {name for name in shown if name.partition("{")[0] in gauges}


FB, STEP = OperationKind.FORWARD_BACKWARD, OperationKind.OPTIM_STEP


@pytest.mark.parametrize("kinds", [(OperationKind.UPDATE,), (FB, STEP), (STEP, FB), (FB, FB, STEP)])
def test_gauges_of_a_new_engine_are_those_of_the_old_one(kinds: tuple[OperationKind, ...]) -> None:
    """They were gone until the next batch, which may be hours away."""
    records = [
        ended(_report(kind, seq), kind, seq) for seq, kind in enumerate((*kinds, *kinds), start=1)
    ]
    totals = MetricsTotals()
    newest_step = max(r.seq for r in records if r.effect.takes_step)
    newest_batch = max(r.seq for r in records if r.effect.computes_gradients)
    kept = [r for r in records if r.seq in (newest_step, newest_batch)]
    totals.send(telemetry.shown_again("p", kept))
    gauges = {metric.name for metric in METRICS if metric.kind is MetricKind.GAUGE}
    live = {k: v for k, v in shown_after(*records).items() if k.partition("{")[0] in gauges}
    assert series(totals) == live
    assert live['ratoon_report_seq{policy_id="p"}'] == len(records)
    assert live['ratoon_last_step_timestamp_seconds{policy_id="p"}'] == newest_step
    assert live['ratoon_tokens_per_second{policy_id="p"}'] == newest_batch


def _report(kind: OperationKind, seq: int) -> StepReport:
    """A report as an operation of this kind has it, its figures all `seq`."""
    value = float(seq)
    report = StepReport(loss=value, reward_mean=value)
    if kind is not STEP:
        report = replace(report, tokens_per_second=value, token_reduction=value)
    return report if kind is FB else replace(report, grad_norm=value, learning_rate=value)


def test_a_new_batch_leaves_no_norm_of_an_older_step() -> None:
    records = [ended(_report(kind, seq), kind, seq) for seq, kind in ((1, FB), (2, STEP), (3, FB))]
    assert 'ratoon_grad_norm{policy_id="p"}' in shown_after(*records[:2])
    shown = shown_after(*records)
    assert 'ratoon_grad_norm{policy_id="p"}' not in shown
    assert shown['ratoon_last_step_timestamp_seconds{policy_id="p"}'] == 2
    assert shown['ratoon_steps_total{policy_id="p"}'] == 1


def test_a_quantile_and_a_clip_have_the_names_of_what_they_are() -> None:
    report = StepReport(ratio_min=0.5, ratio_p99=1.5, ratio_max=2.5, clip_fraction_dual=0.25)
    shown = shown_after(ended(report))
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
    shown = shown_after(
        *(
            ended(StepReport(self_check=one), kind)
            for kind in (OperationKind.UPDATE, FB, STEP)
            for one in (None, self_check, replace(self_check, exceeds_limits=False))
        )
    )
    assert shown['ratoon_self_checks_total{outcome="exceeded",policy_id="p"}'] == 2
    assert shown['ratoon_self_checks_total{outcome="within",policy_id="p"}'] == 2
    assert shown['ratoon_self_check_logprob_max_difference{policy_id="p"}'] == 0.5
    assert shown['ratoon_self_check_logprob_mean_difference{policy_id="p"}'] == 0.25
    assert 'ratoon_self_check_gradient_difference_ratio{policy_id="p"}' not in shown
    assert math.isnan(shown['ratoon_self_check_worst_parameter_difference_ratio{policy_id="p"}'])
    assert shown['ratoon_phase_seconds_sum{phase="self_check",policy_id="p"}'] == 8


def test_new_totals_start_from_the_journal() -> None:
    totals = MetricsTotals()
    counts = {
        ("p", "update", "applied"): 3,
        ("p", "update", "accepted"): 2,
        ("p", "save_checkpoint", "failed"): 1,
        ("p", "create_policy", "applied"): 1,
        ("gone", "delete_policy", "applied"): 1,
    }
    totals.send(telemetry.journal_counts(counts))
    shown = series(totals)
    assert shown['ratoon_operations_total{kind="update",policy_id="p",state="queued"}'] == 5
    assert shown['ratoon_operations_total{kind="update",policy_id="p",state="done"}'] == 3
    assert (
        shown['ratoon_operations_total{kind="save_checkpoint",policy_id="p",state="failed"}'] == 1
    )
    # The record of a deletion outlives its policy.
    assert shown['ratoon_operations_total{kind="delete_policy",policy_id="",state="done"}'] == 1
    assert not any("gone" in name for name in shown)


def test_a_policy_says_what_it_is_and_counts_from_zero() -> None:
    spec = policy_spec()
    totals = MetricsTotals()
    totals.send(telemetry.policy("p", trainer_spec(spec), None))
    shown = series(totals)
    labels = 'device="cpu",dtype="float32",layout="1 worker",model="",policy_id="p",preset="tiny"'
    assert shown[f'ratoon_policy_info{{{labels},tuning="full"}}'] == 1
    counters = {
        m.name for m in METRICS if m.kind is MetricKind.COUNTER and POLICY_LABEL in m.labels
    }
    zero = {name.partition("{")[0] for name, value in shown.items() if value == 0}
    # Kinds and states of operations are many, and most never are.
    assert counters - zero == {
        "ratoon_operations_total",
        "ratoon_unsequenced_forwards_total",
    }
    folder = replace(spec.model, base=FolderBase(folder="/models/org/qwen"), tuning=LORA)
    two = ParallelLayout(num_workers=2)
    trainer = replace(trainer_spec(spec), model=folder, device="cuda:0", parallel=two)
    info = replace(INFO, shard="weights")
    totals.send([Gone(labels={POLICY_LABEL: "p"}), *telemetry.policy("p", trainer, info)])
    (name,) = (name for name in series(totals) if name.startswith("ratoon_policy_info"))
    for part in ('model="qwen"', 'tuning="lora, rank 8"', 'layout="2 workers, shard weights"'):
        assert part in name


def test_a_scrape_sees_changes_that_were_sent_together_together() -> None:
    """A scrape during a batch's end saw the loss of one batch beside the KL of another."""
    totals = MetricsTotals()
    other = metrics.REPORT_GAUGES["kl"][0]
    with totals._lock:  # A scrape is under way in another thread.
        totals.send([LOSS.sample(1, "p"), other.sample(1, "p")])
        assert b"ratoon_loss{" not in generate_latest(totals._registry)
    assert {name for name in series(totals) if 'policy_id="p"' in name} == {
        'ratoon_loss{policy_id="p"}',
        'ratoon_kl{policy_id="p"}',
    }


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
