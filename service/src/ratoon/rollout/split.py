"""How a group that exceeds the budget is run: streamed, or cut into several micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.costs import CostModel, SequenceSizes
from ratoon.rollout.forest import build_forest
from ratoon.rollout.limits import TokenLimits
from ratoon.rollout.packed import Stage
from ratoon.rollout.prefixes import SortedPrefixes, shared_with_previous
from ratoon.rollout.waves import cut_into_stages, peak_tokens

# Subtrees within subtrees that may each be run in another way; deeper ones are as those above.
_MAX_DEPTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Sequences that are packed together, by place in the sorted order, ascending, int64.

    `stages` as of a `MicroBatch`: empty where all are run at once.
    """

    places: NDArray[np.int64]
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    parts: tuple[Part, ...]
    cost: float
    # Whether the device cannot hold a part.
    is_refused: bool


class GroupSplitter:
    """Splits groups of one batch; holds what that takes, and changes nothing of it."""

    def __init__(
        self,
        batch: RolloutBatch,
        prefixes: SortedPrefixes,
        sizes: SequenceSizes,
        *,
        tokens: int,
        costs: CostModel,
        limits: TokenLimits,
    ) -> None:
        """`tokens`: packed ones that are asked to be held at a time, at most."""
        self.sizes = sizes
        self.budget = max(1, min(tokens, limits.at_once))
        self._limits = limits
        self._batch = batch
        self._prefixes = prefixes
        self._costs = costs

    def split(self, places: NDArray[np.int64]) -> tuple[Part, ...]:
        """The cheapest parts of the sequences at `places`; one, at once, where they fit."""
        if self._fits(places):
            return (Part(places=places, stages=()),)
        return self._cheapest(places, _MAX_DEPTH).parts

    def _fits(self, places: NDArray[np.int64]) -> bool:
        return len(places) == 1 or self.sizes.packed_tokens(places) <= self.budget

    def _cheapest(self, places: NDArray[np.int64], depth: int) -> _Choice:
        """Of three: cut wherever the budget ends; streamed; each subtree below the root apart."""
        if self._fits(places):
            return self._at_once([places])
        choices = [self._at_once(self._cut(places)), self._streamed(places)]
        if depth > 0:
            choices.append(self._subtrees(places, depth))
        return min(choices, key=lambda choice: (choice.is_refused, choice.cost))

    def _at_once(self, runs: list[NDArray[np.int64]]) -> _Choice:
        works = [self.sizes.work(run) for run in runs]
        return _Choice(
            parts=tuple(Part(places=run, stages=()) for run in runs),
            cost=sum(self._costs.packed(work) for work in works),
            is_refused=any(work.tokens > self._limits.at_once for work in works),
        )

    def _streamed(self, places: NDArray[np.int64]) -> _Choice:
        sequences = np.sort(self._prefixes.order[places])
        forest = build_forest(self._batch, self._prefixes, sequences)
        room = max(1, min(self.budget, self._limits.streamed))
        stages = cut_into_stages(forest, room, self._costs.call_tokens)
        # One stage is all at once.
        is_streamed = len(stages) > 1
        most = self._limits.streamed if is_streamed else self._limits.at_once
        return _Choice(
            parts=(Part(places=places, stages=stages if is_streamed else ()),),
            cost=self._costs.streamed(self.sizes.work(places), stages),
            is_refused=peak_tokens(stages) > most,
        )

    def _subtrees(self, places: NDArray[np.int64], depth: int) -> _Choice:
        """Subtrees below the common prefix, which each part repeats; neighbours that fit meet."""
        shared = shared_with_previous(self.sizes.lcp, places)
        is_first = shared == shared[1:].min()
        is_first[0] = True
        found: list[_Choice] = []
        open_run = places[:0]
        for child in np.split(places, np.flatnonzero(is_first)[1:]):
            joined = np.concatenate([open_run, child])
            if self._fits(joined):
                open_run = joined
                continue
            if len(open_run):
                found.append(self._at_once([open_run]))
            open_run = places[:0]
            if self._fits(child):
                open_run = child
            else:
                found.append(self._cheapest(child, depth - 1))
        if len(open_run):
            found.append(self._at_once([open_run]))
        return _Choice(
            parts=tuple(part for choice in found for part in choice.parts),
            cost=sum(choice.cost for choice in found),
            is_refused=any(choice.is_refused for choice in found),
        )

    def _cut(self, places: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Runs of `places` of at most the budget's packed tokens, or of one place."""
        lengths = self.sizes.lengths[places].tolist()
        shared = shared_with_previous(self.sizes.lcp, places).tolist()
        cuts: list[int] = []
        tokens = lengths[0]
        for i in range(1, len(places)):
            tokens += lengths[i] - shared[i]
            if tokens > self.budget:
                cuts.append(i)
                tokens = lengths[i]
        return np.split(places, cuts)
