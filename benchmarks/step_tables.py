"""The tables of a result of the step benchmark, as cells.

Enters the result file's content, leaves `Table`s. Invariant: nothing is in a cell that the file
does not hold or that does not follow from rows of one case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
NOTHING = "–"
OURS = ("cuda", "reference")
REPLICATED = "-replicated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cells of a header and rows; notes stand below."""

    title: str
    columns: list[str]
    num_text_columns: int
    rows: list[list[str]]
    notes: list[str]


def tables(result: dict[str, Any]) -> list[Table]:
    """Of every section that has rows."""
    return [make(result[name]) for name, make in _MAKERS.items() if result[name]]


def by_case(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """Rows with figures, by case and `how`."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        cell = found.setdefault(row["case"], {})
        if "error" not in row:
            cell[row["how"]] = row
    return found


def ours_of(cell: dict[str, Row]) -> Row | None:
    """Our packed row of a case."""
    return next((cell[how] for how in OURS if how in cell), None)


def replicated_of(cell: dict[str, Row]) -> Row | None:
    """The fastest replicated row of a case."""
    found = [row for how, row in cell.items() if how.endswith(REPLICATED)]
    return min(found, key=lambda row: row["seconds"], default=None)


def over(other: Row | None, mine: Row | None) -> str:
    """Seconds of `other` over those of `mine`."""
    if other is None or mine is None:
        return NOTHING
    return f"{other['seconds'] / mine['seconds']:.2f}"


def errors(rows: list[Row]) -> list[str]:
    """A line for each row without figures."""
    return [
        f"{row['case']}, {row['how']}: {' '.join(row['error'].split())}"
        for row in rows
        if "error" in row
    ]


def _paper(rows: list[Row]) -> Table:
    columns = ["how", "seconds", "hardware MFU", "logical MFU", "peak GiB"]
    columns += ["x replicated", "x flash"]
    cells: list[list[str]] = []
    for row in rows:
        cell = by_case(rows)[row["case"]]
        if "error" in row:
            cells.append([row["how"], *[NOTHING] * (len(columns) - 1)])
            continue
        ratios = [over(replicated_of(cell), row), over(cell.get("flash"), row)]
        cells.append([_how(row), *_figures(row), *ratios])
    return Table(
        title=f"Forward and backward of the recorded group, {_models(rows)}",
        columns=columns,
        num_text_columns=1,
        rows=cells,
        notes=[*errors(rows), *_agreement(rows)],
    )


def _models(rows: list[Row]) -> str:
    """The models of the rows, and the shapes where it is one."""
    names = sorted({row["model"] for row in rows if "model" in row})
    cases = sorted({row["case"] for row in rows})
    return ", ".join([*names, *(cases if len(cases) == 1 else [])])


def _how(row: Row) -> str:
    """A replicated way with its micro-batch, where it has one."""
    cut = row.get("micro_batch_sequences")
    return row["how"] if cut is None else f"{row['how']}, {cut} a micro-batch"


def _figures(row: Row) -> Iterator[str]:
    yield f"{row['seconds']:.3f}"
    yield f"{100 * row['hardware_mfu']:.1f}%"
    yield f"{100 * row['logical_mfu']:.0f}%"
    yield f"{row['peak_gib']:.1f}"


def _agreement(rows: list[Row]) -> Iterator[str]:
    worst = [max(row["errors"].values()) for row in rows if "errors" in row]
    if worst:
        yield f"relative errors against replicated, of log-probs and gradients: <= {max(worst):.1e}"


_MAKERS: dict[str, Callable[[list[Row]], Table]] = {"paper": _paper}
