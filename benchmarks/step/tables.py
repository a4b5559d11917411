"""The tables of a result of the step benchmark, as cells.

Enters the result file's content, leaves `Table`s. Invariant: nothing is in a cell that the file
does not hold or that does not follow from rows of one case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.step import cost_tables as step_cost_tables
from benchmarks.step import paper_tables as step_paper_tables
from benchmarks.step.rows import (
    FLASH,
    MANY,
    NOTHING,
    Row,
    Table,
    activation_gib,
    agreement,
    by_case,
    errors,
    gib,
    how_of,
    layers_kept,
    models_of,
    ours_of,
    over,
    percent,
    replicated_of,
    update_over_step,
)

_ACTIVATIONS_NOTE = (
    "activations: beyond weights and gradients; not known where some gradients were yet to come at "
    "the peak"
)


def tables(result: dict[str, Any]) -> list[Table]:
    """Of every section that has rows; not those that would be empty."""
    made = [make(result[name]) for name, make in _MAKERS if result[name]]
    return [table for table in made if table.rows or table.notes]


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
                NOTHING if mine is None else percent(mine, "hardware_mfu", 1),
                over(ways[2], mine),
                over(ways[1], mine),
            ]
        )
    return Table(
        title=f"One decoder layer, forward and backward: {models_of(rows)}",
        columns=[
            *("P, N", "packed tokens", "ours ms", "flash ms", "replicated ms", "hardware MFU"),
            *("x replicated", "x flash"),
        ],
        num_text_columns=1,
        rows=cells,
        notes=[*errors(rows), *agreement(rows)],
    )


def _memory(rows: list[Row]) -> Table:
    cells = [
        [
            _shape(row),
            how_of(row),
            f"{row['seconds']:.2f}{'' if row.get('is_warm', True) else '*'}",
            percent(row, "hardware_mfu", 1),
            *(gib(row, name) for name in ("peak_gib", "beyond_weights_gib", "predicted_gib")),
            NOTHING if (activations := activation_gib(row)) is None else f"{activations:.1f}",
            layers_kept(row),
        ]
        for row in rows
        if "error" not in row
    ]
    return Table(
        title=f"Memory: {models_of(rows)}",
        columns=[
            *("P x N", "how", "seconds", "hardware MFU", "peak GiB", "beyond weights GiB"),
            *("predicted GiB", "activations GiB", "layers by what they keep"),
        ],
        num_text_columns=2,
        rows=cells,
        notes=[
            *errors(rows),
            *(["* one run, its first"] if not all(r.get("is_warm", True) for r in rows) else []),
            *([_ACTIVATIONS_NOTE] if any(activation_gib(r) is not None for r in rows) else []),
        ],
    )


def _shape(row: Row) -> str:
    """P x N; of a case with several N, that of the row."""
    prompt, _, _ = row["case"].removeprefix(MANY).partition("x")
    is_many = row["case"].startswith(MANY)
    return f"{MANY}{prompt}x{row['responses']}" if is_many else row["case"]


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
            f"{row['num_stages'] or NOTHING}",
            percent(row, "hardware_mfu", 1),
            percent(row, "logical_mfu", 0),
            gib(row, "peak_gib"),
        ]
        for row in rows
        if "error" not in row
    ]
    return Table(
        title="Whole updates",
        columns=[
            *("update", "states", "old log-probs s", "forward s", "backward s", "optimizer s"),
            *("all s", "update / step", "micro-batches", "stages", "hardware MFU", "logical MFU"),
            "peak GiB",
        ],
        num_text_columns=2,
        rows=cells,
        notes=errors(rows),
    )


_MAKERS: tuple[tuple[str, Callable[[list[Row]], Table]], ...] = (
    ("paper", step_paper_tables.paper),
    ("paper", step_paper_tables.drifts),
    ("profile", step_paper_tables.profile),
    ("table2", _table2),
    ("memory", _memory),
    ("crossover", step_cost_tables.crossover),
    ("costs", step_cost_tables.costs),
    ("updates", _updates),
)
