"""Groups spread over ranks, so that the most loaded one has as little to run as possible.

Two ways to begin: runs of the sorted order, which keep together what shares prefixes (AREAL-DTA),
and the costliest group first, onto the least loaded rank. Then atoms, which are groups or parts of
them, are moved and swapped between ranks as long as the longest rank gets shorter.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ratoon.planner.costs import SequenceSizes
from ratoon.planner.fill import Filled, Filler
from ratoon.planner.line import Atoms, Line, LineCosts, lay_out

# A longest rank this close to the mean, as a share of it, is not worth another move.
GOOD_ENOUGH = 2e-3
_MAX_MOVES_PER_RANK = 8
# Moves that are tried, the most promising first, before the longest rank stays as it is.
_MAX_TRIES = 6
# Atoms of the longest rank, and as many of all others, that moves are looked for among.
_MAX_ATOMS = 1024
# Splits repeat prefixes, so they have to shorten the longest rank by this share of it.
_LEAST_OF_SPLIT = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoads:
    """Micro-batches of each rank, and what they cost."""

    filled: tuple[tuple[Filled, ...], ...]
    costs: tuple[float, ...]

    @property
    def longest(self) -> float:
        return max(self.costs)

    @property
    def mean(self) -> float:
        return sum(self.costs) / len(self.costs)

    @property
    def gap(self) -> float:
        """Cost of the longest rank over the mean of all ranks, less 1; 0 if nothing is run."""
        return max(0.0, self.longest / self.mean - 1.0) if self.mean > 0 else 0.0


def loads_of(filled: Sequence[Sequence[Filled]]) -> RankLoads:
    """Loads of at least one rank, by rank."""
    return RankLoads(
        filled=tuple(tuple(parts) for parts in filled),
        costs=tuple(_cost_of(parts) for parts in filled),
    )


class Balancer:
    """Owns the assignment of atoms to ranks, and improves it."""

    def __init__(
        self, atoms: Atoms, rank_A: NDArray[np.int64], num_ranks: int, filler: Filler
    ) -> None:
        """`rank_A`, int64 [A]: the rank that each atom begins on."""
        self._atoms = atoms
        self._filler = filler
        self._rank_A = rank_A
        self._filled = [self._fill(rank_A, rank) for rank in range(num_ranks)]
        self._cost_R = np.array([_cost_of(filled) for filled in self._filled])

    @property
    def loads(self) -> RankLoads:
        return loads_of(self._filled)

    def balance(self) -> RankLoads:
        """Move and swap until nothing that is tried makes the longest rank shorter."""
        for _ in range(_MAX_MOVES_PER_RANK * len(self._filled)):
            longest = int(self._cost_R.argmax())
            if self._cost_R[longest] <= (1.0 + GOOD_ENOUGH) * self._cost_R.mean():
                break
            if not any(self._try(longest, *move) for move in self._moves(longest)):
                break
        return self.loads

    def _fill(self, rank_A: NDArray[np.int64], rank: int) -> list[Filled]:
        """Micro-batches of a rank; its atoms of one group are one part of it."""
        chosen = np.flatnonzero(rank_A == rank)
        places = [self._atoms.places[atom] for atom in chosen.tolist()]
        if not places:
            return []
        bounds = np.flatnonzero(np.diff(self._atoms.group[chosen])) + 1
        groups = [
            places[start] if stop - start == 1 else np.concatenate(places[start:stop])
            for start, stop in pairwise([0, *bounds.tolist(), len(places)])
        ]
        return self._filler.fill(sorted(groups, key=lambda group: int(group[0])))

    def _try(self, longest: int, atom: int, other: int, back: int) -> bool:
        """Move `atom` from the longest rank to `other`, and `back` from there, unless it is -1.

        Changes nothing unless the longer of both is then shorter than the longest was.
        """
        moved = self._rank_A.copy()
        moved[atom] = other
        if back >= 0:
            moved[back] = longest
        ranks = (longest, other)
        filled = [self._fill(moved, rank) for rank in ranks]
        costs = [_cost_of(parts) for parts in filled]
        if max(costs) >= self._cost_R[longest]:
            return False
        self._rank_A = moved
        for rank, parts, cost in zip(ranks, filled, costs, strict=True):
            self._filled[rank] = parts
            self._cost_R[rank] = cost
        return True

    def _moves(self, longest: int) -> list[tuple[int, int, int]]:
        """Arguments of `_try` that promise most, best first.

        What both ranks would cost is modelled: an atom takes its cost with it, and its trunk unless
        others of its group stay behind, or are there already. Rows are atoms of the longest rank;
        columns what comes back: each atom of other ranks, then nothing, from each of these.
        """
        atoms, rank_A, cost_R = self._atoms, self._rank_A, self._cost_R
        count_GR = np.zeros((int(atoms.group[-1]) + 1, len(cost_R)), np.int64)
        np.add.at(count_GR, (atoms.group, rank_A), 1)
        own, others = (
            _sampled(np.flatnonzero(is_one), atoms.cost)
            for is_one in (rank_A == longest, rank_A != longest)
        )
        ranks = np.delete(np.arange(len(cost_R)), longest)
        to, back = np.append(rank_A[others], ranks), np.append(others, np.full(len(ranks), -1))

        # Trunks that leave with an atom that is its rank's only one of the group.
        leaving = atoms.trunk * (count_GR[atoms.group, rank_A] == 1)
        arriving = atoms.trunk * (count_GR[atoms.group, longest] == 0)
        is_absent = count_GR[atoms.group[own]][:, to] == 0
        arriving_there = atoms.trunk[own, None] * is_absent
        # Two swapped atoms of one group each find the trunk that the other leaves.
        is_same = (atoms.group[own, None] == atoms.group[back]) & (back >= 0)
        out = (atoms.cost + leaving)[own, None]
        out_back = np.where(back >= 0, (atoms.cost + leaving)[back], 0.0)
        into = np.where(back >= 0, (atoms.cost + arriving)[back], 0.0)
        here = cost_R[longest] - out + into + is_same * leaving[own, None]
        there = cost_R[to] + atoms.cost[own, None] + arriving_there - out_back
        there += is_same * leaving[back]

        longer = np.maximum(here, there).ravel()
        tries = min(_MAX_TRIES, len(longer))
        found = np.argpartition(longer, tries - 1)[:tries]
        found = found[np.lexsort((found, longer[found]))]
        rows, columns = np.divmod(found[longer[found] < cost_R[longest]], len(to))
        return list(
            zip(own[rows].tolist(), to[columns].tolist(), back[columns].tolist(), strict=True)
        )


def _sampled(atoms: NDArray[np.int64], cost_A: NDArray[np.float64]) -> NDArray[np.int64]:
    """A sample of the atoms, evenly spaced by cost, if there are too many; ascending."""
    if len(atoms) <= _MAX_ATOMS:
        return atoms
    order = np.argsort(cost_A[atoms], kind="stable")
    evenly = np.linspace(0, len(atoms) - 1, _MAX_ATOMS).round().astype(np.int64)
    return np.sort(atoms[order[evenly]])


def _cost_of(filled: Sequence[Filled]) -> float:
    return sum((part.cost for part in filled), 0.0)


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
