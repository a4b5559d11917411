"""Tables, targets, the document's section and the plot of steps, from results made by hand."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.step.main import SECTIONS, missing_cases
from benchmarks.step.report import BEGIN, END, color_of, format_tables, plot, write_markdown
from benchmarks.step.rows import by_case, replicated_of, speedup, targets
from benchmarks.step.run import FULL
from benchmarks.step.tables import tables
from benchmarks.step.workload import make_batch, mfu, packed_batch, packed_work, replicated_work
from harness.gpu_results import RESULTS, ROOT

pytestmark = pytest.mark.more

RESULT = RESULTS / "step.json"
COMMITTED = [RESULT] if RESULT.is_file() else []


def _row(case: str, how: str, seconds: float, **more: Any) -> dict[str, Any]:
    return {
        "case": case,
        "how": how,
        "model": "Qwen3-8B",
        "seconds": seconds,
        "hardware_mfu": 2.34 / seconds,
        "logical_mfu": 9.6 / seconds,
        "peak_gib": 100.0,
        "packed_tokens": 41_323,
        "samples": [seconds],
        **more,
    }


def _profiled(case: str, how: str, gap_share: float) -> dict[str, Any]:
    return {
        "case": case,
        "how": how,
        "seconds": 4.0,
        "profiled_s": 4.1,
        "busy_s": 4.1 * (1 - gap_share),
        "gap_share": gap_share,
        "num_kernels": 3000.0,
        "kinds_ms": {"products of weights": 2500.0, "LM head": 280.0},
        "samples": [4.0],
    }


def _shape(prompt: int, predicted: float) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "responses": 4,
        "response_tokens": 1024,
        "predicted_speedup": predicted,
        "is_shared": True,
    }


def _result() -> dict[str, Any]:
    kept = {"predicted_gib": 84.0, "beyond_weights_gib": 80.0, "layers_kept": {"narrow": 36}}
    phases = {"old_logprobs_s": 1.0, "forward_s": 1.25, "backward_s": 3.0, "optimizer_s": 0.5}
    update = {
        **phases,
        "update_s": 4.75,
        "optimizer_states": "bf16_8bit",
        "num_micro_batches": 1,
        "num_stages": 4,
    }
    activations, many = "activations 8192x32", "many 32768x512"
    drift = {"mean_abs": 0.012, "max_abs": 0.25, "k3": 1e-4}
    return {
        "commit": "0123456789abcdef-dirty",
        "gpu": "NVIDIA H200",
        "versions": {"driver": "580.1", "torch": "2.11.0"},
        "gradient_dtype": "bfloat16",
        "runs": [{"gemm": {"tflops": 781.0}}],
        "paper": [
            _row("5059x32", "cuda", 4.0, activation_gib=60.0, **kept),
            _row("5059x32", "fa2-replicated", 16.0, micro_batch_sequences=2, errors={"a": 0.02}),
            _row("5059x32", "flash", 4.8, errors={"a": 0.01}),
            {"case": "5059x32", "how": "flex", "error": "RuntimeError: out\nof memory"},
            _row("5059x32", "cuda-waves-of-8", 4.3),
            _row("5059x32", "cuda-waves-of-4", 4.16, drift={"flash": drift}),
        ],
        "profile": [
            _profiled("5059x32", "cuda", 0.02),
            _profiled("5059x32", "cuda-waves-of-8", 0.05),
            _profiled("update 5059x32", "cuda", 0.04),
        ],
        "table2": [
            _row("8192x16", "cuda", 0.1),
            _row("8192x16", "fa2-replicated", 0.35, micro_batch_sequences=4),
            _row("8192x16", "flash", 0.125),
        ],
        "memory": [
            _row("65536x8", "cuda", 20.0, prompt=65_536, is_warm=False, **kept),
            {"case": "131072x8", "how": "cuda", "prompt": 131_072, "error": "no room"},
            _row(activations, "cuda-waves-of-4", 9.0, activation_gib=8.0),
            _row(activations, "fa2-replicated", 30.0, activation_gib=20.0),
            _row(many, "cuda", 3.0, activation_gib=10.0, gradients_stay=True, responses=8),
            _row(
                many, "cuda-waves-of-8", 60.0,
                activation_gib=12.5, gradients_stay=True, responses=512,
            ),
        ],
        "crossover": [
            _row("64x4", "cuda", 0.5, **_shape(64, 1.01)),
            _row("64x4", "cuda-replicated", 0.45, **_shape(64, 1.01)),
            _row("64x4", "fa2-replicated", 0.6, **_shape(64, 1.01)),
            _row("8192x4", "cuda", 1.0, **_shape(8192, 2.9)),
            _row("8192x4", "cuda-replicated", 3.0, **_shape(8192, 2.9)),
        ],
        "costs": [],
        "updates": [
            _row(
                "grpo Qwen3-8B", "cuda", 6.0,
                step={"seconds": 4.0}, has_reference=False, **update,
            ),
            _row("dapo Qwen3-8B", "cuda", 9.0, step={}, has_reference=False, **update),
        ],
    }  # fmt: skip


def test_a_profile_at_other_clocks_says_so() -> None:
    result = _result()
    result["profile"][2]["profiled_s"] = 3.8
    (note,) = tables(result)[2].notes
    assert note.startswith("update, cuda: ")
    assert "% from unwatched to profiled" in note


def test_targets_are_met_or_missed_by_their_bounds() -> None:
    found = {t.name: (t.bound, round(t.reached, 3), t.is_met) for t in targets(_result())}
    assert found == {
        "paper 5059x32: seconds": (3.9, 4.0, False),
        "paper 5059x32: hardware MFU": (0.6, 0.585, False),
        "paper 5059x32: cuda-waves-of-8 over packed": (1.05, 1.075, False),
        "paper 5059x32: cuda-waves-of-4 over packed": (1.05, 1.04, True),
        "paper: least speed-up over replicated, 5059x32": (1.0, 4.0, True),
        "paper: error of the predicted peak": (0.1, 0.05, True),
        "profile 5059x32: nothing runs": (0.03, 0.02, True),
        "table2: least speed-up over replicated, 8192x16": (1.0, 3.5, True),
        "memory: longest prompt": (131_072, 65_536, False),
        "memory: streamed over replicated, 8192x32": (0.5, 0.4, True),
        "memory: 512 responses over 8": (1.5, 1.25, True),
        "memory: error of the predicted peak": (0.1, 0.05, True),
        "crossover: least speed-up over replicated, 64x4": (1.0, 0.9, False),
        "updates grpo Qwen3-8B: update over step": (1.15, 1.188, False),
    }


def test_peaks_without_their_gradients_are_in_no_ratio() -> None:
    """A packed group that ran at once had 15 GiB of gradients counted that were not there yet."""
    result = _result()
    few, _ = result["memory"][-2:]
    name = "memory: 512 responses over 8"
    assert name in {target.name for target in targets(result)}
    del few["gradients_stay"]
    assert name not in {target.name for target in targets(result)}
    memory = next(table for table in tables(result) if table.title.startswith("Memory"))
    column = memory.columns.index("activations GiB")
    assert [row[column] for row in memory.rows] == ["–", "8.0", "20.0", "–", "12.5"]


def test_tables_show_ratios_of_one_case_and_reasons() -> None:
    paper, drifts, profile, table2, memory, crossover, updates = tables(_result())
    assert profile.columns == ["", "cuda", "cuda-waves-of-8", "update, cuda"]
    assert profile.rows[0] == ["products of weights", *["2500.0"] * 3]
    assert profile.rows[2] == ["nothing runs", "82.0", "205.0", "164.0"]
    assert profile.notes == []
    assert profile.rows[-2][1:] == ["2.0%", "5.0%", "4.0%"]
    assert paper.rows[0][-3:] == ["4.00", "1.20", "1.00"]
    assert paper.rows[1][0] == "fa2-replicated, 2 a micro-batch"
    assert paper.rows[1][-3:] == ["1.00", "0.30", "4.00"]
    assert set(paper.rows[3][1:]) == {"–"}
    assert "5059x32, flex: RuntimeError: out of memory" in paper.notes
    assert any("2.0e-02" in note for note in paper.notes)
    assert table2.rows == [
        ["8192, 16", "41323", "100.0", "125.0", "350.0", "2340.0%", "3.50", "1.25"]
    ]
    assert drifts.rows == [["cuda-waves-of-4", "flash", "1.2e-02", "2.5e-01", "1.0e-04"]]
    assert [row[0] for row in memory.rows][3:] == ["many 32768x8", "many 32768x512"]
    assert [row[2] for row in memory.rows] == ["20.00*", "9.00", "30.00", "3.00", "60.00"]
    assert memory.notes[:2] == ["131072x8, cuda: no room", "* one run, its first"]
    assert crossover.rows[0] == [
        *("4", "64", "0.0625", "500.0", "450.0", "600.0", "0.900", "1.010", "yes", "0.900"),
    ]
    assert [row[11] for row in updates.rows] == ["1.19", "–"]


def test_the_baseline_of_a_case_is_its_fastest_replicated_way() -> None:
    cell = by_case(_result()["crossover"])["64x4"]
    fastest = replicated_of(cell)
    assert fastest is not None
    assert fastest["how"] == "cuda-replicated"
    assert speedup(cell) == pytest.approx(0.9)
    assert speedup({"cuda": cell["cuda"]}) is None


def test_sections_without_rows_have_no_table() -> None:
    result = {**_result(), **{name: [] for name in SECTIONS if name != "table2"}}
    assert [table.title for table in tables(result)] == [
        "One decoder layer, forward and backward: Qwen3-8B, 8192x16"
    ]
    assert "1 of 1 targets met" in format_tables(result)


def test_report_says_what_it_was_measured_on() -> None:
    text = format_tables(_result())
    assert text.startswith("NVIDIA H200, driver 580.1, torch 2.11.0, commit 0123456789ab-dirty, ")
    assert "gradients in bfloat16, bf16 GEMM 781 TFLOP/s." in text
    assert "STALE" not in text
    assert "STALE: kernel changed" in format_tables({**_result(), "stale": "kernel changed"})
    assert "8 of 14 targets met" in text
    assert "missed: paper 5059x32: seconds: 4.000, not 3.90" in text


def test_markdown_replaces_its_own_section_alone(tmp_path: Path) -> None:
    path = tmp_path / "doc.md"
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_markdown(_result(), path, "../step.json", "images/step.png", ["`memory 1x8`"])
    once = path.read_text()
    assert once.startswith(f"before\n{BEGIN}\n")
    assert once.endswith(f"{END}\nafter\n")
    assert "old" not in once.replace("old log-probs", "")
    assert "(../step.json)" in once
    assert "](images/step.png)" in once
    assert "| 8192, 16 | 41323 | 100.0 |" in once
    assert "\n- \\* one run, its first\n" in once
    lines = [line.count("|") for line in once.splitlines() if line.startswith("|")]
    widths = [len(table.columns) for table in tables(_result()) for _ in range(2 + len(table.rows))]
    assert lines == [width + 1 for width in widths], "a cell that breaks its row"
    assert "Not measured yet: `memory 1x8`." in once
    write_markdown(_result(), path, "../step.json", "images/step.png", ["`memory 1x8`"])
    assert path.read_text() == once


@pytest.mark.parametrize("text", ["", BEGIN, END, f"{END}{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"])
def test_markdown_refuses_markers_that_are_no_pair(tmp_path: Path, text: str) -> None:
    path = tmp_path / "doc.md"
    path.write_text(text)
    with pytest.raises(ValueError, match="markers"):
        write_markdown(_result(), path, "x", "", [])
    assert path.read_text() == text


def test_plot_draws_the_sections_that_have_figures(tmp_path: Path) -> None:
    result = _result()
    plot(result, tmp_path / "all.png")
    plot({**result, "updates": []}, tmp_path / "some.png")
    whole, some = ((tmp_path / name).read_bytes() for name in ("all.png", "some.png"))
    assert whole.startswith(b"\x89PNG")
    assert len(some) < len(whole)
    with pytest.raises(ValueError, match="no section"):
        plot({**result, **{name: [] for name in SECTIONS}}, tmp_path / "none.png")


def test_cases_that_a_result_lacks_are_named() -> None:
    missing = missing_cases(_result())
    assert missing[0] == "`table2 5059x32`"
    assert "`memory 131072x8`" not in missing, "it says why it has no figures"
    assert missing[-1] == "`updates dapo Qwen3-1.7B`"


def test_colors_tell_backends_and_replicated_ways() -> None:
    assert color_of("cuda-waves-of-8") == color_of("cuda") != color_of("flash")
    assert color_of("cuda-replicated") == color_of("fa2-replicated") != color_of("cuda")


def test_report_runs_as_a_file_from_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    path.write_text(json.dumps(_result()))
    document = tmp_path / "doc.md"
    document.write_text(f"{BEGIN}\n{END}\n")
    command = [sys.executable, ROOT / "benchmarks" / "step" / "main.py", "--report", path]
    done = subprocess.run(
        [*command, "--plot", tmp_path / "plot.png", "--markdown", document],
        cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert done.stdout == format_tables(_result()) + "\n"
    assert "](plot.png)" in document.read_text()


def test_the_document_has_its_place_for_the_tables() -> None:
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1


@pytest.mark.parametrize("path", COMMITTED, ids=str)
def test_committed_figures_follow_from_their_samples(path: Path) -> None:
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result["gradient_dtype"] == "bfloat16"
    for section in SECTIONS:
        measured_in = [case for run in result["runs"] for case in run["cases"][section]]
        assert len(measured_in) == len(set(measured_in)), "a case is of several runs"
        assert {row["case"] for row in result[section]} == set(measured_in)
        for row in result[section]:
            if "error" in row:
                assert row["error"].strip()
            else:
                assert row["seconds"] == pytest.approx(statistics.median(row["samples"]))
    batch = make_batch((FULL.paper,), FULL.model.vocab_size, result["seed"])
    work, replicated = packed_work(packed_batch(batch)), replicated_work(batch)
    for row in result["paper"]:
        if "error" not in row:
            assert row["hardware_mfu"] == pytest.approx(mfu(FULL.model, work, row["seconds"]))
            assert row["logical_mfu"] == pytest.approx(mfu(FULL.model, replicated, row["seconds"]))


@pytest.mark.parametrize("path", COMMITTED, ids=str)
def test_document_shows_the_committed_figures(path: Path, tmp_path: Path) -> None:
    document = ROOT / "docs" / "performance.md"
    image = Path("images") / "step.png"
    assert (document.parent / image).is_file()
    written = tmp_path / "performance.md"
    written.write_text(document.read_text(encoding="utf-8"), encoding="utf-8")
    link = Path("..") / path.relative_to(ROOT)
    result = json.loads(path.read_text(encoding="utf-8"))
    missing = missing_cases(result)
    write_markdown(result, written, link.as_posix(), image.as_posix(), missing)
    assert document.read_text(encoding="utf-8") == written.read_text(encoding="utf-8")
