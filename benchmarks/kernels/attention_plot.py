"""Plots TFLOP/s per backend and shape.

Only backends that compute each packed token once are drawn, as only their figures count the same
work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.kernels.attention_report import gemm_tflops

COLORS = {
    "cuda": "#1b7f5c",
    "cuda-deterministic": "#8cc7ae",
    "flash": "#3b6fb6",
    "flex": "#c9a227",
}
BAR_WIDTH = 0.2


def plot(result: dict[str, Any], path: Path) -> None:
    """Writes two panels, forward and backward.

    Raises:
        ModuleNotFoundError: matplotlib is not installed (requirements-dev.txt).
    """
    from matplotlib.figure import Figure

    ceiling = gemm_tflops(result)
    shapes = list(dict.fromkeys(row["shape"] for row in result["rows"]))
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    for panel, name, title in zip(
        panels, ("fwd_tflops", "bwd_tflops"), ("forward", "backward"), strict=True
    ):
        for index, (backend, color) in enumerate(COLORS.items()):
            figures = {
                row["shape"]: row[name]
                for row in result["rows"]
                if row["backend"] == backend and "error" not in row
            }
            at = [shapes.index(s) + (index - 1.5) * BAR_WIDTH for s in figures]
            bars = panel.bar(at, list(figures.values()), BAR_WIDTH, color=color, label=backend)
            panel.bar_label(bars, fmt="%.0f", fontsize=7, padding=1)
        panel.axhline(ceiling, color="#777777", linewidth=0.8, linestyle="--")
        panel.text(len(shapes) - 0.5, ceiling, "bf16 GEMM", fontsize=7, ha="right", va="bottom")
        panel.set_ylabel(f"{title}, TFLOP/s")
        panel.set_ylim(0, 1.12 * ceiling)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_axisbelow(True)
        panel.grid(axis="y", color="#dddddd", linewidth=0.6)
    panels[0].legend(
        ncols=len(COLORS), frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.2)
    )
    panels[1].set_xticks(range(len(shapes)), shapes)
    figure.suptitle(f"Tree attention, unmasked work: {result['gpu']}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
