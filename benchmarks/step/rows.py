"""Ratios between rows of a step result, and the targets they have to meet.

A ratio is between two rows of one case, which are of one run. Rows without figures are left out,
and so are targets without the figures that they need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.step.costs import fit_rates, fitted_rows, worst_error
from benchmarks.step.memory import ACTIVATIONS
from benchmarks.step.run import Row
from benchmarks.step.subjects import REPLICATED, STREAMED
from benchmarks.step.updates import BY_MUON

Cell = dict[str, Row]
OURS = ("cuda", "reference")
FLASH = "flash"


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
    """The fastest replicated row of a case, if any."""
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
    """Our row that the planner would run: shared or not."""
    mine = ours_of(cell)
    return unshared_of(cell) if mine is not None and not mine["is_shared"] else mine


def planned_speedup(cell: Cell) -> float | None:
    """Seconds of the fastest replicated way over those of the way that the planner runs.

    If that is our own replicated way, it is compared with the fastest other one.
    """
    planned = planned_of(cell)
    if planned is None:
        return None
    other = replicated_of({how: row for how, row in cell.items() if row is not planned})
    return None if other is None else other["seconds"] / planned["seconds"]


def activation_gib(row: Row) -> float | None:
    """Peak GiB beyond weights and gradients; None if not all gradients existed at the peak.

    If a row does not say so, they did for waves and micro-batches, which accumulate into the
    gradients of earlier ones, and did not for a group that ran at once.
    """
    in_parts = STREAMED in row["how"] or REPLICATED in row["how"]
    return row.get("activation_gib") if row.get("gradients_stay", in_parts) else None


def update_ratio(row: Row) -> float | None:
    """Seconds of an update over its plain step; None without one, or with a reference pass."""
    if not row.get("step") or row["has_reference"]:
        return None
    return row["update_s"] / row["step"]["seconds"]


MAX_PAPER_SECONDS = 3.9
MIN_PAPER_MFU = 0.60
MIN_PROMPT = 131_072
MAX_PREDICTION_ERROR = 0.10
MAX_ACTIVATION_SHARE = 0.5
MAX_UPDATE_RATIO = 1.15
MAX_MUON_RATIO = 2.5
MAX_GAP_SHARE = 0.03
MAX_STREAMED_RATIO = 1.05
MAX_LINEAR_ERROR = 0.05
MAX_COST_ERROR = 0.05
# Above 1, as the prompt's keys and values stay, with their float32 gradients.
MAX_MANY_RATIO = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A figure's target and what was reached."""

    name: str
    bound: float
    reached: float
    is_met: bool


def targets(result: dict[str, Any]) -> list[Target]:
    """Every target for which the result has figures."""
    return [
        *_paper(result["paper"]),
        *_profile(result["profile"]),
        *_never_slower("table2", result["table2"]),
        *_memory(result["memory"]),
        *_never_slower("crossover", result["crossover"], planned_speedup),
        *_costs(result["costs"]),
        *_updates(result["updates"]),
    ]


def _paper(rows: list[Row]) -> Iterator[Target]:
    for case, cell in by_case(rows).items():
        ours = ours_of(cell)
        if ours is None:
            continue
        yield at_most(f"paper {case}: seconds", MAX_PAPER_SECONDS, ours["seconds"])
        yield at_least(f"paper {case}: hardware MFU", MIN_PAPER_MFU, ours["hardware_mfu"])
        for how, row in streamed_of(cell).items():
            ratio = row["seconds"] / ours["seconds"]
            yield at_most(f"paper {case}: {how} over packed", MAX_STREAMED_RATIO, ratio)
    yield from _never_slower("paper", rows)
    yield from _predictions("paper", rows)


def _profile(rows: list[Row]) -> Iterator[Target]:
    for case, cell in by_case(rows).items():
        ours = ours_of(cell)
        if ours is not None and ours["gap_share"] is not None and " " not in case:
            yield at_most(f"profile {case}: nothing runs", MAX_GAP_SHARE, ours["gap_share"])


