"""The figures of the step benchmark as an image.

Enters a result, leaves a PNG with one panel for each section that has figures. Invariant: what is
drawn are the figures of the tables.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]

COLORS = {
    "cuda": "#1b7f5c",
    "reference": "#1b7f5c",
    "flash": "#3b6fb6",
    "flex": "#c9a227",
}
REPLICATED_COLOR = "#a34a4a"


def plot(result: dict[str, Any], path: Path) -> None:
    """Writes the panels one below the other.

    Raises:
        ModuleNotFoundError: matplotlib is not installed (requirements-dev.txt).
        ValueError: No section has figures.
    """
    from matplotlib.figure import Figure

    shown = {name: _measured(result[name]) for name in _PANELS}
    shown = {name: rows for name, rows in shown.items() if rows}
    if not shown:
        raise ValueError("no section has figures to draw")
    figure = Figure(figsize=(9, 3.2 * len(shown)), layout="constrained")
    panels = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
    for panel, (name, rows) in zip(panels, shown.items(), strict=True):
        _PANELS[name](panel, rows)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_axisbelow(True)
    figure.suptitle(f"Whole steps: {result['gpu']}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def color_of(how: str) -> str:
    """One color a way."""
    return COLORS.get(how, REPLICATED_COLOR)


def _measured(rows: list[Row]) -> list[Row]:
    return [row for row in rows if "error" not in row]


def _paper(panel: Any, rows: list[Row]) -> None:
    hows = [row["how"] for row in rows]
    bars = panel.barh(hows, [row["seconds"] for row in rows], color=[color_of(h) for h in hows])
    labels = [f"{row['seconds']:.2f} s, {100 * row['hardware_mfu']:.0f}% MFU" for row in rows]
    panel.bar_label(bars, labels, fontsize=8, padding=3)
    panel.invert_yaxis()
    panel.set_xlabel("forward and backward of the recorded group, seconds")
    panel.margins(x=0.2)


_PANELS: dict[str, Callable[[Any, list[Row]], None]] = {"paper": _paper}
