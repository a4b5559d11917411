"""The table, the targets, the document's section and the plot, from results made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.kernels import attention_report
from benchmarks.kernels.attention_report import targets

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


def test_published_speedups_are_those_of_the_shapes() -> None:
    from benchmarks.kernels.attention import ALL_SHAPES

    assert set(attention_report.TFLOPS_SHAPES) < set(ALL_SHAPES)
    assert set(attention_report.MIN_SPEEDUP_OVER_FLASH) < set(ALL_SHAPES)
    assert len(ALL_SHAPES) == 9
