"""The table, the targets, the document's section and the plot, from results made by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernels import attention_report
from benchmarks.kernels.attention_plot import plot
from benchmarks.kernels.attention_report import BEGIN, END, format_table, targets, write_markdown
from harness.gpu_results import ROOT

pytestmark = pytest.mark.more


def _row(shape: str, backend: str, fwd_ms: float, bwd_ms: float, **more: Any) -> dict[str, Any]:
    return {
        "shape": shape,
        "backend": backend,
        "fwd_ms": fwd_ms,
        "bwd_ms": bwd_ms,
        "fwd_tflops": 7000 / fwd_ms,
        "bwd_tflops": 17_500 / bwd_ms,
        "peak_gib": 1.25,
        **more,
    }


def _result(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "commit": "0123456789abcdef-dirty",
        "gpu": "NVIDIA H200",
        "versions": {"driver": "580.1", "torch": "2.11.0", "flash-attn-4": "4.0"},
        "is_one_run": True,
        "runs": [{"gemm": {"tflops": 781.0}}],
        "rows": rows,
    }


ROWS = [
    _row("t1-28-4k", "cuda", 10.0, 30.0, workspace_limit_gib=1.0, forward_workspace_gib=0.0,
         backward_workspace_gib=0.9),
    _row("t1-28-4k", "cuda-deterministic", 10.0, 60.0),
    _row("t1-28-4k", "flash", 12.0, 36.0),
    _row("t1-28-4k", "fa2-replicated", 24.0, 72.0),
    _row("short", "cuda", 1.0, 3.0),
    _row("short", "flash", 2.0, 5.9),
    {"shape": "short", "backend": "flex", "error": "RuntimeError: out\nof memory"},
]  # fmt: skip


def test_targets_are_met_or_missed_by_their_bounds() -> None:
    found = {target.name: target for target in targets(ROWS)}
    assert {name: (t.bound, round(t.reached, 3), t.is_met) for name, t in found.items()} == {
        "t1-28-4k forward TFLOP/s": (670.0, 700.0, True),
        "t1-28-4k backward TFLOP/s": (570.0, 583.333, True),
        "t1-28-4k speed-up over flash": (1.0, 1.2, True),
        "t1-28-4k speed-up over fa2-replicated": (pytest.approx(2.43), 2.4, False),
        "t1-28-4k time of cuda-deterministic over cuda": (1.5, 1.75, False),
        "t1-28-4k workspace GiB of cuda": (1.0, 0.9, True),
        "short speed-up over flash": (2.0, 1.975, False),
    }


def test_table_shows_ratios_reasons_and_misses() -> None:
    text = format_table(_result(ROWS))
    lines = text.splitlines()
    cells = {tuple(line.split()[:2]): line.split()[2:] for line in lines[2:9]}
    assert cells["t1-28-4k", "cuda"] == ["10.00", "30.00", "700", "583", "1.20", "2.40", "1.25"]
    assert cells["t1-28-4k", "fa2-replicated"] == [
        "24.00", "72.00", "292", "243", "0.50", "1.00", "1.25",
    ]  # fmt: skip
    assert cells["short", "cuda"][-3:] == ["1.98", "–", "1.25"]
    assert set(cells["short", "flex"]) == {"–"}
    assert "short, flex: RuntimeError: out of memory" in lines
    assert "4 of 7 targets met" in lines
    assert "missed: short speed-up over flash: 1.98, not 2.00" in lines
    assert "commit 0123456789ab-dirty, bf16 GEMM 781 TFLOP/s." in text
    assert "STALE" not in text
    assert "STALE: kernel changed" in format_table({**_result(ROWS), "stale": "kernel changed"})


def test_joules_have_columns_where_they_were_counted() -> None:
    """7 + 17.5 TFLOP, in 35 ms and by 24.5 joules."""
    first = _row("short", "cuda", 10.0, 30.0, sustained_ms=35.0, joules=24.5)
    lines = format_table(_result([first, *ROWS[4:]])).splitlines()
    assert lines[0].endswith("J / TFLOP")
    assert lines[2].split()[-2:] == ["700", "1.00"]
    assert all(line.split()[-2:] == ["–", "–"] for line in lines[3:6])


def test_markdown_replaces_its_own_section_alone(tmp_path: Path) -> None:
    path = tmp_path / "doc.md"
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_markdown(_result(ROWS), path, "../results/attention.json", "images/a.png")
    once = path.read_text()
    assert once.startswith(f"before\n{BEGIN}\n")
    assert once.endswith(f"{END}\nafter\n")
    assert "old" not in once
    assert "| t1-28-4k | cuda | 10.00 | 30.00 | 700 | 583 | 1.20 | 2.40 | 1.25 |" in once
    assert "(../results/attention.json)" in once
    assert "](images/a.png)" in once
    write_markdown(_result(ROWS), path, "../results/attention.json", "images/a.png")
    assert path.read_text() == once


def test_markdown_appends_its_section_to_a_document_without_one(tmp_path: Path) -> None:
    path = tmp_path / "doc.md"
    path.write_text("# Title\n\nText.\n")
    write_markdown(_result(ROWS), path, "x.json", "")
    once = path.read_text()
    assert once.startswith(f"# Title\n\nText.\n\n## Measured\n\n{BEGIN}\n")
    assert "![" not in once
    write_markdown(_result(ROWS), path, "x.json", "")
    assert path.read_text() == once


@pytest.mark.parametrize("text", [BEGIN, END, f"{END}{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"])
def test_markdown_refuses_markers_that_are_no_pair(tmp_path: Path, text: str) -> None:
    path = tmp_path / "doc.md"
    path.write_text(text)
    with pytest.raises(ValueError, match="markers"):
        write_markdown(_result(ROWS), path, "x", "")
    assert path.read_text() == text


def test_plot_writes_an_image_that_follows_the_figures(tmp_path: Path) -> None:
    plot(_result(ROWS), tmp_path / "a" / "one.png")
    plot(_result([*ROWS[:-2], _row("short", "flash", 12.0, 36.0)]), tmp_path / "two.png")
    one, two = (tmp_path / "a" / "one.png").read_bytes(), (tmp_path / "two.png").read_bytes()
    assert one.startswith(b"\x89PNG")
    assert one != two


def test_report_runs_as_a_file_from_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "attention.json"
    path.write_text(json.dumps(_result(ROWS)))
    (tmp_path / "docs").mkdir()
    document = tmp_path / "docs" / "doc.md"
    document.write_text("# Title\n")
    command = [sys.executable, ROOT / "benchmarks" / "kernels" / "attention.py", "--report", path]
    done = subprocess.run(
        [*command, "--plot", tmp_path / "docs" / "plot.png", "--markdown", document],
        cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert done.stdout == format_table(_result(ROWS)) + "\n"
    assert (tmp_path / "docs" / "plot.png").is_file()
    assert "](plot.png)" in document.read_text()
    assert "](../attention.json)" in document.read_text()


def test_published_speedups_are_those_of_the_shapes() -> None:
    from benchmarks.kernels.attention import ALL_SHAPES

    assert set(attention_report.TFLOPS_SHAPES) < set(ALL_SHAPES)
    assert set(attention_report.MIN_SPEEDUP_OVER_FLASH) < set(ALL_SHAPES)
    assert len(ALL_SHAPES) == 9
