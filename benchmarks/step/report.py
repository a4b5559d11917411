"""Text tables, document section and plot of a step result.

A way without figures shows its reason, a missed target what was reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.document import aligned, markdown_table, write_section
from benchmarks.step.profiles import Kind
from benchmarks.step.rows import by_case, ours_of, targets, unshared_of
from benchmarks.step.run import Row
from benchmarks.step.subjects import STREAMED
from benchmarks.step.tables import tables

BEGIN = "<!-- step results: written by benchmarks/step/main.py -->"
END = "<!-- end of step results -->"

COLORS = {
    "cuda": "#1b7f5c",
    "reference": "#1b7f5c",
    "flash": "#3b6fb6",
    "flex": "#c9a227",
}
REPLICATED_COLOR = "#a34a4a"
KIND_COLORS = {
    Kind.ATTENTION_FORWARD: "#8cc7ae",
    Kind.ATTENTION_BACKWARD: "#1b7f5c",
    Kind.PRODUCTS: "#3b6fb6",
    Kind.HEAD: "#8fb0dd",
    Kind.COMPILED: "#c9a227",
    Kind.EAGER: "#e3cd84",
    Kind.COPIES: "#a34a4a",
    Kind.OPTIMIZER: "#7b5ea7",
}
PHASE_COLORS = {
    "old_logprobs": "#8cc7ae",
    "forward": "#1b7f5c",
    "backward": "#3b6fb6",
    "optimizer": "#c9a227",
}


def format_tables(result: dict[str, Any]) -> str:
    """All tables for a terminal, with provenance and targets."""
    lines = [_provenance(result)]
    for table in tables(result):
        lines += [
            "",
            table.title,
            *aligned([table.columns, *table.rows], table.num_text_columns),
            *table.notes,
        ]
    found = _target_lines(result)
    return "\n".join([*lines, "", *found] if found else lines)


def write_markdown(
    result: dict[str, Any], path: Path, link: str, image: str, missing: Sequence[str]
) -> None:
    """Replaces the section between a document's two markers. Raises `ValueError`.

    `missing` are cases that the result lacks.
    """
    write_section(path, BEGIN, END, _markdown(result, link, image, missing))


def _markdown(
    result: dict[str, Any], link: str, image: str, missing: Sequence[str]
) -> Iterator[str]:
    yield f"\n{_provenance(result)} [Raw samples]({link}).\n"
    if missing:
        yield f"Not measured yet: {', '.join(missing)}.\n"
    if image:
        yield f"![Seconds, memory and speed-ups of the tables below]({image})\n"
    for table in tables(result):
        yield f"### {table.title}\n"
        yield from markdown_table(table.columns, table.rows, table.num_text_columns)
        yield ""
        if table.notes:
            # A leading star would begin a nested list.
            yield from (f"- {note}".replace("*", r"\*") for note in table.notes)
            yield ""
    yield from (f"- {line}" for line in _target_lines(result))


def _provenance(result: dict[str, Any]) -> str:
    versions = result["versions"]
    runs = result["runs"]
    several = f", {len(runs)} runs: each case is of one" if len(runs) > 1 else ""
    digest, _, dirty = result["commit"].partition("-")
    commit = f"{digest[:12]}-dirty" if dirty else digest[:12]
    gemm = max(run["gemm"]["tflops"] for run in runs)
    stale = f" STALE: {result['stale']}." if result.get("stale") else ""
    return (
        f"{result['gpu']}, driver {versions['driver']}, torch {versions['torch']}, commit "
        f"{commit}, gradients in {result['gradient_dtype']}, bf16 GEMM {gemm:.0f} TFLOP/s"
        f"{several}.{stale}"
    )


def _target_lines(result: dict[str, Any]) -> list[str]:
    found = targets(result)
    missed = [
        f"missed: {t.name}: {t.reached:.3f}, not {t.bound:.2f}" for t in found if not t.is_met
    ]
    return [f"{len(found) - len(missed)} of {len(found)} targets met", *missed] if found else []


def plot(result: dict[str, Any], path: Path) -> None:
    """Writes a PNG with one panel per section, one below the other.

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
    """One color per backend, streamed or not, and one for all replicated ways."""
    return COLORS.get(how.partition(STREAMED)[0], REPLICATED_COLOR)


def _measured(rows: list[Row]) -> list[Row]:
    return [row for row in rows if "error" not in row]


