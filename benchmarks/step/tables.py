"""Renders the tables of a step result.

Cells hold what is in the file, or follows from rows of one case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.step.costs import (
    FITTED,
    fit_rates,
    is_launch_bound,
    rates_in_use,
    worst_error,
)
from benchmarks.step.memory import MANY
from benchmarks.step.rows import (
    FLASH,
    Cell,
    activation_gib,
    by_case,
    ours_of,
    planned_speedup,
    replicated_of,
    unshared_of,
    update_ratio,
)
from benchmarks.step.run import Row
from ratoon.planner.device_costs import DeviceRates

NOTHING = "–"
# Largest relative change from unprofiled to profiled seconds that needs no note.
MAX_CLOCK_DRIFT = 0.03
_ACTIVATIONS_NOTE = (
    "activations: beyond weights and gradients; not known where some gradients were yet to come at "
    "the peak"
)
_CROSSOVER_NOTE = (
    "shared, and unshared (each rollout whole), are by the same kernel, and so is the prediction "
    "of their ratio; other replicated: by another kernel, where one ran"
)
_PLANNED_NOTE = (
    "planned x replicated: the fastest replicated way over what the planner runs, shared or "
    "unshared as it says; what it leaves unshared is compared with the other kernel alone"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Header and rows as text; notes go below."""

    title: str
    columns: list[str]
    num_text_columns: int
    rows: list[list[str]]
    notes: list[str]


def tables(result: dict[str, Any]) -> list[Table]:
    """The tables of all sections with rows; empty tables are left out."""
    made = [make(result[name]) for name, make in _MAKERS if result[name]]
    return [table for table in made if table.rows or table.notes]


def layer_table(rows: list[Row]) -> Table:
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


def memory_table(rows: list[Row]) -> Table:
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
    """P x N; the row's own N if its case has several."""
    prompt, _, _ = row["case"].removeprefix(MANY).partition("x")
    is_many = row["case"].startswith(MANY)
    return f"{MANY}{prompt}x{row['responses']}" if is_many else row["case"]


def update_table(rows: list[Row]) -> Table:
    phases = ("old_logprobs_s", "forward_s", "backward_s", "optimizer_s")
    cells = [
        [
            row["case"],
            row["optimizer_states"],
            *(f"{row[name]:.2f}" for name in phases),
            f"{row['seconds']:.2f}",
            f"{row['on_policy_s']:.2f}" if "on_policy_s" in row else NOTHING,
            _joules(row, "joules"),
            _joules(row, "on_policy_joules"),
            percent(row, "clip_fraction", 1) if "clip_fraction" in row else NOTHING,
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
            *("all s", "on policy s", "all J", "on policy J", "clipped"),
            *("update / step", "micro-batches", "stages", "hardware MFU", "logical MFU"),
            "peak GiB",
        ],
        num_text_columns=2,
        rows=cells,
        notes=errors(rows),
    )


def _joules(row: Row, name: str) -> str:
    return NOTHING if row.get(name) is None else f"{row[name]:.0f}"


def paper_table(rows: list[Row]) -> Table:
    """Variants of the recorded group, in the order of measurement."""
    cells: list[list[str]] = []
    for row in rows:
        cell = by_case(rows)[row["case"]]
        if "error" in row:
            cells.append([row["how"], *[NOTHING] * 8])
            continue
        cells.append(
            [
                how_of(row), layers_kept(row), f"{row['seconds']:.3f}",
                percent(row, "hardware_mfu", 1), percent(row, "logical_mfu", 0),
                gib(row, "peak_gib"),
                over(replicated_of(cell), row), over(cell.get(FLASH), row),
                over(row, ours_of(cell)),
            ]
        )  # fmt: skip
    return Table(
        title=f"Forward and backward of the recorded group: {models_of(rows)}",
        columns=[
            *("how", "layers by what they keep", "seconds", "hardware MFU", "logical MFU"),
            *("peak GiB", "x replicated", "x flash", "over ours"),
        ],
        num_text_columns=2,
        rows=cells,
        notes=[*errors(rows), *agreement(rows)],
    )


def drift_table(rows: list[Row]) -> Table:
    """Distance between the log-probs of two ways, one row per pair."""
    cells = [
        [row["how"], other, *(f"{d[name]:.1e}" for name in ("mean_abs", "max_abs", "k3"))]
        for row in rows
        for other, d in row.get("drift", {}).items()
    ]
    return Table(
        title="How far log-probs of the recorded group are apart, between two ways",
        columns=["way", "against", "mean distance", "greatest", "k3"],
        num_text_columns=2,
        rows=cells,
        notes=[],
    )


