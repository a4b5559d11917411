"""The gradient window: counters, sums and how tokens were weighted since the last step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon.model.router import RouteSums
from ratoon.rollout.advantages import zero_variance_groups
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.columns import versions_of_tokens
from ratoon.rollout.selection import Counters
from ratoon.train.additive import Lengths, Merged, Moments, largest, mean, smallest, total
from ratoon.train.loss.spec import CounterDivisor, Loss, NoDivisor, Normalisation
from ratoon.train.loss.sums import LossSums
from ratoon.train.passes import PassTotals
from ratoon.train.prepare import Prepared
from ratoon_proto.types import DivideBy, TokenWeight


@dataclass(frozen=True, slots=True)
class BatchSums(Merged):
    """Sums over all rollouts as they were sent, except `advantages` and `staleness`."""

    responses: Lengths = field(default_factory=Lengths)
    truncated: float = total()
    rewards: Moments = field(default_factory=Moments)
    reward_min: float = smallest()
    reward_max: float = largest(-math.inf)
    # Groups with rewards, and those of them whose rewards are all equal.
    rewarded_groups: float = total()
    flat_groups: float = total()
    # Over counted tokens.
    advantages: Moments = field(default_factory=Moments)
    dropped_stale: float = total()
    dropped_truncated: float = total()
    dropped_zero_variance: float = total()
    dropped_bad: float = total()
    outside_mask: float = total()
    # Rollouts that count, but have no gradient and were not run.
    not_run: float = total()
    # Versions between sampling and now, over kept rollouts that say one that the policy has had.
    dated_rollouts: float = total()
    staleness: float = total()
    staleness_max: float = largest()
    # Versions since sampling by response token, each by the version that sampled it.
    dated_tokens: float = total()
    token_staleness: float = total()
    route_conflicts: float = total()

    def figures(self) -> dict[str, float | int | None]:
        """Fields of a `StepReport`, by name. A mean over nothing is None."""
        rewards, advantages, lengths = self.rewards, self.advantages, self.responses
        p50, p90, p99, longest = lengths.quantiles(50, 90, 99, 100)
        return {
            "reward_mean": rewards.mean if rewards.count else None,
            "reward_std": rewards.std if rewards.count else None,
            "reward_min": self.reward_min if rewards.count else None,
            "reward_max": self.reward_max if rewards.count else None,
            "advantage_mean": advantages.mean if advantages.count else None,
            "advantage_std": advantages.std if advantages.count else None,
            "zero_variance_fraction": mean(self.flat_groups, self.rewarded_groups),
            "truncated_fraction": mean(self.truncated, len(lengths.values)) or 0.0,
            "response_length_mean": lengths.mean,
            "response_length_p50": p50,
            "response_length_p90": p90,
            "response_length_p99": p99,
            "response_length_max": longest,
            "staleness_mean": mean(self.staleness, self.dated_rollouts),
            "staleness_max": int(self.staleness_max) if self.dated_rollouts else None,
            "token_staleness_mean": mean(self.token_staleness, self.dated_tokens),
            "dropped_stale": int(self.dropped_stale),
            "dropped_truncated": int(self.dropped_truncated),
            "dropped_zero_variance": int(self.dropped_zero_variance),
            "dropped_bad": int(self.dropped_bad),
            "tokens_outside_mask": int(self.outside_mask),
            "zero_advantage_sequences": int(self.not_run),
            "route_conflicts": int(self.route_conflicts),
        }


def of_batch(batch: RolloutBatch) -> BatchSums:
    sums = BatchSums(
        responses=Lengths(tuple(np.diff(batch.response_offsets).tolist())),
        truncated=int(np.count_nonzero(batch.truncated)),
        dropped_bad=0 if batch.bad_rollouts is None else len(batch.bad_rollouts),
        outside_mask=0 if batch.outside_mask is None else int(batch.outside_mask.sum()),
    )
    if batch.rewards is None or not batch.num_sequences:
        return sums
    is_flat_G = zero_variance_groups(batch.rewards, batch.group_offsets)
    return replace(
        sums,
        rewards=Moments.of(batch.rewards),
        reward_min=float(batch.rewards.min()),
        reward_max=float(batch.rewards.max()),
        rewarded_groups=batch.num_groups,
        flat_groups=int(np.count_nonzero(is_flat_G)),
    )


def of_prepared(prepared: Prepared) -> BatchSums:
    """Sums of the batch, and of what its loss makes of it at the policy's version."""
    version = prepared.version
    batch, columns, selection = prepared.batch, prepared.columns, prepared.selection
    advantages = Moments()
    if prepared.loss.advantage is not None:
        advantages = Moments.of(columns.advantage_J[columns.counted_J])
    is_dated_S = selection.kept_S & (batch.policy_version >= 0) & (batch.policy_version <= version)
    age = version - batch.policy_version[is_dated_S]
    token_age = version - versions_of_tokens(batch, is_dated_S)
    token_age = token_age[token_age >= 0]
    return replace(
        of_batch(batch),
        advantages=advantages,
        dropped_stale=selection.dropped_stale,
        dropped_truncated=selection.dropped_truncated,
        dropped_zero_variance=selection.dropped_zero_variance,
        not_run=int(np.count_nonzero(prepared.not_run_S)),
        dated_rollouts=len(age),
        staleness=int(age.sum()),
        staleness_max=int(age.max(initial=0)),
        dated_tokens=len(token_age),
        token_staleness=int(token_age.sum()),
        route_conflicts=prepared.route_conflicts,
    )


