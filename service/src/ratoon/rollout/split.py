"""How a group that exceeds the budget is run: streamed, or cut into several micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.costs import CostModel, SequenceSizes, Work
from ratoon.rollout.forest import build_forest
from ratoon.rollout.limits import TokenLimits
from ratoon.rollout.packed import Forest, Stage
from ratoon.rollout.prefixes import SortedPrefixes, shared_with_previous
from ratoon.rollout.ragged import offsets_of
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


class KnownForests:
    """Work and forests of sequences of one batch, by place, ascending; each is made once."""

    def __init__(self, batch: RolloutBatch, prefixes: SortedPrefixes, sizes: SequenceSizes) -> None:
        self.sizes = sizes
        self._batch = batch
        self._prefixes = prefixes
        self._works: dict[bytes, Work] = {}
        self._forests: dict[bytes, Forest] = {}

    def work(self, places: NDArray[np.int64]) -> Work:
        key = places.tobytes()
        found = self._works.get(key)
        if found is None:
            found = self._works[key] = self.sizes.work(places)
        return found

    def forest(self, places: NDArray[np.int64]) -> Forest:
        key = places.tobytes()
        found = self._forests.get(key)
        if found is None:
            sequences = np.sort(self._prefixes.order[places])
            found = self._forests[key] = build_forest(self._batch, self._prefixes, sequences)
        return found


class GroupSplitter:
    """Splits groups of one batch under one budget."""

    def __init__(
        self, known: KnownForests, *, tokens: int, costs: CostModel, limits: TokenLimits
    ) -> None:
        """`tokens`: packed ones that are asked to be held at a time, at most."""
        self.known = known
        self.budget = max(1, min(tokens, limits.at_once))
        self.costs = costs
        self._limits = limits

    def split(self, places: NDArray[np.int64]) -> tuple[Part, ...]:
        """The cheapest parts of the sequences at `places`; one, at once, where they fit."""
        if self._fits(places):
            return (Part(places=places, stages=()),)
        return self._cheapest(places, _MAX_DEPTH).parts

    def _fits(self, places: NDArray[np.int64]) -> bool:
        return len(places) == 1 or self.known.work(places).tokens <= self.budget

    def _cheapest(self, places: NDArray[np.int64], depth: int) -> _Choice:
        """Of three: cut wherever the budget ends; streamed; each subtree below the root apart."""
        if self._fits(places):
            return self._at_once([places])
        choices = [self._at_once(self._cut(places)), self._streamed(places)]
        if depth > 0:
            choices.append(self._subtrees(places, depth))
        return min(choices, key=lambda choice: (choice.is_refused, choice.cost))

    def _at_once(self, runs: list[NDArray[np.int64]]) -> _Choice:
        works = [self.known.work(run) for run in runs]
        return _Choice(
            parts=tuple(Part(places=run, stages=()) for run in runs),
            cost=sum(self.costs.packed(work) for work in works),
            is_refused=any(work.tokens > self._limits.at_once for work in works),
        )

    def _streamed(self, places: NDArray[np.int64]) -> _Choice:
        forest = self.known.forest(places)
        room = max(1, min(self.budget, self._limits.streamed))
        stages = cut_into_stages(forest, room, self.costs.call_tokens)
        # One stage is all at once.
        is_streamed = len(stages) > 1
        most = self._limits.streamed if is_streamed else self._limits.at_once
        return _Choice(
            parts=(Part(places=places, stages=stages if is_streamed else ()),),
            cost=self.costs.streamed(self.known.work(places), stages),
            is_refused=peak_tokens(stages) > most,
        )

    def _subtrees(self, places: NDArray[np.int64], depth: int) -> _Choice:
        """Subtrees below the common prefix, which each part repeats; neighbours that fit meet."""
        shared = shared_with_previous(self.known.sizes.lcp, places)
        is_first = shared == shared[1:].min()
        is_first[0] = True
        repeated: list[int] = shared.tolist()
        before: list[int] = offsets_of(self.known.sizes.lengths[places] - shared).tolist()

        def fits(start: int, stop: int) -> bool:
            """Whether neighbours that begin with a subtree do."""
            return stop - start == 1 or before[stop] - before[start] + repeated[start] <= budget

        budget = self.budget
        found: list[_Choice] = []
        opened = 0
        for start, stop in pairwise([*np.flatnonzero(is_first).tolist(), len(places)]):
            if fits(opened, stop):
                continue
            if opened < start:
                found.append(self._at_once([places[opened:start]]))
            opened = start
            if not fits(start, stop):
                found.append(self._cheapest(places[start:stop], depth - 1))
                opened = stop
        if opened < len(places):
            found.append(self._at_once([places[opened:]]))
        return _Choice(
            parts=tuple(part for choice in found for part in choice.parts),
            cost=sum(choice.cost for choice in found),
            is_refused=any(choice.is_refused for choice in found),
        )

    def _cut(self, places: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Runs of `places` of at most the budget's packed tokens, or of one place."""
        lengths = self.known.sizes.lengths[places].tolist()
        shared = shared_with_previous(self.known.sizes.lcp, places).tolist()
        cuts: list[int] = []
        tokens = lengths[0]
        for i in range(1, len(places)):
            tokens += lengths[i] - shared[i]
            if tokens > self.budget:
                cuts.append(i)
                tokens = lengths[i]
        return np.split(places, cuts)
