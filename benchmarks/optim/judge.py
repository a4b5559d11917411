"""Judges whether optimizer states train as float32 ones do: losses within seed noise, and weights.

Verdicts follow from the runs in a result file alone, so that a test can reproduce them.

All runs share their initial weights, and runs of one seed their batches. So the shift of a kind of
states is the mean over seeds of its loss minus float32's with the same seed, and the shift's error
is that of these paired differences. The band is how far seed noise alone would move the difference
of two unpaired means: two standard errors, 2 s sqrt(1 / n + 1 / n_fp32), where s is the standard
deviation over float32's seeds.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

from benchmarks.optim.run import (
    BASELINE,
    JUDGED,
    NEAREST,
    WITH_MASTERS,
    WITHOUT_MASTERS,
)

Run = dict[str, Any]

WINDOW = 10
LAST = 50
# Criterion for the total update of states with masters, at RL's learning rates: up to MAX_RL_RATE.
MIN_COSINE = 0.9
MAX_RL_RATE = 1e-5
# Two standard errors cover this share of pure chance.
MIN_SHARE_WITHIN = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Mean loss over seeds, shift and band, in nats per token over updates [start, stop)."""

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
    """One kind of states at one learning rate; `last` is the window of the last updates.

    `cosine` and `error` are means over seeds, for all updates together.
    """

    learning_rate: float
    states: str
    num_seeds: int
    windows: tuple[Window, ...]
    last: Window
    # Standard deviations of the losses over seeds, and of the mean of the paired differences.
    spread: float
    shift_error: float
    cosine: float
    error: float

    @property
    def num_within(self) -> int:
        return sum(window.is_within for window in self.windows)

    @property
    def is_within(self) -> bool:
        is_curve = self.num_within >= MIN_SHARE_WITHIN * len(self.windows)
        return is_curve and self.last.is_within

    def as_json(self) -> dict[str, Any]:
        return {
            "learning_rate": self.learning_rate,
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
            "cosine": self.cosine,
            "error": self.error,
        }


def conclusions(runs: list[Run]) -> dict[str, Any]:
    """The fields of a result that are computed from its runs."""
    verdicts = judge(runs)
    return {
        "verdicts": [verdict.as_json() for verdict in verdicts],
        "targets": targets(verdicts),
    }


def judge(runs: list[Run]) -> list[Verdict]:
    """One verdict per rate and kind that ran; float32 comes first, with shifts of 0."""
    verdicts: list[Verdict] = []
    for rate in dict.fromkeys(run["learning_rate"] for run in runs):
        of_rate = [run for run in runs if run["learning_rate"] == rate]
        baseline = _curves(of_rate, BASELINE)
        for kind in (BASELINE, *JUDGED, NEAREST):
            of_kind = [run for run in of_rate if run["states"] == kind]
            if of_kind:
                verdicts.append(_verdict(of_kind, baseline))
    return verdicts


def targets(verdicts: list[Verdict]) -> list[dict[str, Any]]:
    """Whether losses stay within the band: with masters at every rate, without them at the highest.

    There the control leaves the band, which shows that it is narrow enough. At RL's rates, updates
    of states with masters must point where float32's do.
    """
    highest = max(verdict.learning_rate for verdict in verdicts)
    found: list[dict[str, Any]] = []
    for v in verdicts:
        wanted: list[tuple[str, bool]] = []
        if v.states in WITH_MASTERS or (v.states in WITHOUT_MASTERS and v.learning_rate == highest):
            wanted.append(("within the seed noise of fp32", v.is_within))
        if v.states == NEAREST and v.learning_rate == highest:
            wanted.append(("outside the seed noise of fp32", not v.is_within))
        if v.states in WITH_MASTERS and v.learning_rate <= MAX_RL_RATE:
            wanted.append((f"cosine at least {MIN_COSINE}", v.cosine >= MIN_COSINE))
        found += [
            {"learning_rate": v.learning_rate, "states": v.states, "wanted": what, "is_met": is_met}
            for what, is_met in wanted
        ]
    return found


def _curves(runs: list[Run], kind: str) -> dict[int, list[float]]:
    return {run["seed"]: run["samples"] for run in runs if run["states"] == kind}


def _verdict(runs: list[Run], baseline: dict[int, list[float]]) -> Verdict:
    kind = runs[0]["states"]
    curves = _curves(runs, kind)
    num_updates = len(next(iter(baseline.values())))
    last_start = max(0, num_updates - LAST)
    last = _means(curves, last_start, num_updates)
    theirs = _means(baseline, last_start, num_updates)
    differences = [last[seed] - theirs[seed] for seed in last]
    return Verdict(
        learning_rate=runs[0]["learning_rate"],
        states=kind,
        num_seeds=len(curves),
        windows=tuple(
            _window(curves, baseline, start, min(start + WINDOW, num_updates))
            for start in range(0, num_updates, WINDOW)
        ),
        last=_window(curves, baseline, last_start, num_updates),
        spread=statistics.stdev(last.values()),
        shift_error=statistics.stdev(differences) / math.sqrt(len(differences)),
        cosine=statistics.mean(run["cosine"] for run in runs),
        error=statistics.mean(run["error"] for run in runs),
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
    """Mean loss per seed, over updates [start, stop)."""
    return {seed: statistics.mean(losses[start:stop]) for seed, losses in curves.items()}
