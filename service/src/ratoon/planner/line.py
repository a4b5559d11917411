"""All run sequences as one line, group after group, with a model of what parts of it cost.

The model only proposes where to cut: micro-batches that have been filled decide.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ratoon.planner.costs import SequenceSizes
from ratoon.planner.fill import Filler
from ratoon.rollout.batch import offsets_of
from ratoon.rollout.prefixes import shared_with_previous

_BISECTIONS = 40
# Share of a run's cost at which bisection ends.
_PRECISION = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Atoms:
    """Sequences of one group each that stay together: A parts of the line, in order."""

    # int64 [number of sequences] each: places in the sorted order, ascending.
    places: tuple[NDArray[np.int64], ...]
    # int64 [A] each: index of the first sequence on the line, index of the group.
    start: NDArray[np.int64]
    group: NDArray[np.int64]
    # float64 [A] each: modelled, of the atom beside the trunk of its group; of the trunk, which a
    # rank runs once, however many atoms of the group it has. Groups that are one atom have none.
    cost: NDArray[np.float64]
    trunk: NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """n run sequences: groups by their first place, each group's places ascending."""

    groups: tuple[NDArray[np.int64], ...]
    # int64 [n]; int64 [G + 1]: group g is [bounds[g], bounds[g + 1]).
    places: NDArray[np.int64]
    bounds: NDArray[np.int64]
    # int64 [n]: index of the group; tokens shared with the sequence before, which of the first of
    # a group is of another one; of which rows of the LM head. int64 [n]: rows of all tokens.
    group: NDArray[np.int64]
    shared: NDArray[np.int64]
    shared_rows: NDArray[np.int64]
    lengths: NDArray[np.int64]
    rows: NDArray[np.int64]

    @property
    def starts(self) -> NDArray[np.int64]:
        """Index of the first sequence of each group, int64 [G]."""
        return self.bounds[:-1]


def lay_out(groups: Sequence[NDArray[np.int64]], sizes: SequenceSizes) -> Line:
    """The line of at least one group; groups by first place, their places ascending."""
    bounds = offsets_of(np.array([len(group) for group in groups], np.int64))
    places = np.concatenate(groups)
    shared = np.concatenate([shared_with_previous(sizes.lcp, group) for group in groups])
    sorted_places = np.sort(places)
    shared_of_all = shared_with_previous(sizes.lcp, sorted_places)
    first = bounds[:-1]
    shared[first] = shared_of_all[np.searchsorted(sorted_places, places[first])]
    lengths = sizes.lengths[places]
    return Line(
        groups=tuple(groups),
        places=places,
        bounds=bounds,
        group=np.repeat(np.arange(len(groups)), np.diff(bounds)),
        shared=shared,
        shared_rows=sizes.rows_within(places, shared),
        lengths=lengths,
        rows=sizes.rows_within(places, lengths),
    )


class LineCosts:
    """Modelled costs of the parts of a line; [i, j) costs before[j] - before[i] + repeated[i].

    float64 [n + 1] each: `before` is of all sequences before, each beside the one before it;
    `repeated` of what is shared with the sequence before, 0 at the end.
    """

    def __init__(self, line: Line, num_ranks: int, filler: Filler) -> None:
        costs = filler.costs
        own_tokens = line.lengths - line.shared
        own_tokens[line.starts] = line.lengths[line.starts]
        group_tokens = np.add.reduceat(own_tokens, line.starts)
        held = min(filler.budget, int(group_tokens.sum()) // num_ranks)
        # A micro-batch's own cost is shared by the tokens that it has room for.
        of_call = costs.call / filler.budget
        token = costs.token + costs.recompute.of(held, is_streamed=False) + of_call

        def path_cost(depth: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.float64]:
            return token * depth + costs.of_pairs(depth) + costs.row * rows

        repeated = path_cost(line.shared, line.shared_rows)
        own = path_cost(line.lengths, line.rows) - repeated
        # How groups that do not fit are run is not modelled but known.
        for g in np.flatnonzero(group_tokens > filler.budget).tolist():
            of_group = slice(line.bounds[g], line.bounds[g + 1])
            modelled = float(own[of_group].sum() + repeated[line.bounds[g]])
            scale = sum(part.cost for part in filler.fill([line.groups[g]])) / modelled
            own[of_group] *= scale
            repeated[of_group] *= scale
        self._line = line
        self.before: NDArray[np.float64] = np.concatenate([[0.0], np.cumsum(own)])
        self.repeated: NDArray[np.float64] = np.append(repeated, 0.0)

    def whole_groups(self) -> Atoms:
        """Each group an atom."""
        line = self._line
        return Atoms(
            places=line.groups,
            start=line.starts,
            group=np.arange(len(line.groups)),
            cost=np.diff(self.before[line.bounds]),
            trunk=np.zeros(len(line.groups)),
        )

    def split_groups(self, cuts: NDArray[np.int64]) -> Atoms:
        """Groups that a cut is within, split there and into the subtrees below their trunk; others
        whole. `cuts`: indexes of sequences, int64."""
        line = self._line
        is_start = np.zeros(len(line.places), np.bool_)
        is_start[line.starts] = True
        trunk = np.zeros(len(line.places))
        is_split = np.zeros(len(line.places), np.bool_)
        for g in np.unique(line.group[cuts[~is_start[cuts]]]).tolist():
            first, stop = line.bounds[g : g + 2].tolist()
            below = line.shared[first + 1 : stop]
            forks = first + 1 + np.flatnonzero(below == below.min())
            is_start[forks] = True
            trunk[first:stop] = self.repeated[forks[0]]
            is_split[first:stop] = True
        is_start[cuts] = True
        start = np.flatnonzero(is_start)
        beside_trunk = np.where(is_split, self.repeated[:-1] - trunk, 0.0)[start]
        return Atoms(
            places=tuple(np.split(line.places, start[1:])),
            start=start,
            group=line.group[start],
            cost=np.diff(self.before[np.append(start, len(line.places))]) + beside_trunk,
            trunk=trunk[start],
        )

    def runs(self, starts: NDArray[np.int64], num_runs: int) -> NDArray[np.int64]:
        """Starts of the runs of which the costliest costs least: at most `num_runs`, ascending.

        Runs may start at the sequences `starts`, int64, ascending from 0. As a run pays for what it
        repeats, of two forks it may start at the shallower one though it is earlier.
        """
        before: list[float] = self.before[np.append(starts, len(self._line.places))].tolist()
        # How far a run of no cost would come from each start; the most so far, and from where.
        reach = self.before[starts] - self.repeated[starts]
        most = np.maximum.accumulate(reach)
        is_most = np.append(True, reach[1:] > most[:-1])
        best_start: list[int] = np.maximum.accumulate(
            np.where(is_most, np.arange(len(starts)), 0)
        ).tolist()
        furthest: list[float] = most.tolist()

        def runs_of(cost: float) -> list[int] | None:
            """Which of `starts` runs of up to `cost` start at, if these come to the end."""
            found: list[int] = []
            stop = 0
            while stop < len(starts):
                found.append(best_start[stop])
                reached = bisect_right(before, furthest[stop] + cost) - 1
                if reached <= stop or len(found) > num_runs:
                    return None
                stop = reached
            return found if len(found) <= num_runs else None

        best = [0]
        low, high = 0.0, before[-1] + float(self.repeated[0])
        for _ in range(_BISECTIONS):
            if high - low < high * _PRECISION:
                break
            middle = (low + high) / 2
            found = runs_of(middle)
            if found is None:
                low = middle
            else:
                high, best = middle, found
        return starts[best]
