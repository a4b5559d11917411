"""The benchmark of optimizer states, small and on a CPU: what it trains on, judges and writes."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.optim import main as optimizer_states
from benchmarks.optim import task as optimizer_states_task
from benchmarks.optim.judge import conclusions, judge, targets
from benchmarks.optim.report import BEGIN, END, write_markdown
from benchmarks.optim.run import FULL, NEAREST, SMALL, WITHOUT_MASTERS
from benchmarks.optim.task import Task, best_loss, draw_batches, transitions
from harness import gpu_results
from harness.gpu_results import RESULTS, ROOT

pytestmark = pytest.mark.more

TASK = Task(num_symbols=3, num_groups=4, num_responses=64, prompt_tokens=8, response_tokens=64)
COMMITTED = [path for path in [RESULTS / "optimizer_states.json"] if path.is_file()]


def test_responses_follow_the_source() -> None:
    """16,384 tokens: each of 27 frequencies within four standard deviations of its probability."""
    (batch,) = draw_batches(TASK, 1, 0)
    counts = np.zeros((3, 3, 3))
    for s in range(batch.num_sequences):
        symbols = batch.sequence_tokens(s)[TASK.prompt_tokens - 2 :] - ord("a")
        np.add.at(counts, (symbols[:-2], symbols[1:-1], symbols[2:]), 1)
    assert counts.sum() == 4 * 64 * 64
    total = counts.sum(axis=2, keepdims=True)
    chain = transitions(TASK)
    error = 4 * np.sqrt(chain * (1 - chain) * total) + 1
    assert (np.abs(counts - chain * total) <= error).all()
    assert batch.num_groups == 4
    assert batch.token_weights is not None
    assert (batch.token_weights == 1).all()


def test_a_seed_draws_the_same_batches_and_another_one_others() -> None:
    one, again, other = (draw_batches(SMALL.task, 3, seed) for seed in (1, 1, 2))
    for first, second in zip(one, again, strict=True):
        assert np.array_equal(first.response_tokens, second.response_tokens)
    assert not np.array_equal(one[0].response_tokens, other[0].response_tokens)
    assert not np.array_equal(one[0].response_tokens, one[1].response_tokens)


def test_best_loss_is_the_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    (batch,) = draw_batches(TASK, 1, 0)
    chain = transitions(TASK)
    losses = []
    for s in range(batch.num_sequences):
        symbols = batch.sequence_tokens(s)[TASK.prompt_tokens - 2 :] - ord("a")
        losses.append(-np.log(chain[symbols[:-2], symbols[1:-1], symbols[2:]]).mean())
    assert best_loss(TASK) == pytest.approx(np.mean(losses), abs=0.02)
    monkeypatch.setattr(optimizer_states_task, "_LOGIT_STD", 0.0)
    assert best_loss(TASK) == pytest.approx(math.log(3), rel=1e-12)


def _run(
    states: str, seed: int, losses: list[float], rate: float = 1e-3, cosine: float = 1.0
) -> dict[str, Any]:
    compared = {"cosine": cosine, "error": 1 - cosine}
    return {"learning_rate": rate, "states": states, "seed": seed, "samples": losses} | compared


def _runs(shift: float, control: float = 1.0) -> list[dict[str, Any]]:
    """60 updates; float32 states at 3, 3.2 and 3.4, and the others on two of its seeds."""
    fp32 = {0: 3.0, 1: 3.2, 2: 3.4}
    runs = [_run("fp32", seed, [loss] * 60) for seed, loss in fp32.items()]
    for seed in (0, 1):
        runs.append(_run("bf16_8bit", seed, [fp32[seed] + shift] * 60))
        runs.append(_run(NEAREST, seed, [fp32[seed]] * 20 + [fp32[seed] + control] * 40))
    return runs


def test_verdicts_are_those_computed_by_hand() -> None:
    fp32, narrow, control = judge(_runs(-0.1))
    assert (fp32.states, narrow.states, control.states) == ("fp32", "bf16_8bit", NEAREST)
    assert fp32.last.loss == pytest.approx(3.2)
    assert fp32.spread == pytest.approx(0.2)
    # The seeds that both have, not the means of all.
    assert narrow.last.shift == pytest.approx(-0.1)
    assert narrow.shift_error == pytest.approx(0.0, abs=1e-12)
    assert narrow.last.band == pytest.approx(2 * 0.2 * math.sqrt(1 / 2 + 1 / 3))
    assert [(w.start, w.stop) for w in narrow.windows] == [(i, i + 10) for i in range(0, 60, 10)]
    assert narrow.num_within == 6
    assert narrow.is_within
    # The last 50 updates hold 10 from before the control's rise.
    assert control.last.shift == pytest.approx(0.8)
    assert control.num_within == 2
    assert not control.is_within


@pytest.mark.parametrize(
    ("shift", "control", "met"),
    [(0.3, 1.0, [True, True]), (0.5, 1.0, [False, True]), (-0.5, 0.1, [False, False])],
)
def test_targets_want_narrow_states_within_and_the_control_outside(
    shift: float, control: float, met: list[bool]
) -> None:
    found = targets(judge(_runs(shift, control)))
    assert [target["wanted"].split()[0] for target in found] == ["within", "outside"]
    assert [target["is_met"] for target in found] == met


@pytest.mark.parametrize("cosine", [0.95, 0.85])
def test_at_low_rates_updates_with_masters_are_to_point_where_those_of_float32_do(
    cosine: float,
) -> None:
    """Without masters nothing is asked of them there, neither of losses nor of directions."""
    runs = _runs(0.0)
    for rate in (1e-4, 1e-5, 1e-6):
        for seed in (0, 1):
            runs.append(_run("fp32", seed, [3.0 + seed] * 60, rate))
            runs.append(_run("bf16_split_8bit", seed, [3.0 + seed] * 60, rate, cosine))
            runs.append(_run("bf16_8bit", seed, [9.0] * 60, rate, 0.3))
    found = [t for t in targets(judge(runs)) if t["learning_rate"] < 1e-3]
    assert [t["states"] for t in found] == ["bf16_split_8bit"] * 5
    assert [t["learning_rate"] for t in found] == [1e-4, 1e-5, 1e-5, 1e-6, 1e-6]
    assert [t["is_met"] for t in found if "within" in t["wanted"]] == [True] * 3
    assert [t["is_met"] for t in found if "cosine" in t["wanted"]] == [cosine >= 0.9] * 2
    mean = next(v for v in judge(runs) if v.states == "bf16_split_8bit")
    assert (mean.cosine, mean.error) == (pytest.approx(cosine), pytest.approx(1 - cosine))


def test_one_window_outside_is_one_too_many_of_six() -> None:
    runs = _runs(0.0)
    for run in runs:
        if run["states"] == "bf16_8bit":
            run["samples"][:10] = [9.0] * 10
    _, narrow, _ = judge(runs)
    assert narrow.last.is_within
    assert narrow.num_within == 5
    assert not narrow.is_within


def test_benchmark_writes_a_result_and_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(gpu_results.COMMIT_VARIABLE, "0" * 40)
    path, image, document = (tmp_path / name for name in ("o.json", "o.png", "o.md"))
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter", encoding="utf-8")
    optimizer_states.main(["--out", str(path), "--device", "cpu"])
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result["source_sha256"] == gpu_results.source_sha256()
    assert [(run["seed"], run["learning_rate"], run["states"]) for run in result["runs"]] == [
        *((seed, rate, kind) for seed in (0, 1) for rate in (1e-3, 1e-6) for kind in SMALL.kinds),
        *((2, rate, "fp32") for rate in (1e-3, 1e-6)),
    ]
    assert _problems(result) == []
    first = {(run["seed"], run["samples"][0]) for run in result["runs"]}
    # Runs of one seed begin alike, on the same batch, and those of another otherwise.
    assert len(first) == 3
    for run in result["runs"]:
        assert len(run["samples"]) == SMALL.num_updates
        if run["learning_rate"] == 1e-3:
            assert statistics.mean(run["samples"][-3:]) < 0.9 * run["samples"][0]
        elif run["states"] in WITHOUT_MASTERS:
            assert run["cosine"] < 0.5
            assert run["error"] > 2
        # Gradients are equal, because the weights in the model are; so the masters are equal too.
        if run["states"] == "bf16_split":
            assert (run["cosine"], run["error"]) == (pytest.approx(1, abs=1e-12), 0.0)
    capsys.readouterr()
    arguments = ["--report", str(path), "--plot", str(image), "--markdown", str(document)]
    optimizer_states.main(arguments)
    shown = capsys.readouterr().out
    written = document.read_text(encoding="utf-8")
    for verdict in result["verdicts"]:
        assert f"{verdict['last_loss']:.4f}" in shown
        row = [f"{verdict['learning_rate']:g}", verdict["states"], str(verdict["seeds"])]
        assert " | ".join(["", *row, f"{verdict['last_loss']:.4f} "]).strip() in written
    assert written.startswith("before\n")
    assert written.endswith("after")
    assert "(o.png)" in written
    assert image.stat().st_size > 10_000


def test_plan_is_that_of_the_target() -> None:
    """200 updates of `small`, RL's rates among its own, and enough seeds to speak of noise."""
    assert {1e-6, 1e-5} < set(FULL.learning_rates)
    assert (FULL.preset, FULL.num_updates) == ("small", 200)
    assert FULL.baseline_seeds >= 5
    assert FULL.seeds >= 3


