"""Rows of a result of the step benchmark: who is compared with whom, and how figures are written.

Enters rows of a section, leaves those of a case, ratios between them, and text. Invariant: a ratio
is between two rows of one case, and a row without figures is in none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Cell = dict[str, Row]
NOTHING = "–"
OURS = ("cuda", "reference")
FLASH = "flash"
REPLICATED = "-replicated"
STREAMED = "-waves-of-"
ACTIVATIONS = "activations "
MANY = "many "


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cells of a header and rows; notes stand below."""

    title: str
    columns: list[str]
    num_text_columns: int
    rows: list[list[str]]
    notes: list[str]


def by_case(rows: list[Row]) -> dict[str, Cell]:
    """Rows with figures, by case and `how`."""
    found: dict[str, Cell] = {}
    for row in rows:
        cell = found.setdefault(row["case"], {})
        if "error" not in row:
            cell[row["how"]] = row
    return found


def ours_of(cell: Cell) -> Row | None:
    """Our packed row of a case."""
    return next((cell[how] for how in OURS if how in cell), None)


def streamed_of(cell: Cell) -> Cell:
    """The rows of a case that run in waves."""
    return {how: row for how, row in cell.items() if STREAMED in how}


def replicated_of(cell: Cell) -> Row | None:
    """The fastest replicated row of a case."""
    found = [row for how, row in cell.items() if REPLICATED in how]
    return min(found, key=lambda row: row["seconds"], default=None)


def speedup(cell: Cell) -> float | None:
    """Seconds of the fastest replicated way over ours."""
    mine, other = ours_of(cell), replicated_of(cell)
    return None if mine is None or other is None else other["seconds"] / mine["seconds"]


def unshared_of(cell: Cell) -> Row | None:
    """The replicated row of our own kernel."""
    return next((cell[how + REPLICATED] for how in OURS if how + REPLICATED in cell), None)


def planned_of(cell: Cell) -> Row | None:
    """What the planner runs of our two ways, by whether it shares."""
    mine = ours_of(cell)
    return unshared_of(cell) if mine is not None and not mine["is_shared"] else mine


def planned_speedup(cell: Cell) -> float | None:
    """Seconds of the fastest replicated way over those of what the planner runs.

    Where that is our replicated way itself, of the fastest other one.
    """
    planned = planned_of(cell)
    if planned is None:
        return None
    other = replicated_of({how: row for how, row in cell.items() if row is not planned})
    return None if other is None else other["seconds"] / planned["seconds"]


def errors(rows: list[Row]) -> list[str]:
    """A line for each row without figures."""
    return [
        f"{row['case']}, {row['how']}: {' '.join(row['error'].split())}"
        for row in rows
        if "error" in row
    ]


def over(other: Row | None, mine: Row | None) -> str:
    if other is None or mine is None:
        return NOTHING
    return f"{other['seconds'] / mine['seconds']:.2f}"


def percent(row: Row, name: str, digits: int) -> str:
    return f"{100 * row[name]:.{digits}f}%"


def gib(row: Row, name: str) -> str:
    return f"{row[name]:.1f}" if name in row else NOTHING


def activation_gib(row: Row) -> float | None:
    """Beyond weights and gradients; None where not all gradients were there at the peak.

    A row that does not say whether they were is of waves or micro-batches, which find those of
    the ones before them, or of a group that ran at once, without.
    """
    in_parts = STREAMED in row["how"] or REPLICATED in row["how"]
    return row.get("activation_gib") if row.get("gradients_stay", in_parts) else None


def models_of(rows: list[Row]) -> str:
    """The models of the rows, and the shape where it is one."""
    names = dict.fromkeys(row["model"] for row in rows if "model" in row)
    cases = list(dict.fromkeys(row["case"] for row in rows))
    return ", ".join([*names, *(cases if len(cases) == 1 else [])])


def how_of(row: Row) -> str:
    """A replicated way with its micro-batch, where it has one."""
    cut = row.get("micro_batch_sequences")
    return row["how"] if cut is None else f"{row['how']}, {cut} a micro-batch"


def agreement(rows: list[Row]) -> Iterator[str]:
    worst = [max(row["errors"].values()) for row in rows if "errors" in row]
    if worst:
        yield f"relative errors against replicated, of log-probs and gradients: <= {max(worst):.1e}"


def layers_kept(row: Row) -> str:
    """Layers of each kind of the activation plan; of stages that wait, where theirs differ."""
    kept, waiting = row.get("layers_kept", {}), row.get("layers_waiting", {})
    parts = [" ".join(f"{n} {kind}" for kind, n in layers.items()) for layers in (kept, waiting)]
    is_alike = not waiting or waiting == kept
    return (parts[0] if is_alike else f"{parts[0]}, waiting {parts[1]}") or NOTHING


def update_over_step(row: Row) -> str:
    """Forward, backward and optimizer over a plain forward and backward of the same run."""
    ratio = update_ratio(row)
    return NOTHING if ratio is None else f"{ratio:.2f}"


def update_ratio(row: Row) -> float | None:
    """The same as a number; None where there is no plain step, or a reference is in the forward."""
    if not row.get("step") or row["has_reference"]:
        return None
    return row["update_s"] / row["step"]["seconds"]
