"""The tables of the recorded group: the ways to run it, and where the time of ours goes.

Enters the rows of `paper` or `profile`, leaves a `Table`. Invariant: as of `step_tables`.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.step.rows import (
    FLASH,
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
)

# Of profiled seconds against those without a profiler.
MAX_CLOCK_DRIFT = 0.03


def paper(rows: list[Row]) -> Table:
    """Every way to run the group, in the order in which they were measured."""
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


def drifts(rows: list[Row]) -> Table:
    """How far the log-probs of a way are from those of another, a row for each pair."""
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


def profile(rows: list[Row]) -> Table:
    """Milliseconds of each kind of kernel, one column a row with figures."""
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
        notes=[*errors(rows), *_drifts(shown)],
    )


def _drifts(rows: list[Row]) -> Iterator[str]:
    """Where the profiled steps were not as long as those before them."""
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
    """The way of a step; of anything else what it is."""
    what, _, _ = row["case"].rpartition(" ")
    return f"{what}, {row['how']}" if what else row["how"]