@pytest.mark.parametrize("path", COMMITTED, ids=str)
def test_committed_verdicts_follow_from_their_losses(path: Path) -> None:
    result = json.loads(path.read_text(encoding="utf-8"))
    assert _problems(result) == []
    assert [(run["seed"], run["learning_rate"], run["states"]) for run in result["runs"]] == [
        (seed, *run) for seed in range(FULL.baseline_seeds) for run in FULL.runs(seed)
    ]
    assert {len(run["samples"]) for run in result["runs"]} == {FULL.num_updates}


@pytest.mark.parametrize("path", COMMITTED, ids=str)
def test_document_shows_the_committed_curves(path: Path, tmp_path: Path) -> None:
    document = ROOT / "docs" / "performance.md"
    image = Path("images") / "optimizer_states.png"
    assert (document.parent / image).is_file()
    written = tmp_path / "performance.md"
    written.write_text(document.read_text(encoding="utf-8"), encoding="utf-8")
    link = Path("..") / path.relative_to(ROOT)
    result = json.loads(path.read_text(encoding="utf-8"))
    write_markdown(result, written, link.as_posix(), image.as_posix())
    assert document.read_text(encoding="utf-8") == written.read_text(encoding="utf-8")


def _problems(result: dict[str, Any]) -> list[str]:
    found = conclusions(result["runs"])
    return [f"{field}: not those of the runs" for field in found if result[field] != found[field]]
