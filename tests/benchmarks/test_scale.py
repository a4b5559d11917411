"""The simulation of many GPUs: what it conserves, what it was given, and the page that shows it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.scale.constants import MODELS, NODE, Values, constants
from benchmarks.scale.groups import Batch, deal, draw, split, turns
from benchmarks.scale.main import COUNTS, row, simulated
from benchmarks.scale.report import BEGIN, END, write_markdown
from benchmarks.scale.simulate import (
    Layout,
    Options,
    all_gather_s,
    all_to_all_bytes,
    between_nodes_s,
    simulate,
    state_bytes,
)
from benchmarks.step.run import FULL

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "cpu" / "scale.json"
PAGE = ROOT / "docs" / "scale.md"
QWEN3_8B, QWEN3_30B, _, QWEN3_235B = MODELS
GPUS = st.sampled_from((1, 2, 4, 8, 16, 64, 512, 4096))
MOST_BYTES = 60_000
CHECKED = settings(max_examples=100, deadline=None)


@cache
def _result() -> dict[str, Any]:
    return json.loads(RESULT.read_text(encoding="utf-8"))


@cache
def _values() -> Values:
    return {one["name"]: one["value"] for one in _result()["constants"]}


def test_parameters_are_those_of_the_models() -> None:
    counts = [round(model.num_parameters / 1e9, 1) for model in MODELS]
    assert counts == [8.2, 30.5, 70.6, 235.1]


def test_the_recorded_group_takes_the_seconds_that_were_measured() -> None:
    step = json.loads((ROOT / "benchmarks/results/h200/step.json").read_text(encoding="utf-8"))
    measured = next(one for one in step["paper"] if one["how"] == "cuda")
    lengths = np.array(FULL.paper.responses)
    batch = Batch(
        tokens_G=np.array([measured["packed_tokens"]], np.float64),
        rows_G=np.array([lengths.sum()], np.float64),
        pairs_G=np.array([measured["packed_pairs"]], np.float64),
    )
    found = simulate(QWEN3_8B, batch, 1, Layout.Z1, _values())
    assert found.phases["compute"] == pytest.approx(measured["seconds"], rel=0.01)


def test_one_gpu_is_the_measure_of_efficiency() -> None:
    for scaling in ("weak", "strong"):
        alone = row(QWEN3_8B, scaling, 1, _values(), 0)
        assert alone["efficiency"] == 1
        for phase in ("status", "again", "waiting", "reduce", "gather"):
            assert alone["phases"][phase] == pytest.approx(0, abs=1e-9)


def test_bytes_of_a_reduction_of_one_and_of_two() -> None:
    sums = 4.0 * QWEN3_8B.num_parameters
    for by_node in (False, True):
        assert all_to_all_bytes(sums, 1, by_node=by_node) == (0, 0)
        assert all_to_all_bytes(sums, 2, by_node=by_node) == (sums / 2, 0)


@CHECKED
@given(GPUS)
def test_a_reduction_sends_all_but_the_own_shard(n: int) -> None:
    flat = all_to_all_bytes(1.0, n, by_node=False)
    assert sum(flat) == pytest.approx((n - 1) / n)
    within, between = all_to_all_bytes(1.0, n, by_node=True)
    # Between nodes a GPU sends its eighth of the node's sums, to each other node its share.
    assert between * NODE == pytest.approx(max(0.0, 1 - NODE / n))
    assert between <= flat[1]
    assert within >= flat[0]


@CHECKED
@given(GPUS, GPUS)
def test_a_gather_takes_longer_over_more_gpus(n: int, other: int) -> None:
    first, second = (
        all_gather_s(1e9, 4, count, _values(), by_node=False) for count in sorted((n, other))
    )
    assert first <= second


@CHECKED
@given(st.sampled_from(MODELS), st.sampled_from(Layout), GPUS, GPUS)
def test_memory_falls_with_gpus_and_from_layout_to_layout(
    model: Any, layout: Layout, n: int, other: int
) -> None:
    more, fewer = (state_bytes(model, layout, count) for count in sorted((n, other)))
    assert more >= fewer
    if n > 1:
        by_layout = [state_bytes(model, one, n) for one in (Layout.Z1, Layout.Z2, Layout.Z3)]
        assert by_layout == sorted(by_layout, reverse=True)


def test_weights_are_sharded_within_a_node_and_sent_between_nodes_once() -> None:
    c = _values()
    sums_and_moments = 6.03125 * QWEN3_8B.num_parameters
    others = [state_bytes(QWEN3_8B, Layout.Z3, n) - sums_and_moments / n for n in (8, 16, 4096)]
    assert others == pytest.approx([others[0]] * 3)
    assert between_nodes_s(1e9, 8, c) == 0
    # Into a GPU comes the eighth of all that its node keeps there, but for its own share.
    assert between_nodes_s(8e12, 64, c) == pytest.approx(
        1e12 * 7 / 8 / (1e9 * c["between"]), rel=0.01
    )
    batch = draw(64, c, 1)
    one, two = (simulate(QWEN3_30B, batch, n, Layout.Z3, c).phases["gather"] for n in (8, 16))
    assert one == 0 < two


@pytest.mark.parametrize(
    ("model", "layout", "wanted"),
    [
        (QWEN3_8B, Layout.Z1, (57, 53, 51)),
        (QWEN3_8B, Layout.Z2, (41, 29, 23)),
        (QWEN3_8B, Layout.Z3, (34, 17, 9)),
        (QWEN3_30B, Layout.Z3, (125, 64, 33)),
    ],
)
def test_memory_of_two_four_and_eight(model: Any, layout: Layout, wanted: tuple[int, ...]) -> None:
    """Reckoned by hand: 2 bytes of weights, 4 of sums, 2 of moments per parameter, two layers."""
    found = [state_bytes(model, layout, n) / 1e9 for n in (2, 4, 8)]
    assert found == pytest.approx(wanted, abs=0.6)


@CHECKED
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=60), st.integers(1, 20))
def test_every_group_is_dealt_once_and_evenly(seconds: list[float], num_ranks: int) -> None:
    ranks = deal(np.array(seconds), num_ranks)
    assert sorted(one for rank in ranks for one in rank) == sorted(seconds)
    assert max(map(sum, ranks)) <= sum(seconds) / num_ranks + max(seconds) + 1e-9
    in_step = float(turns(ranks).sum())
    assert max(map(sum, ranks)) <= in_step + 1e-9
    assert in_step <= sum(seconds) + 1e-9


@CHECKED
@given(st.integers(0, 2**32 - 1), st.floats(500, 60_000))
def test_a_split_repeats_prompts_and_nothing_else(seed: int, most_rows: float) -> None:
    c = _values()
    batch = draw(5, c, seed)
    parts = split(batch, most_rows, c)
    again = parts.num_groups - batch.num_groups
    assert parts.rows_G.sum() == pytest.approx(batch.rows_G.sum())
    assert parts.tokens_G.sum() == pytest.approx(batch.tokens_G.sum() + again * c["prompt"])
    prompt_pairs = c["prompt"] * (c["prompt"] + 1) / 2
    assert parts.pairs_G.sum() == pytest.approx(batch.pairs_G.sum() + again * prompt_pairs)


def test_work_is_conserved_and_phases_add_up() -> None:
    c = _values()
    batch = draw(64, c, 1)
    alone = simulate(QWEN3_235B, batch, 1, Layout.Z1, c)
    for n in (128, 512):
        update = simulate(QWEN3_235B, batch, n, Layout.Z3, c)
        assert update.phases["compute"] * n == pytest.approx(alone.phases["compute"])
        assert min(update.phases.values()) > -1e-9
        assert update.seconds == pytest.approx(sum(update.phases.values()))
        assert update.seconds * n > alone.seconds


def test_remedies_shorten_what_they_are_for() -> None:
    c = _values()
    batch = draw(2048, c, 0)

    def phases(options: Options) -> dict[str, float]:
        return simulate(QWEN3_8B, batch, 512, Layout.Z1, c, options).phases

    plain = phases(Options())
    for options, names in (
        (Options(by_node=True), ("reduce", "gather", "status", "send")),
        (Options(plan_on_ranks=True), ("plan", "send")),
        (Options(overlap=True), ("reduce",)),
    ):
        found = phases(options)
        assert all(found[name] < plain[name] for name in names)
        assert {name for name in plain if found[name] != plain[name]} == set(names)
    few = replace(batch, tokens_G=batch.tokens_G[:8], rows_G=batch.rows_G[:8],
                  pairs_G=batch.pairs_G[:8])  # fmt: skip
    whole, cut = (
        simulate(QWEN3_8B, few, 32, Layout.Z1, c, Options(split=is_split)).seconds
        for is_split in (False, True)
    )
    assert cut < whole


def test_the_result_follows_from_its_own_constants() -> None:
    rows = {(one["model"], one["scaling"], one["gpus"]): one for one in _result()["rows"]}
    assert len(rows) == len(MODELS) * 2 * len(COUNTS)
    for model in MODELS:
        for n in COUNTS[:3]:
            found = row(model, "weak", n, _values(), _result()["seed"])
            assert found == rows[model.size.name, "weak", n]


@pytest.mark.more
def test_the_whole_result_follows_from_its_own_constants() -> None:
    found = simulated(_values(), _result()["seed"])
    assert found == {name: _result()[name] for name in found}


def test_measured_constants_are_still_those_of_their_files() -> None:
    """A file that was measured again, and differs, wants `make bench-scale`."""
    found = {one.name: one.value for one in constants(_result()["planning"])}
    assert found == pytest.approx(dict(_values()), rel=0.1)


def test_the_result_says_what_it_is() -> None:
    result = _result()
    assert result["is_modelled"] is True
    assert {"commit", "versions", "seed", "device"} <= set(result)
    assert len(RESULT.read_bytes()) < MOST_BYTES
    for one in result["constants"]:
        assert one["kind"] in ("measured", "noted", "cited", "default", "assumed")
        assert one["source"].strip()
        assert one["unit"].strip()
    per_group = result["planning"]["plan_ms"]
    # The simulation takes planning to be linear in groups.
    assert max(per_group.values()) < 2 * min(per_group.values())


def test_the_page_shows_the_committed_figures(tmp_path: Path) -> None:
    written = tmp_path / "scale.md"
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    written.write_text(f"{before}{BEGIN}\n{END}{after}", encoding="utf-8")
    write_markdown(_result(), written, "../benchmarks/results/cpu/scale.json")
    assert written.read_text(encoding="utf-8") == text
    assert "**Modelled, not measured**" in text
