"""The planner's costs held against the clock: sections `costs` and `crossover`, and the fit."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from benchmarks.step import comparisons as step_comparisons
from benchmarks.step import costs as step_costs
from benchmarks.step import ways as step_ways
from benchmarks.step.comparisons import CROSSOVER
from benchmarks.step.costs import (
    fit_rates,
    fitted_rows,
    is_launch_bound,
    parts_of,
    plan_of,
    predicted_s,
    rates_in_use,
    worst_error,
)
from benchmarks.step.main import SECTIONS
from benchmarks.step.rows import Target, by_case, planned_speedup, targets
from benchmarks.step.run import FULL, SMALL, Run
from benchmarks.step.tables import cost_table, crossover_table
from benchmarks.step.workload import (
    QWEN3_8B,
    TINY,
    CutGroup,
    Group,
    flat_sizes,
    make_batch,
)
from harness.decoder_sizes import uniform_sizes
from ratoon.planner.costs import Work
from ratoon.planner.device_costs import H200_RATES, DeviceRates, device_costs
from ratoon.rollout.packed import Stage

pytestmark = pytest.mark.more

RATES = DeviceRates(
    linear_flops=500e12,
    attention_flops=300e12,
    head_flops=200e12,
    memory_bytes=4.5e12,
    layer_call_s=2e-3,
    link_bytes=math.inf,
    exchange_s=0.0,
)
FLAT = {**flat_sizes(QWEN3_8B), "num_layers": 8}
SIZES = uniform_sizes(**FLAT)


def _rows(section: Any, *wanted: str) -> dict[str, list[dict[str, Any]]]:
    run = Run(
        device=torch.device("cpu"),
        scale=SMALL,
        num_samples=2,
        stop_at=time.monotonic() + 60.0,
        seed=0,
    )
    return dict(section.measure(run, list(wanted) or section.cases(SMALL)))


def _row(case: str, work: Work, stages: tuple[Stage, ...], rates: DeviceRates) -> dict[str, Any]:
    """As section `costs` would have it of a device of these rates."""
    row = {
        "case": case,
        "how": "cuda",
        "model": "Qwen3-8B, 8 layers",
        "sizes": FLAT,
        "parts": [{"work": asdict(work), "stages": [[s.start, s.stop, s.parent] for s in stages]}],
        "packed_tokens": work.tokens,
        "packed_pairs": work.pairs,
        "head_rows": work.rows,
        "num_stages": max(1, len(stages)),
    }
    return {**row, "seconds": predicted_s(row, rates), "predicted_s": predicted_s(row, H200_RATES)}


def _measured(rates: DeviceRates) -> list[dict[str, Any]]:
    stages = (
        Stage(start=0, stop=5000, parent=-1),
        Stage(start=5000, stop=20_000, parent=0),
        Stage(start=20_000, stop=41_000, parent=0),
    )
    work = Work(tokens=41_000, pairs=222_000_000, rows=36_000)
    return [
        _row("paper", work, (), rates),
        _row("streamed", work, stages, rates),
        _row("long", Work(tokens=64_000, pairs=2_040_000_000, rows=4000), (), rates),
        _row("few rows", Work(tokens=20_000, pairs=205_000_000, rows=260), (), rates),
        _row("medium", Work(tokens=9000, pairs=10_500_000, rows=8000), (), rates),
        # Whatever it took, nothing is to follow from it.
        {**_row("tiny", Work(tokens=50, pairs=1000, rows=30), (), rates), "seconds": 1.0},
    ]


def test_costs_run_what_their_cases_say() -> None:
    found = {case: row for case, (row,) in _rows(step_costs).items()}
    assert list(found) == ["12x4", "12x4 by 20", "12x4 replicated"]
    whole, streamed, alone = found.values()
    assert (whole["packed_tokens"], whole["num_stages"]) == (29, 1)
    assert whole["packed_pairs"] == 12 * 13 // 2 + sum(
        12 * n + n * (n + 1) // 2 for n in (5, 3, 7, 2)
    )
    # As planning counts them: of every trained token, though the prompt's last predicts four.
    assert whole["head_rows"] == 5 + 3 + 7 + 2
    assert streamed["packed_tokens"] == 29
    assert streamed["num_stages"] > 2
    stages = [tuple(stage) for part in streamed["parts"] for stage in part["stages"]]
    assert stages[0] == (0, 12, -1)
    assert stages[-1][1] == 29
    assert (alone["packed_tokens"], alone["num_stages"]) == (4 * 12 + 17, 1)
    for row in found.values():
        assert "error" not in row
        assert row["seconds"] == statistics.median(row["samples"]) > 0
        assert DeviceRates(**row["rates"]) == H200_RATES, "a CPU is not in the table"
        assert row["predicted_s"] == predicted_s(row, H200_RATES)


def test_a_row_predicts_what_the_planner_counts_on() -> None:
    shape = CutGroup(group=Group(prompt=12, responses=(5, 3, 7, 2)), budget=20)
    batch = make_batch((shape.group,), TINY.vocab_size, 0)
    (part,) = plan_of(batch, shape).micro_batches
    parts = parts_of(batch, plan_of(batch, shape))
    costs = device_costs(SIZES, RATES)
    expected = costs.streamed(Work(**parts[0]["work"]), part.stages)
    assert predicted_s({"sizes": FLAT, "parts": parts}, RATES) == pytest.approx(expected)
    # Two micro-batches add up.
    twice = {"sizes": FLAT, "parts": parts * 2}
    assert predicted_s(twice, RATES) == pytest.approx(2 * expected)


def test_a_fit_finds_the_rates_that_made_the_seconds() -> None:
    fitted = fit_rates(_measured(RATES))
    assert fitted is not None
    assert asdict(fitted) == pytest.approx(asdict(RATES), rel=1e-6)
    assert fit_rates(_measured(RATES)[2:]) is None, "three rows do not tell four rates apart"


def test_a_result_is_fitted_beside_the_bandwidth_of_its_own_device() -> None:
    slower = replace(RATES, memory_bytes=1e12)
    rows = [{**row, "rates": asdict(slower)} for row in _measured(slower)]
    assert rates_in_use(rows) == slower
    fitted = fit_rates(rows)
    assert fitted is not None
    assert asdict(fitted) == pytest.approx(asdict(slower), rel=1e-6)
    assert any("rates in use: linear 500," in note for note in cost_table(rows).notes)


def test_a_rate_that_would_be_negative_has_no_limit() -> None:
    rows = _measured(replace(RATES, attention_flops=math.inf))
    # Less than nothing for the pairs.
    rows[2]["seconds"] *= 0.9
    fitted = fit_rates(rows)
    assert fitted is not None
    assert fitted.attention_flops == math.inf
    assert 0 < fitted.linear_flops < math.inf


def test_the_target_leaves_out_what_launches_decide() -> None:
    rows = _measured(H200_RATES)
    assert [row["case"] for row in rows if is_launch_bound(row)] == ["tiny"]
    assert len(fitted_rows([*rows, {"case": "x", "how": "cuda", "error": "none"}])) == 5
    rows[0]["seconds"] *= 1.04
    predicted, linear = _cost_targets(rows)
    assert (predicted.bound, predicted.is_met) == (0.05, True)
    assert predicted.reached == pytest.approx(1 - 1 / 1.04)
    assert linear.reached < predicted.reached
    rows[1]["seconds"] *= 1.1
    predicted, _ = _cost_targets(rows)
    assert not predicted.is_met


def test_seconds_are_held_against_the_rates_fitted_to_them() -> None:
    """A device of other rates is as linear as ours; a step off the line is not."""
    rows = _measured(RATES)
    predicted, linear = _cost_targets(rows)
    assert not predicted.is_met
    assert linear.reached == pytest.approx(0, abs=1e-9)
    assert (linear.bound, linear.is_met) == (0.05, True)
    rows[0]["seconds"] *= 1.4
    _, linear = _cost_targets(rows)
    fitted = fit_rates(rows)
    assert fitted is not None
    errors = [abs(predicted_s(row, fitted) / row["seconds"] - 1) for row in rows[:-1]]
    assert linear.reached == max(errors) == worst_error(rows, fitted) > 0.05
    assert not linear.is_met
    assert [target.name for target in _cost_targets(rows[2:])] == [predicted.name], "no fit"


def _cost_targets(rows: list[dict[str, Any]]) -> list[Target]:
    return targets({**{name: [] for name in SECTIONS}, "costs": rows})


def test_crossover_has_the_cost_models_word_beside_the_clocks() -> None:
    found = _rows(CROSSOVER, "2x4", "32x4")
    few, many = (found[case][0] for case in ("2x4", "32x4"))
    assert 1 < few["predicted_speedup"] < many["predicted_speedup"]
    for rows in found.values():
        assert [row["how"] for row in rows] == ["reference", "reference-replicated"]
        assert [row["micro_batch_sequences"] for row in rows[1:]] == [4]
        for row in rows:
            assert row["seconds"] == statistics.median(row["samples"])
        assert len(rows[0]["samples"]) == len(rows[1]["samples"]) >= 2
    # One response is right behind the prompt of 32, the three others pay for the fork.
    costs = step_comparisons.costs_of(TINY, H200_RATES)
    packed = Work(tokens=32 + 4 * 8, pairs=33 * 16 + 4 * (8 * 32 + 36), rows=29)
    expected = costs.packed(packed) + costs.pair * costs.fork * 3 * 8
    assert many["predicted_packed_s"] == pytest.approx(expected)
    alone = Work(tokens=4 * 40, pairs=4 * 40 * 41 // 2, rows=32)
    assert many["predicted_replicated_s"] == pytest.approx(costs.packed(alone))
    assert many["is_shared"]


def test_ways_are_timed_in_turns_each_first_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []

    def timed(work: Any, _device: torch.device) -> float:
        work()
        turns.append(sum(seeded.packed_tokens for seeded in work.args[1]))
        return float(len(turns))

    monkeypatch.setattr(step_ways, "timed", timed)
    monkeypatch.setattr(step_ways, "MAX_ROUNDS", 4)
    (rows,) = _rows(CROSSOVER, "32x4").values()
    shared, alone = 32 + 4 * 8, 4 * 40
    assert turns == [shared, alone, alone, shared] * 2
    assert [row["samples"] for row in rows] == [[1, 4, 5, 8], [2, 3, 6, 7]]
    assert [row["seconds"] for row in rows] == [4.5, 4.5]
    flops = [row["hardware_mfu"] * row["seconds"] for row in rows]
    assert flops[0] == pytest.approx(flops[1]), "a rate is not of the seconds beside it"


def test_crossover_says_where_the_planner_shares_no_more() -> None:
    costs = step_comparisons.costs_of(QWEN3_8B, H200_RATES)
    found = {
        prompt: step_comparisons.predicted(
            costs, make_batch((Group(prompt=prompt, responses=(2048,) * 4),), 1000, 0)
        )
        for prompt in (8, 64)
    }
    assert [row["is_shared"] for row in found.values()] == [False, True]
    for row in found.values():
        assert (row["predicted_speedup"] > 1) == row["is_shared"]
        ratio = row["predicted_replicated_s"] / row["predicted_packed_s"]
        assert row["predicted_speedup"] == ratio


def test_full_crossover_has_cases_on_both_sides_of_the_gate() -> None:
    counts, prompts, length = FULL.crossover
    costs = step_comparisons.costs_of(FULL.crossover_model, H200_RATES)
    shared = {
        prompt: step_comparisons.predicted(
            costs, make_batch((Group(prompt=prompt, responses=(length,) * counts[0]),), 151_936, 0)
        )["is_shared"]
        for prompt in (*prompts[:2], prompts[4])
    }
    assert list(shared.values()) == [False, False, True]


def _way(how: str, seconds: float, *, is_shared: bool) -> dict[str, Any]:
    return {
        "case": "16x4",
        "how": how,
        "model": "tiny",
        "seconds": seconds,
        "prompt": 16,
        "responses": 4,
        "response_tokens": 64,
        "predicted_speedup": 1.01 if is_shared else 0.99,
        "is_shared": is_shared,
    }


@pytest.mark.parametrize(("is_shared", "ratio"), [(True, 0.9), (False, 0.6 / 0.45)])
def test_crossover_is_judged_by_what_the_planner_runs(is_shared: bool, ratio: float) -> None:
    """Shared against the faster replicated way; unshared, which is one, against the other."""
    seconds = {"cuda": 0.5, "cuda-replicated": 0.45, "fa2-replicated": 0.6}
    rows = [_way(how, s, is_shared=is_shared) for how, s in seconds.items()]
    assert planned_speedup(by_case(rows)["16x4"]) == pytest.approx(ratio)
    (target,) = targets({**{name: [] for name in SECTIONS}, "crossover": rows})
    assert target.reached == pytest.approx(ratio)
    (line,) = crossover_table(rows).rows
    assert line[:3] == ["4", "16", "0.25"]
    assert line[3:7] == ["500.0", "450.0", "600.0", "0.900"]
    assert line[8:] == ["yes" if is_shared else "no", f"{ratio:.3f}"]
    # Without the other kernel there is nothing to hold an unshared run against.
    alone = planned_speedup(by_case(rows[:2])["16x4"])
    assert alone == (pytest.approx(0.9) if is_shared else None)
