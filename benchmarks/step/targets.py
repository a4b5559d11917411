"""What the figures of the step benchmark were to be.

Enters the result file's content, leaves targets with what was reached. Invariant: a target without
its figures is not among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.step.costs_fit import fit_rates, fitted_rows, worst_error
from benchmarks.step.rows import (
    ACTIVATIONS,
    REPLICATED,
    Cell,
    activation_gib,
    by_case,
    ours_of,
    planned_speedup,
    replicated_of,
    speedup,
    streamed_of,
    update_ratio,
)

MAX_PAPER_SECONDS = 3.9
MIN_PAPER_MFU = 0.60
MIN_PROMPT = 131_072
MAX_PREDICTION_ERROR = 0.10
MAX_ACTIVATION_SHARE = 0.5
MAX_UPDATE_RATIO = 1.15
MAX_GAP_SHARE = 0.03
MAX_STREAMED_RATIO = 1.05
MAX_LINEAR_ERROR = 0.05
MAX_COST_ERROR = 0.05
# Not 1: the keys and values of the prompt stay, with gradients of them in float32.
MAX_MANY_RATIO = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What one figure was to be and what it is."""

    name: str
    bound: float
    reached: float
    is_met: bool


def targets(result: dict[str, Any]) -> list[Target]:
    """Every target that the result has the figures of."""
    return [
        *_paper(result["paper"]),
        *_profile(result["profile"]),
        *_never_slower("table2", result["table2"]),
        *_memory(result["memory"]),
        *_never_slower("crossover", result["crossover"], planned_speedup),
        *_costs(result["costs"]),
        *_updates(result["updates"]),
    ]


def _paper(rows: list[dict[str, Any]]) -> Iterator[Target]:
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


def _profile(rows: list[dict[str, Any]]) -> Iterator[Target]:
    for case, cell in by_case(rows).items():
        ours = ours_of(cell)
        if ours is not None and ours["gap_share"] is not None and " " not in case:
            yield at_most(f"profile {case}: nothing runs", MAX_GAP_SHARE, ours["gap_share"])


def _never_slower(
    section: str,
    rows: list[dict[str, Any]],
    ratio_of: Callable[[Cell], float | None] = speedup,
) -> Iterator[Target]:
    """The case in which ours gains the least."""
    found = {case: ratio_of(cell) for case, cell in by_case(rows).items()}
    known = {case: ratio for case, ratio in found.items() if ratio is not None}
    if known:
        case = min(known, key=lambda case: known[case])
        yield at_least(f"{section}: least speed-up over replicated, {case}", 1.0, known[case])


def _memory(rows: list[dict[str, Any]]) -> Iterator[Target]:
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
    """Streamed over replicated, or many responses over few, where both have their gradients."""
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


def _predictions(section: str, rows: list[dict[str, Any]]) -> Iterator[Target]:
    """The worst prediction of the peak of a packed micro-batch that is run at once."""
    wrong = [
        abs(row["predicted_gib"] / row["beyond_weights_gib"] - 1)
        for cell in by_case(rows).values()
        if (row := ours_of(cell)) is not None and "predicted_gib" in row
    ]
    if wrong:
        name = f"{section}: error of the predicted peak"
        yield at_most(name, MAX_PREDICTION_ERROR, max(wrong))


def _costs(rows: list[dict[str, Any]]) -> Iterator[Target]:
    wrong = [abs(row["predicted_s"] / row["seconds"] - 1) for row in fitted_rows(rows)]
    if wrong:
        yield at_most("costs: error of predicted seconds", MAX_COST_ERROR, max(wrong))
    if (fitted := fit_rates(rows)) is not None:
        name = "costs: error of seconds linear in calls, tokens, pairs and rows"
        yield at_most(name, MAX_LINEAR_ERROR, worst_error(rows, fitted))


def _updates(rows: list[dict[str, Any]]) -> Iterator[Target]:
    for row in rows:
        ratio = update_ratio(row) if "error" not in row else None
        if ratio is not None:
            yield at_most(f"updates {row['case']}: update over step", MAX_UPDATE_RATIO, ratio)


def at_least(name: str, bound: float, reached: float) -> Target:
    return Target(name=name, bound=bound, reached=reached, is_met=reached >= bound)


def at_most(name: str, bound: float, reached: float) -> Target:
    return Target(name=name, bound=bound, reached=reached, is_met=reached <= bound)
