"""The tables of a result of the step benchmark, as cells.

Enters the result file's content, leaves `Table`s. Invariant: nothing is in a cell that the file
does not hold or that does not follow from rows of one case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Cell = dict[str, Row]
NOTHING = "–"
OURS = ("cuda", "reference")
FLASH = "flash"
REPLICATED = "-replicated"
ACTIVATIONS = "activations "


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


def replicated_of(cell: Cell) -> Row | None:
    """The fastest replicated row of a case."""
    found = [row for how, row in cell.items() if REPLICATED in how]
    return min(found, key=lambda row: row["seconds"], default=None)


def speedup(cell: Cell) -> float | None:
    """Seconds of the fastest replicated way over ours."""
    mine, other = ours_of(cell), replicated_of(cell)
    return None if mine is None or other is None else other["seconds"] / mine["seconds"]


def errors(rows: list[Row]) -> list[str]:
    """A line for each row without figures."""
    return [
        f"{row['case']}, {row['how']}: {' '.join(row['error'].split())}"
        for row in rows
        if "error" in row
    ]


def _over(other: Row | None, mine: Row | None) -> str:
    if other is None or mine is None:
        return NOTHING
    return f"{other['seconds'] / mine['seconds']:.2f}"


def _share(row: Row, name: str, digits: int) -> str:
    return f"{100 * row[name]:.{digits}f}%"


def _gib(row: Row, name: str) -> str:
    return f"{row[name]:.1f}" if name in row else NOTHING


def _models(rows: list[Row]) -> str:
    """The models of the rows, and the shape where it is one."""
    names = dict.fromkeys(row["model"] for row in rows if "model" in row)
    cases = list(dict.fromkeys(row["case"] for row in rows))
    return ", ".join([*names, *(cases if len(cases) == 1 else [])])


def _how(row: Row) -> str:
    """A replicated way with its micro-batch, where it has one."""
    cut = row.get("micro_batch_sequences")
    return row["how"] if cut is None else f"{row['how']}, {cut} a micro-batch"


def _agreement(rows: list[Row]) -> Iterator[str]:
    worst = [max(row["errors"].values()) for row in rows if "errors" in row]
    if worst:
        yield f"relative errors against replicated, of log-probs and gradients: <= {max(worst):.1e}"


def _kept(row: Row) -> str:
    """Layers of each kind of the activation plan."""
    return " ".join(f"{n} {kind}" for kind, n in row.get("layers_kept", {}).items()) or NOTHING


def _paper(rows: list[Row]) -> Table:
    cells: list[list[str]] = []
    for row in rows:
        cell = by_case(rows)[row["case"]]
        if "error" in row:
            cells.append([row["how"], *[NOTHING] * 7])
            continue
        cells.append(
            [
                _how(row), _kept(row), f"{row['seconds']:.3f}", _share(row, "hardware_mfu", 1),
                _share(row, "logical_mfu", 0), _gib(row, "peak_gib"),
                _over(replicated_of(cell), row), _over(cell.get(FLASH), row),
            ]
        )  # fmt: skip
    return Table(
        title=f"Forward and backward of the recorded group: {_models(rows)}",
        columns=[
            *("how", "layers by what they keep", "seconds", "hardware MFU", "logical MFU"),
            *("peak GiB", "x replicated", "x flash"),
        ],
        num_text_columns=2,
        rows=cells,
        notes=[*errors(rows), *_agreement(rows)],
    )


def _table2(rows: list[Row]) -> Table:
    cells: list[list[str]] = []
    for case, cell in by_case(rows).items():
        ways = [ours_of(cell), cell.get(FLASH), replicated_of(cell)]
        mine = ways[0]
        cells.append(
            [
                case.replace("x", ", "),
                NOTHING if mine is None else str(mine["packed_tokens"]),
                *(NOTHING if way is None else f"{1e3 * way['seconds']:.1f}" for way in ways),
                NOTHING if mine is None else _share(mine, "hardware_mfu", 1),
                _over(ways[2], mine),
                _over(ways[1], mine),
            ]
        )
    return Table(
        title=f"One decoder layer, forward and backward: {_models(rows)}",
        columns=[
            *("P, N", "packed tokens", "ours ms", "flash ms", "replicated ms", "hardware MFU"),
            *("x replicated", "x flash"),
        ],
        num_text_columns=1,
        rows=cells,
        notes=[*errors(rows), *_agreement(rows)],
    )


def _memory(rows: list[Row]) -> Table:
    cells = [
        [
            row["case"],
            _how(row),
            f"{row['seconds']:.2f}{'' if row.get('is_warm', True) else '*'}",
            _share(row, "hardware_mfu", 1),
            *(_gib(row, name) for name in ("peak_gib", "activation_gib")),
            *(_gib(row, name) for name in ("beyond_weights_gib", "predicted_gib")),
            _kept(row),
        ]
        for row in rows
        if "error" not in row
    ]
    return Table(
        title=f"Memory: {_models(rows)}",
        columns=[
            *("P x N", "how", "seconds", "hardware MFU", "peak GiB", "activations GiB"),
            *("beyond weights GiB", "predicted GiB", "layers by what they keep"),
        ],
        num_text_columns=2,
        rows=cells,
        notes=[
            *errors(rows),
            *(["* one run, its first"] if not all(r.get("is_warm", True) for r in rows) else []),
        ],
    )


def _crossover(rows: list[Row]) -> Table:
    cells: list[list[str]] = []
    for cell in by_case(rows).values():
        mine, other = ours_of(cell), replicated_of(cell)
        shape = mine or other
        if shape is None:
            continue
        cells.append(
            [
                str(shape["responses"]),
                f"{shape['prompt'] / shape['response_tokens']:.4g}",
                *(NOTHING if w is None else f"{1e3 * w['seconds']:.1f}" for w in (mine, other)),
                NOTHING if other is None else other["how"],
                _over(other, mine),
                f"{shape['predicted_speedup']:.2f}",
            ]
        )
    return Table(
        title=f"Where sharing pays: {_models(rows)}",
        columns=[
            *("N", "P / R", "packed ms", "replicated ms", "fastest replicated"),
            *("x replicated", "by the planner's costs"),
        ],
        num_text_columns=0,
        rows=cells,
        notes=[*errors(rows), *_agreement(rows)],
    )


def _updates(rows: list[Row]) -> Table:
    phases = ("old_logprobs_s", "forward_s", "backward_s", "optimizer_s")
    cells = [
        [
            row["case"],
            row["optimizer_states"],
            *(f"{row[name]:.2f}" for name in phases),
            f"{row['seconds']:.2f}",
            update_over_step(row),
            f"{row['num_micro_batches']}",
            _share(row, "hardware_mfu", 1),
            _share(row, "logical_mfu", 0),
            _gib(row, "peak_gib"),
        ]
        for row in rows
        if "error" not in row
    ]
    return Table(
        title="Whole updates",
        columns=[
            *("update", "states", "old log-probs s", "forward s", "backward s", "optimizer s"),
            *("all s", "update / step", "micro-batches", "hardware MFU", "logical MFU"),
            "peak GiB",
        ],
        num_text_columns=2,
        rows=cells,
        notes=errors(rows),
    )


def update_over_step(row: Row) -> str:
    """Forward, backward and optimizer over a plain forward and backward of the same run."""
    ratio = update_ratio(row)
    return NOTHING if ratio is None else f"{ratio:.2f}"


def update_ratio(row: Row) -> float | None:
    """The same as a number; None where there is no plain step, or a reference is in the forward."""
    if not row.get("step") or row["has_reference"]:
        return None
    update_s = row["forward_s"] + row["backward_s"] + row["optimizer_s"]
    return update_s / row["step"]["seconds"]


_MAKERS: dict[str, Callable[[list[Row]], Table]] = {
    "paper": _paper,
    "table2": _table2,
    "memory": _memory,
    "crossover": _crossover,
    "updates": _updates,
}