def profile_table(rows: list[Row]) -> Table:
    """Milliseconds by kind of kernel, one column per row with figures."""
    shown = [row for row in rows if "error" not in row]
    kinds = list(dict.fromkeys(kind for row in shown for kind in row["kinds_ms"]))
    cells = [[kind, *(f"{row['kinds_ms'][kind]:.1f}" for row in shown)] for kind in kinds]
    idle = [1e3 * (row["profiled_s"] - row["busy_s"]) for row in shown]
    cells += [
        ["nothing runs", *(f"{ms:.1f}" for ms in idle)],
        ["all of it", *(f"{1e3 * row['profiled_s']:.1f}" for row in shown)],
        ["unwatched", *(f"{1e3 * row['seconds']:.1f}" for row in shown)],
        ["share in which nothing runs", *(_gap_share(row) for row in shown)],
        ["kernels", *(f"{row['num_kernels']:.0f}" for row in shown)],
    ]
    return Table(
        title="Where the time goes, milliseconds",
        columns=["", *(_profiled(row) for row in shown)],
        num_text_columns=1,
        rows=cells,
        notes=[*errors(rows), *_clock_drifts(shown)],
    )


def _clock_drifts(rows: list[Row]) -> Iterator[str]:
    """A note per row whose profiled steps took another time than the unprofiled ones."""
    for row in rows:
        change = row["profiled_s"] / row["seconds"] - 1
        if abs(change) > MAX_CLOCK_DRIFT:
            yield (
                f"{_profiled(row)}: {100 * change:+.0f}% from unwatched to profiled, as clocks "
                "change with heat and power: its kernels are not to be compared with others'"
            )


def _gap_share(row: Row) -> str:
    return NOTHING if row["gap_share"] is None else percent(row, "gap_share", 1)


def _profiled(row: Row) -> str:
    """A column's name: the way, after what it ran if that is not a step."""
    what, _, _ = row["case"].rpartition(" ")
    return f"{what}, {row['how']}" if what else row["how"]


def crossover_table(rows: list[Row]) -> Table:
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
        over(alone, mine, digits=3),
        f"{shape['predicted_speedup']:.3f}",
        "yes" if shape["is_shared"] else "no",
        NOTHING if ratio is None else f"{ratio:.3f}",
    ]


def cost_table(rows: list[Row]) -> Table:
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
    yield f"rates in use: {_rates(rates_in_use(rows))}"


def _rates(rates: DeviceRates) -> str:
    flops = [name for name in FITTED if name.endswith("_flops")]
    shown = [f"{name.removesuffix('_flops')} {getattr(rates, name) / 1e12:.0f}" for name in flops]
    return (
        f"{', '.join(shown)} TFLOP/s, {rates.memory_bytes / 1e12:.1f} TB/s (not fitted), "
        f"{1e3 * rates.layer_call_s:.2f} ms a layer and stage"
    )


def errors(rows: list[Row]) -> list[str]:
    """One line per row without figures."""
    return [
        f"{row['case']}, {row['how']}: {' '.join(row['error'].split())}"
        for row in rows
        if "error" in row
    ]


def agreement(rows: list[Row]) -> Iterator[str]:
    worst = [max(row["errors"].values()) for row in rows if "errors" in row]
    if worst:
        yield f"relative errors against replicated, of log-probs and gradients: <= {max(worst):.1e}"


def models_of(rows: list[Row]) -> str:
    """The rows' models, and their shape if there is only one."""
    names = dict.fromkeys(row["model"] for row in rows if "model" in row)
    cases = list(dict.fromkeys(row["case"] for row in rows))
    return ", ".join([*names, *(cases if len(cases) == 1 else [])])


def how_of(row: Row) -> str:
    """The way's name, with its micro-batch if it is replicated."""
    cut = row.get("micro_batch_sequences")
    return row["how"] if cut is None else f"{row['how']}, {cut} a micro-batch"


def over(other: Row | None, mine: Row | None, digits: int = 2) -> str:
    """Ratio of the seconds of `other` to those of `mine`."""
    if other is None or mine is None:
        return NOTHING
    return f"{other['seconds'] / mine['seconds']:.{digits}f}"


def percent(row: Row, name: str, digits: int) -> str:
    return f"{100 * row[name]:.{digits}f}%"


def gib(row: Row, name: str) -> str:
    return f"{row[name]:.1f}" if name in row else NOTHING


def layers_kept(row: Row) -> str:
    """Layers by kind of the activation plan; also of waiting stages, if theirs differ."""
    kept, waiting = row.get("layers_kept", {}), row.get("layers_waiting", {})
    parts = [" ".join(f"{n} {kind}" for kind, n in layers.items()) for layers in (kept, waiting)]
    is_alike = not waiting or waiting == kept
    return (parts[0] if is_alike else f"{parts[0]}, waiting {parts[1]}") or NOTHING


def update_over_step(row: Row) -> str:
    """Seconds of forward, backward and optimizer over a plain step's, of the same run."""
    ratio = update_ratio(row)
    return NOTHING if ratio is None else f"{ratio:.2f}"


_MAKERS: tuple[tuple[str, Callable[[list[Row]], Table]], ...] = (
    ("paper", paper_table),
    ("paper", drift_table),
    ("profile", profile_table),
    ("table2", layer_table),
    ("memory", memory_table),
    ("crossover", crossover_table),
    ("costs", cost_table),
    ("updates", update_table),
)