def _never_slower(
    section: str,
    rows: list[Row],
    ratio_of: Callable[[Cell], float | None] = speedup,
) -> Iterator[Target]:
    """The least speed-up over all cases, against 1."""
    found = {case: ratio_of(cell) for case, cell in by_case(rows).items()}
    known = {case: ratio for case, ratio in found.items() if ratio is not None}
    if known:
        case = min(known, key=lambda case: known[case])
        yield at_least(f"{section}: least speed-up over replicated, {case}", 1.0, known[case])


def _memory(rows: list[Row]) -> Iterator[Target]:
    cells = by_case(rows)
    prompts = [row["prompt"] for row in rows if "prompt" in row]
    if prompts and max(prompts) >= MIN_PROMPT:
        fitting = [row["prompt"] for row in rows if "prompt" in row and "error" not in row]
        yield at_least("memory: longest prompt", MIN_PROMPT, max(fitting, default=0))
    for case, cell in cells.items():
        yield from _activations(case, cell)
    swept = [row for row in rows if "prompt" in row]
    yield from _predictions("memory", swept)


def _activations(case: str, cell: Cell) -> Iterator[Target]:
    """Activations streamed over replicated, or of many responses over few, if both are known."""
    streamed = next(iter(streamed_of(cell).values()), None)
    other = replicated_of(cell) or ours_of(cell)
    if streamed is None or other is None:
        return
    mine, others = activation_gib(streamed), activation_gib(other)
    if mine is None or others is None:
        return
    if REPLICATED in other["how"]:
        name = f"memory: streamed over replicated, {case.removeprefix(ACTIVATIONS)}"
        yield at_most(name, MAX_ACTIVATION_SHARE, mine / others)
    else:
        name = f"memory: {streamed['responses']} responses over {other['responses']}"
        yield at_most(name, MAX_MANY_RATIO, mine / others)


def _predictions(section: str, rows: list[Row]) -> Iterator[Target]:
    """The worst prediction of the peak of a packed micro-batch that runs at once."""
    wrong = [
        abs(row["predicted_gib"] / row["beyond_weights_gib"] - 1)
        for cell in by_case(rows).values()
        if (row := ours_of(cell)) is not None and "predicted_gib" in row
    ]
    if wrong:
        name = f"{section}: error of the predicted peak"
        yield at_most(name, MAX_PREDICTION_ERROR, max(wrong))


def _costs(rows: list[Row]) -> Iterator[Target]:
    wrong = [abs(row["predicted_s"] / row["seconds"] - 1) for row in fitted_rows(rows)]
    if wrong:
        yield at_most("costs: error of predicted seconds", MAX_COST_ERROR, max(wrong))
    if (fitted := fit_rates(rows)) is not None:
        name = "costs: error of seconds linear in calls, tokens, pairs and rows"
        yield at_most(name, MAX_LINEAR_ERROR, worst_error(rows, fitted))


def _updates(rows: list[Row]) -> Iterator[Target]:
    for row in rows:
        ratio = update_ratio(row) if "error" not in row else None
        if ratio is not None:
            yield at_most(f"updates {row['case']}: update over step", MAX_UPDATE_RATIO, ratio)
    seconds = {row["case"]: row["optimizer_s"] for row in rows if "error" not in row}
    for case, taken_s in seconds.items():
        adamw_s = seconds.get(case.replace(BY_MUON, ""))
        if BY_MUON in case and adamw_s is not None:
            yield at_most(f"updates {case}: step over AdamW's", MAX_MUON_RATIO, taken_s / adamw_s)


def at_least(name: str, bound: float, reached: float) -> Target:
    return Target(name=name, bound=bound, reached=reached, is_met=reached >= bound)


def at_most(name: str, bound: float, reached: float) -> Target:
    return Target(name=name, bound=bound, reached=reached, is_met=reached <= bound)
