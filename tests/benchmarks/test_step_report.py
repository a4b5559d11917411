"""Tables, targets, the document's section and the plot of steps, from results made by hand."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks.step.main import SECTIONS, missing_cases
from benchmarks.step.report import BEGIN, END, write_markdown
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


def test_the_baseline_of_a_case_is_its_fastest_replicated_way() -> None:
    cell = by_case(_result()["crossover"])["64x4"]
    fastest = replicated_of(cell)
    assert fastest is not None
    assert fastest["how"] == "cuda-replicated"
    assert speedup(cell) == pytest.approx(0.9)
    assert speedup({"cuda": cell["cuda"]}) is None


@pytest.mark.parametrize("text", ["", BEGIN, END, f"{END}{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"])
def test_markdown_refuses_markers_that_are_no_pair(tmp_path: Path, text: str) -> None:
    path = tmp_path / "doc.md"
    path.write_text(text)
    with pytest.raises(ValueError, match="markers"):
        write_markdown(_result(), path, "x", "", [])
    assert path.read_text() == text


def test_cases_that_a_result_lacks_are_named() -> None:
    missing = missing_cases(_result())
    assert missing[0] == "`table2 5059x32`"
    assert "`memory 131072x8`" not in missing, "it says why it has no figures"
    assert missing[-1] == "`updates dapo Qwen3-1.7B`"


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
