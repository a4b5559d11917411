"""Groups spread over ranks, so that the most loaded one has as little to run as possible.

Two ways to begin: runs of the sorted order, which keep together what shares prefixes (AREAL-DTA),
and the costliest group first, onto the least loaded rank. Then groups are moved and swapped.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ratoon.rollout.balance import GOOD_ENOUGH, Balancer, RankLoads, loads_of
from ratoon.rollout.costs import SequenceSizes
from ratoon.rollout.fill import Filler
from ratoon.rollout.line import Atoms, Line, LineCosts, lay_out

# Splits repeat prefixes, so they have to shorten the longest rank by this share of it.
_LEAST_OF_SPLIT = 0.01


def spread(
    groups: Sequence[NDArray[np.int64]],
    num_ranks: int,
    fillers: Sequence[Filler],
    sizes: SequenceSizes,
) -> tuple[Filler, RankLoads]:
    """Groups on ranks, and whichever of `fillers` makes the longest rank cheapest.

    Groups are by first place, their places ascending. One is split between ranks only where the
    longest gets shorter by it, net of the prefix that is repeated. Ranks may stay without work. The
    same input gives the same result; of equals the first filler.
    """
    if num_ranks == 1 or not groups:
        drafts = [
            loads_of([filler.fill(groups), *([] for _ in range(num_ranks - 1))])
            for filler in fillers
        ]
        return _cheapest(list(zip(fillers, drafts, strict=True)))
    line = lay_out(groups, sizes)
    begun = [_Spread(line, num_ranks, filler) for filler in fillers]
    order = sorted(range(len(begun)), key=lambda index: (begun[index].begin.mean, index))
    finished: dict[int, RankLoads] = {}
    shortest = np.inf
    for index in order:
        # No longest rank is below the mean, which moves hardly change.
        if begun[index].begin.mean < shortest:
            finished[index] = begun[index].finish()
            shortest = min(shortest, finished[index].longest)
    return _cheapest([(fillers[index], finished[index]) for index in sorted(finished)])


def _cheapest(drafts: Sequence[tuple[Filler, RankLoads]]) -> tuple[Filler, RankLoads]:
    return min(drafts, key=lambda draft: draft[1].longest)


class _Spread:
    """One filler's way to load ranks: `begin` has runs of whole groups, `finish` goes on."""

    def __init__(self, line: Line, num_ranks: int, filler: Filler) -> None:
        self._line = line
        self._num_ranks = num_ranks
        self._filler = filler
        self._costs = LineCosts(line, num_ranks, filler)
        self._whole = self._costs.whole_groups()
        self._runs = self._balancer(self._whole, self._runs_from(self._whole, line.starts))
        self.begin = self._runs.loads

    def finish(self) -> RankLoads:
        """The better of both beginnings, balanced; with split groups where that pays."""
        best = self._runs.balance()
        if best.gap > GOOD_ENOUGH:
            rank_A = _costliest_first(self._whole, self._num_ranks)
            other = self._balancer(self._whole, rank_A).balance()
            best = min(best, other, key=lambda loads: (loads.longest, loads.mean))
        if best.gap > _LEAST_OF_SPLIT:
            split = self._split()
            if split.longest < (1.0 - _LEAST_OF_SPLIT) * best.longest:
                best = split
        return best

    def _split(self) -> RankLoads:
        """From runs that may end within groups, wherever that is cheapest."""
        cuts = self._costs.runs(np.arange(len(self._line.places)), self._num_ranks)
        atoms = self._costs.split_groups(cuts)
        return self._balancer(atoms, _rank_of(atoms, cuts)).balance()

    def _runs_from(self, atoms: Atoms, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        return _rank_of(atoms, self._costs.runs(starts, self._num_ranks))

    def _balancer(self, atoms: Atoms, rank_A: NDArray[np.int64]) -> Balancer:
        return Balancer(atoms, rank_A, self._num_ranks, self._filler)


def _rank_of(atoms: Atoms, runs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rank of each atom, int64 [A], where each rank has one of the runs that start at `runs`."""
    return np.searchsorted(runs, atoms.start, side="right") - 1


def _costliest_first(atoms: Atoms, num_ranks: int) -> NDArray[np.int64]:
    """Rank of each atom, int64 [A]: the costliest first, onto the least loaded rank."""
    loads = [(0.0, rank) for rank in range(num_ranks)]
    rank_A = np.empty(len(atoms.cost), np.int64)
    for atom in np.argsort(-atoms.cost, kind="stable").tolist():
        load, rank = loads[0]
        rank_A[atom] = rank
        heapq.heapreplace(loads, (load + float(atoms.cost[atom]), rank))
    return rank_A
