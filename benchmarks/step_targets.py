"""What the figures of the step benchmark were to be.

Enters the result file's content, leaves targets with what was reached. Invariant: a target without
its figures is not among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.step_tables import by_case, ours_of, replicated_of

MAX_PAPER_SECONDS = 3.9
MIN_PAPER_MFU = 0.60


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What one figure was to be and what it is."""

    name: str
    bound: float
    reached: float
    is_met: bool


def targets(result: dict[str, Any]) -> list[Target]:
    """Every target that the result has the figures of."""
    return [*_paper(result["paper"])]


def _paper(rows: list[dict[str, Any]]) -> Iterator[Target]:
    for case, cell in by_case(rows).items():
        ours, replicated = ours_of(cell), replicated_of(cell)
        if ours is None:
            continue
        yield at_most(f"paper {case}: seconds", MAX_PAPER_SECONDS, ours["seconds"])
        yield at_least(f"paper {case}: hardware MFU", MIN_PAPER_MFU, ours["hardware_mfu"])
        if replicated is not None:
            speedup = replicated["seconds"] / ours["seconds"]
            yield at_least(f"paper {case}: speed-up over replicated", 1.0, speedup)


def at_least(name: str, bound: float, reached: float) -> Target:
    return Target(name=name, bound=bound, reached=reached, is_met=reached >= bound)


def at_most(name: str, bound: float, reached: float) -> Target:
    return Target(name=name, bound=bound, reached=reached, is_met=reached <= bound)