def _draw_paper(panel: Any, rows: list[Row]) -> None:
    hows = [row["how"] for row in rows]
    bars = panel.barh(hows, [row["seconds"] for row in rows], color=[color_of(h) for h in hows])
    labels = [f"{row['seconds']:.2f} s, {100 * row['hardware_mfu']:.0f}% MFU" for row in rows]
    panel.bar_label(bars, labels, fontsize=8, padding=3)
    panel.invert_yaxis()
    panel.set_xlabel("forward and backward of the recorded group, seconds")
    panel.margins(x=0.2)


def _draw_profile(panel: Any, rows: list[Row]) -> None:
    names = [f"{row['case']}, {row['how']}" for row in rows]
    left = [0.0] * len(rows)
    for kind, color in KIND_COLORS.items():
        ms = [row["kinds_ms"].get(kind, 0.0) for row in rows]
        panel.barh(names, ms, left=left, color=color, label=kind)
        left = [start + more for start, more in zip(left, ms, strict=True)]
    panel.invert_yaxis()
    panel.set_xlabel("kernels of one step, ms")
    _legend_beside(panel)


def _draw_layers(panel: Any, rows: list[Row]) -> None:
    cases = list(dict.fromkeys(row["case"] for row in rows))
    hows = list(dict.fromkeys(row["how"] for row in rows))
    width = 0.8 / len(hows)
    for index, how in enumerate(hows):
        mine = [row for row in rows if row["how"] == how]
        at = [cases.index(row["case"]) + (index - (len(hows) - 1) / 2) * width for row in mine]
        milliseconds = [1e3 * row["seconds"] for row in mine]
        panel.bar(at, milliseconds, width, color=color_of(how), label=how)
    panel.set_xticks(range(len(cases)), cases)
    panel.set_yscale("log")
    panel.set_xlabel("one layer, forward and backward, P x N")
    panel.set_ylabel("ms")
    panel.legend(frameon=False, fontsize=8)


def _draw_memory(panel: Any, rows: list[Row]) -> None:
    swept = [row for row in rows if "prompt" in row]
    prompts = [row["prompt"] for row in swept]
    panel.plot(prompts, [row["peak_gib"] for row in swept], "o-", color=color_of("cuda"))
    for row in swept:
        at = (row["prompt"], row["peak_gib"])
        panel.annotate(
            f"{row['seconds']:.1f} s", at, (6, -10), textcoords="offset points", fontsize=8
        )
    panel.set_xscale("log", base=2)
    panel.set_xticks(prompts, map(str, prompts))
    panel.margins(x=0.1, y=0.2)
    panel.set_xlabel("prompt tokens of the sweep, seconds of a forward and backward")
    panel.set_ylabel("peak GiB")


def _draw_crossover(panel: Any, rows: list[Row]) -> None:
    lines: dict[int, list[tuple[float, float, float]]] = {}
    for cell in by_case(rows).values():
        mine, alone = ours_of(cell), unshared_of(cell)
        if mine is not None and alone is not None:
            share, ratio = (
                mine["prompt"] / mine["response_tokens"],
                alone["seconds"] / mine["seconds"],
            )
            point = (share, ratio, mine["predicted_speedup"])
            lines.setdefault(mine["responses"], []).append(point)
    for count, points in lines.items():
        share, measured, predicted = zip(*sorted(points), strict=True)
        (line,) = panel.plot(share, measured, "o-", label=f"N = {count}")
        label = f"N = {count}, predicted"
        panel.plot(share, predicted, ":", color=line.get_color(), label=label)
    panel.axhline(1.0, color="#777777", linewidth=0.8, linestyle="--")
    panel.set_xscale("log", base=2)
    panel.set_xlabel("P / R")
    panel.set_ylabel("unshared / shared, one kernel")
    panel.legend(frameon=False, fontsize=8)


def _draw_updates(panel: Any, rows: list[Row]) -> None:
    cases = [row["case"] for row in rows]
    left = [0.0] * len(rows)
    for phase, color in PHASE_COLORS.items():
        seconds = [row[f"{phase}_s"] for row in rows]
        panel.barh(cases, seconds, left=left, color=color, label=phase.replace("_", " "))
        left = [start + more for start, more in zip(left, seconds, strict=True)]
    panel.invert_yaxis()
    panel.set_xlabel("whole update, seconds")
    _legend_beside(panel)


def _legend_beside(panel: Any) -> None:
    """Draws the legend beside the panel, where it covers no bar."""
    panel.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


_PANELS: dict[str, Callable[[Any, list[Row]], None]] = {
    "paper": _draw_paper,
    "profile": _draw_profile,
    "table2": _draw_layers,
    "memory": _draw_memory,
    "crossover": _draw_crossover,
    "updates": _draw_updates,
}
