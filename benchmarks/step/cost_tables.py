"""The tables that hold the planner's costs against the clock: `crossover` and `costs`.

Enters rows of a section, leaves its `Table`. Invariant: what was predicted is of the row, as it was
when it was measured; rates that fit the rows now stand below, beside those in use.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.step.costs_fit import FITTED, fit_rates, is_launch_bound, worst_error
from benchmarks.step.rows import (
    NOTHING,
    Cell,
    Row,
    Table,
    agreement,
    by_case,
    errors,
    models_of,
    ours_of,
    planned_speedup,
    replicated_of,
    unshared_of,
)
from ratoon.model.device_costs import H200_RATES, DeviceRates

_CROSSOVER_NOTE = (
    "shared, and unshared (each rollout whole), are by the same kernel, and so is the prediction "
    "of their ratio; other replicated: by another kernel, where one ran"
)
_PLANNED_NOTE = (
    "planned x replicated: the fastest replicated way over what the planner runs, shared or "
    "unshared as it says; what it leaves unshared is compared with the other kernel alone"
)


def crossover(rows: list[Row]) -> Table:
    cells = [
        line for cell in by_case(rows).values() if (line := _crossover_cells(cell)) is not None
    ]
    return Table(
        title=f"Where sharing pays: {models_of(rows)}",
        columns=[
            *("N", "P", "P / R", "shared ms", "unshared ms", "other replicated ms"),
            *("unshared / shared", "predicted", "planner shares", "planned x replicated"),
        ],
        num_text_columns=0,
        rows=cells,
        notes=[
            *errors(rows),
            *agreement(rows),
            _CROSSOVER_NOTE,
            _PLANNED_NOTE,
        ],
    )


def _crossover_cells(cell: Cell) -> list[str] | None:
    mine, alone = ours_of(cell), unshared_of(cell)
    shape = next(iter(cell.values()), None)
    if shape is None:
        return None
    other = replicated_of({how: row for how, row in cell.items() if row is not alone})
    ratio = planned_speedup(cell)
    return [
        str(shape["responses"]),
        str(shape["prompt"]),
        f"{shape['prompt'] / shape['response_tokens']:.4g}",
        *(NOTHING if w is None else f"{1e3 * w['seconds']:.1f}" for w in (mine, alone, other)),
        _ratio(alone, mine),
        f"{shape['predicted_speedup']:.3f}",
        "yes" if shape["is_shared"] else "no",
        NOTHING if ratio is None else f"{ratio:.3f}",
    ]


def costs(rows: list[Row]) -> Table:
    cells = [
        [
            row["case"] + ("*" if is_launch_bound(row) else ""),
            *(str(row["packed_tokens"]), f"{row['packed_pairs'] / 1e6:.1f}"),
            *(str(row["head_rows"]), str(row["num_stages"])),
            *(f"{1e3 * row[name]:.1f}" for name in ("seconds", "predicted_s")),
            f"{row['predicted_s'] / row['seconds']:.3f}",
        ]
        for row in rows
        if "error" not in row
    ]
    return Table(
        title=f"The planner's costs, forward and backward: {models_of(rows)}",
        columns=[
            *("group, P x N", "packed tokens", "million pairs", "head rows", "stages"),
            *("measured ms", "predicted ms", "predicted / measured"),
        ],
        num_text_columns=1,
        rows=cells,
        notes=[*errors(rows), *_cost_notes(rows)],
    )


def _cost_notes(rows: list[Row]) -> Iterator[str]:
    if any("error" not in row and is_launch_bound(row) for row in rows):
        yield "* bound by the host's launches: no rate is fitted to it, no prediction judged by it"
    fitted = fit_rates(rows)
    if fitted is not None:
        yield f"rates fitted to these rows: {_rates(fitted)}"
        yield (
            "at the fitted rates seconds are a sum over calls, packed tokens, pairs and head rows, "
            f"each linear, to within {100 * worst_error(rows, fitted):.1f}%"
        )
    yield f"rates in use: {_rates(H200_RATES)}"


def _rates(rates: DeviceRates) -> str:
    flops = [name for name in FITTED if name.endswith("_flops")]
    shown = [f"{name.removesuffix('_flops')} {getattr(rates, name) / 1e12:.0f}" for name in flops]
    return (
        f"{', '.join(shown)} TFLOP/s, {rates.memory_bytes / 1e12:.1f} TB/s (not fitted), "
        f"{1e3 * rates.layer_call_s:.2f} ms a layer and stage"
    )


def _ratio(other: Row | None, mine: Row | None) -> str:
    if other is None or mine is None:
        return NOTHING
    return f"{other['seconds'] / mine['seconds']:.3f}"
