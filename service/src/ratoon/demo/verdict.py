"""The demo's pass criteria: the policy learned, and each part of the loss did its work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ratoon_client import StepReport

MAX_FIRST_REWARD = 0.3
# Copying one letter of two and guessing the other among the right four scores 0.66.
MIN_LAST_REWARD = 0.75
MIN_TOKEN_REDUCTION = 2.0
# Tolerance for float32 rounding under another cut of the batch; any update moves a ratio further.
SAME = 1e-4
MOVED = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One Forward and the Updates of its two halves.

    `weight`: the mean correction weight of the first half, computed here from the log-probs that
    the sampler and the Forward gave.
    """

    reward: float
    weight: float
    first: StepReport
    second: StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Outcome of the demo. Rewards are means in [0, 1] over the held-out queries, before and after
    each leg. Times are seconds."""

    first_reward: float
    middle_reward: float
    last_reward: float
    num_updates: int
    token_reduction: float
    version: int
    seconds: float
    rounds: Sequence[Round]

    @property
    def faults(self) -> tuple[str, ...]:
        """One sentence per failure; none: the demo passed."""
        return (*self._learning_faults(), *loss_faults(self.rounds))

    def lines(self) -> tuple[str, ...]:
        """The second leg's figures, the failures, and the line that ends the demo."""
        summary = (
            f"demo: reward {self.first_reward:.3f} -> {self.middle_reward:.3f}"
            f" -> {self.last_reward:.3f} in {self.num_updates} updates,"
            f" rho {self.token_reduction:.1f}, version {self.version}, {self.seconds:.0f} s"
        )
        wrong = (f"wrong: {fault}" for fault in self.faults)
        return (*loss_lines(self.rounds), *wrong, summary)

    def _learning_faults(self) -> list[str]:
        faults: list[str] = []
        if self.first_reward > MAX_FIRST_REWARD:
            faults.append(f"the reward began above {MAX_FIRST_REWARD}: there was nothing to learn")
        if self.last_reward < MIN_LAST_REWARD:
            faults.append(f"the reward ended below {MIN_LAST_REWARD}")
        if self.token_reduction < MIN_TOKEN_REDUCTION:
            faults.append(f"rho is below {MIN_TOKEN_REDUCTION}")
        return faults


def loss_lines(rounds: Sequence[Round]) -> tuple[str, ...]:
    """The second leg in four lines."""
    held = [clipped(each.second) for each in rounds]
    weights = [each.weight for each in rounds]
    low = min(each.second.ratio_min or 0.0 for each in rounds)
    high = max(each.second.ratio_max or 0.0 for each in rounds)
    return (
        f"  staleness   {_versions(rounds)} versions in the first and the second half",
        f"  ratio       1 in the first half, {low:.2f} to {high:.2f} in the second",
        f"  clip        held {sum(held) / len(held):.1%} of the second half's tokens",
        f"  correction  mean weight {min(weights):.3f} to {max(weights):.3f}",
    )


def loss_faults(rounds: Sequence[Round]) -> list[str]:
    """Mechanisms that did not act in the second leg: staleness, `from_forward`, clip,
    correction."""
    faults: list[str] = []
    if _versions(rounds) != "1 and 2":
        faults.append(f"samples are {_versions(rounds)} versions stale, not 1 and 2")
    if any(_distance(each.first) > SAME for each in rounds):
        faults.append("the first half's ratio is not 1, though the Forward ran at its version")
    if not any(_distance(each.second) > MOVED for each in rounds):
        faults.append("the second half's ratio is 1, though an Update came between")
    if not any(clipped(each.second) > 0 for each in rounds):
        faults.append("nothing was clipped")
    if any(each.first.correction_weight_mean is None for each in rounds):
        faults.append("no correction was applied")
    elif any(_gap(each) > 1e-3 for each in rounds):
        faults.append("the correction's weight is not exp(Forward - sampler)")
    if not any(abs(each.weight - 1) > 1e-3 for each in rounds):
        faults.append("the correction's weight is always 1")
    return faults


def _versions(rounds: Sequence[Round]) -> str:
    first = sorted({str(each.first.staleness_max) for each in rounds})
    second = sorted({str(each.second.staleness_max) for each in rounds})
    return f"{'/'.join(first)} and {'/'.join(second)}"


def clipped(report: StepReport) -> float:
    """Share of clipped tokens; 0 if there are none."""
    return (report.clip_fraction_low or 0.0) + (report.clip_fraction_high or 0.0)


def _distance(report: StepReport) -> float:
    """Distance from 1 of the furthest ratio."""
    if report.ratio_max is None or report.ratio_min is None:
        return 0.0
    return max(report.ratio_max - 1, 1 - report.ratio_min)


def _gap(each: Round) -> float:
    return abs((each.first.correction_weight_mean or 0.0) - each.weight)
