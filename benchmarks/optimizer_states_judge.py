"""Whether the loss curves of narrow optimizer states are those of float32 ones, up to seed noise.

Enters runs with their losses, leaves a verdict for each kind of states. Invariant: a verdict
follows from the losses alone, so that a test can give it again.

All runs share their first weights, and those of one seed their batches. So a kind's shift is the
mean over its seeds of its loss minus that of float32 states with the same seed, and the shift's own
error comes of those differences. The band is what the seeds of float32 states would move a
difference of two such means if these had no seeds in common: two standard errors,
2 s sqrt(1 / n + 1 / n_fp32), s being the standard deviation over float32's seeds.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

from benchmarks.optimizer_states_run import BASELINE, JUDGED, NEAREST

Run = dict[str, Any]

WINDOW = 10
LAST = 50
# Two standard errors leave out so much of what is chance alone.
MIN_SHARE_WITHIN = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Losses in nats a token, over updates [start, stop): a mean over seeds and two differences."""

    start: int
    stop: int
    loss: float
    shift: float
    band: float

    @property
    def is_within(self) -> bool:
        return abs(self.shift) <= self.band


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Of one kind; `last` is of the last updates, errors and spreads are standard deviations."""

    states: str
    num_seeds: int
    windows: tuple[Window, ...]
    last: Window
    # Of the losses over seeds, and of the mean of the paired differences.
    spread: float
    shift_error: float

    @property
    def num_within(self) -> int:
        return sum(window.is_within for window in self.windows)

    @property
    def is_within(self) -> bool:
        is_curve = self.num_within >= MIN_SHARE_WITHIN * len(self.windows)
        return is_curve and self.last.is_within

    def as_json(self) -> dict[str, Any]:
        return {
            "states": self.states,
            "seeds": self.num_seeds,
            "last_loss": self.last.loss,
            "last_spread": self.spread,
            "last_shift": self.last.shift,
            "last_shift_error": self.shift_error,
            "last_band": self.last.band,
            "windows_within": self.num_within,
            "windows": len(self.windows),
            "is_within": self.is_within,
        }


def judge(runs: list[Run]) -> list[Verdict]:
    """One for each kind that was run, float32 first, whose shifts are 0."""
    kinds = list(dict.fromkeys(run["states"] for run in runs))
    curves = {kind: _curves(runs, kind) for kind in kinds}
    baseline = curves[BASELINE]
    return [
        _verdict(kind, curves[kind], baseline)
        for kind in (BASELINE, *JUDGED, NEAREST)
        if kind in curves
    ]


def targets(verdicts: list[Verdict]) -> list[dict[str, Any]]:
    """The narrow states stay within the band; the control, if it was run, shows by leaving it that
    the band is narrow enough to tell."""
    return [
        {"states": v.states, "wanted": wanted, "is_met": v.is_within == (wanted == "within")}
        for v in verdicts
        for wanted in (
            [] if v.states == BASELINE else ["outside" if v.states == NEAREST else "within"]
        )
    ]


def _curves(runs: list[Run], kind: str) -> dict[int, list[float]]:
    return {run["seed"]: run["samples"] for run in runs if run["states"] == kind}


def _verdict(
    kind: str, curves: dict[int, list[float]], baseline: dict[int, list[float]]
) -> Verdict:
    num_updates = len(next(iter(baseline.values())))
    last_start = max(0, num_updates - LAST)
    last = _means(curves, last_start, num_updates)
    theirs = _means(baseline, last_start, num_updates)
    differences = [last[seed] - theirs[seed] for seed in last]
    return Verdict(
        states=kind,
        num_seeds=len(curves),
        windows=tuple(
            _window(curves, baseline, start, min(start + WINDOW, num_updates))
            for start in range(0, num_updates, WINDOW)
        ),
        last=_window(curves, baseline, last_start, num_updates),
        spread=statistics.stdev(last.values()),
        shift_error=statistics.stdev(differences) / math.sqrt(len(differences)),
    )


def _window(
    curves: dict[int, list[float]], baseline: dict[int, list[float]], start: int, stop: int
) -> Window:
    mine, theirs = _means(curves, start, stop), _means(baseline, start, stop)
    standard_error = statistics.stdev(theirs.values()) * math.sqrt(1 / len(mine) + 1 / len(theirs))
    return Window(
        start=start,
        stop=stop,
        loss=statistics.mean(mine.values()),
        shift=statistics.mean(mine[seed] - theirs[seed] for seed in mine),
        band=2 * standard_error,
    )


def _means(curves: dict[int, list[float]], start: int, stop: int) -> dict[int, float]:
    """By seed, over updates [start, stop)."""
    return {seed: statistics.mean(losses[start:stop]) for seed, losses in curves.items()}
