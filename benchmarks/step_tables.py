"""The tables of a result of the step benchmark, as cells.

Enters the result file's content, leaves `Table`s. Invariant: nothing is in a cell that the file
does not hold or that does not follow from rows of one case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import step_cost_tables, step_paper_tables
from benchmarks.step_linearity import linear_time
from benchmarks.step_rows import (
    FLASH,
    MANY,
    NOTHING,
    Row,
    Table,
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


def tables(result: dict[str, Any]) -> list[Table]:
    """Of every section that has rows."""
    return [make(result[name]) for name, make in _MAKERS.items() if result[name]]


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
            *(gib(row, name) for name in ("peak_gib", "activation_gib")),
            *(gib(row, name) for name in ("beyond_weights_gib", "predicted_gib")),
            layers_kept(row),
        ]
        for row in rows
        if "error" not in row
    ]
    return Table(
        title=f"Memory: {models_of(rows)}",
        columns=[
            *("P x N", "how", "seconds", "hardware MFU", "peak GiB", "activations GiB"),
            *("beyond weights GiB", "predicted GiB", "layers by what they keep"),
        ],
        num_text_columns=2,
        rows=cells,
        notes=[
            *errors(rows),
            *(["* one run, its first"] if not all(r.get("is_warm", True) for r in rows) else []),
            *_linear_time(rows),
        ],
    )


def _shape(row: Row) -> str:
    """P x N; of a case with several N, that of the row."""
    prompt, _, _ = row["case"].removeprefix(MANY).partition("x")
    return f"{prompt}x{row['responses']}" if row["case"].startswith(MANY) else row["case"]


def _linear_time(rows: list[Row]) -> Iterator[str]:
    fit = linear_time(rows)
    if fit is not None:
        rates = (fit.product_rate, fit.attention_rate)
        products, attention = (f"{rate / 1e12:.0f} TFLOP/s" for rate in rates)
        yield (
            f"packed steps take {fit.constant_s:.2f} s, their products at {products} (those that "
            f"run again too; linear in packed tokens) and attention at {attention}, to within "
            f"{100 * fit.worst:.1f}%"
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
            *("all s", "update / step", "micro-batches", "hardware MFU", "logical MFU"),
            "peak GiB",
        ],
        num_text_columns=2,
        rows=cells,
        notes=errors(rows),
    )


_MAKERS: dict[str, Callable[[list[Row]], Table]] = {
    "paper": step_paper_tables.paper,
    "profile": step_paper_tables.profile,
    "table2": _table2,
    "memory": _memory,
    "crossover": step_cost_tables.crossover,
    "costs": step_cost_tables.costs,
    "updates": _updates,
}