_NONE = Counters(tokens=0, sequences=0, groups=0)


class WindowState(StrEnum):
    """EMPTY: no gradients. OPEN: sums of whole forward-backwards. TORN: one stopped half-way."""

    EMPTY = "empty"
    OPEN = "open"
    TORN = "torn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What a report is made of: the figures of one forward-backward, or of a window."""

    counters: Counters = _NONE
    sums: LossSums = field(default_factory=LossSums)
    routes: RouteSums = field(default_factory=RouteSums)
    batch: BatchSums = field(default_factory=BatchSums)
    has_kl: bool = False

    @classmethod
    def of_pass(cls, prepared: Prepared, done: PassTotals) -> Totals:
        """Totals of one forward-backward."""
        return cls(
            counters=prepared.counters,
            sums=done.sums,
            routes=done.routes,
            batch=of_prepared(prepared),
            has_kl=prepared.loss.kl is not None,
        )


class GradientWindow:
    """The window of one trainer: EMPTY -> (TORN -> OPEN)* -> EMPTY.

    `begin` makes it TORN and `complete` OPEN, so that whatever stops a forward-backward in between
    leaves it TORN, from which only `clear` leads on.
    """

    def __init__(self) -> None:
        self.state = WindowState.EMPTY
        self.totals = Totals()
        self._token_weight = TokenWeight.PER_TOKEN
        self._defaults: set[DivideBy] = set()
        self._whole_groups = 0
        self._group_keys: set[bytes] = set()

    @property
    def counters(self) -> Counters:
        return self.totals.counters

    @property
    def normalisation(self) -> Normalisation:
        """How the sums were weighted. Raises `RatoonError` WINDOW_EMPTY."""
        self.require_open()
        only = next(iter(self._defaults)) if len(self._defaults) == 1 else None
        return Normalisation(token_weight=self._token_weight, default_divide_by=only)

    def check(self, loss: Loss) -> None:
        """Check that a forward-backward of `loss` may join.

        Raises `RatoonError`: WINDOW_POISONED where the window is TORN, INVALID_ARGUMENT where it
        holds tokens of another weight.
        """
        if self.state is WindowState.TORN:
            raise _torn()
        if self.state is WindowState.OPEN and loss.token_weight is not self._token_weight:
            raise invalid(
                "loss.token_weight",
                loss.token_weight,
                f"{self._token_weight}, as in the rest of the window",
            )

    def begin(self, loss: Loss) -> None:
        """Gradients of one forward-backward start to be added."""
        self.check(loss)
        self._token_weight = loss.token_weight
        self.state = WindowState.TORN

    def complete(self, prepared: Prepared, new: Totals) -> None:
        """All gradients of it are added. Groups that may come in parts count once a window."""
        assert self.state is WindowState.TORN
        self._defaults.add(prepared.loss.default_divide_by)
        self._group_keys |= prepared.group_keys
        if not prepared.group_keys:
            self._whole_groups += new.counters.groups
        old = self.totals
        counters = Counters(
            tokens=old.counters.tokens + new.counters.tokens,
            sequences=old.counters.sequences + new.counters.sequences,
            groups=self._whole_groups + len(self._group_keys),
        )
        self.totals = Totals(
            counters=counters,
            sums=old.sums + new.sums,
            routes=old.routes + new.routes,
            batch=old.batch + new.batch,
            has_kl=old.has_kl or new.has_kl,
        )
        self.state = WindowState.OPEN

    def divisor(self, divisor: CounterDivisor | NoDivisor) -> float:
        """The number to divide by; 0.0 where no token counts, whatever the divisor.

        Raises `RatoonError` WINDOW_EMPTY or WINDOW_POISONED.
        """
        self.require_open()
        return divide_number(divisor, self.counters)

    def clear(self) -> None:
        """Back to EMPTY."""
        self.__init__()

    def require_open(self) -> None:
        """Raises `RatoonError` WINDOW_EMPTY or WINDOW_POISONED."""
        if self.state is WindowState.TORN:
            raise _torn()
        if self.state is WindowState.EMPTY:
            raise RatoonError(
                ErrorCode.WINDOW_EMPTY, "no ForwardBackward since the last step or discard"
            )


def divide_number(divisor: CounterDivisor | NoDivisor, counters: Counters) -> float:
    """The divisor as a number, given the counters; 0.0 where no token counts."""
    if not counters.tokens:
        return 0.0
    if isinstance(divisor, NoDivisor):
        return 1.0
    counts = {
        DivideBy.TOKENS: counters.tokens,
        DivideBy.SEQUENCES: counters.sequences,
        DivideBy.GROUPS: counters.groups,
    }
    return counts[divisor.counter] * divisor.times


def _torn() -> RatoonError:
    return RatoonError(
        ErrorCode.WINDOW_POISONED,
        "a ForwardBackward stopped half-way: its window must be discarded",
    )
