"""Micro-batches filled with groups in sorted order, so that those that share prefixes meet.

A group that exceeds the budget is streamed, or cut into several micro-batches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ratoon.planner.costs import CostModel, RunSums, SequenceSizes, TokenLimits, Work, num_pairs
from ratoon.planner.waves import cut_into_stages, peak_states, peak_tokens
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.forest import build_forest
from ratoon.rollout.packed import Forest, Stage
from ratoon.rollout.prefixes import SortedPrefixes

# Subtrees within subtrees that may each be run in another way; deeper ones are as those above.
_MAX_DEPTH = 8
# Times that a forest is cut again into smaller stages, to leave room for states.
_MAX_CUTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Sequences that are packed together, by place in the sorted order, ascending, int64.

    `stages` as of a `MicroBatch`: empty where all are run at once. `work`: of all of them.
    """

    places: NDArray[np.int64]
    stages: tuple[Stage, ...]
    work: Work


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    parts: tuple[Part, ...]
    cost: float
    # Whether the device cannot hold a part.
    is_refused: bool


class KnownWork:
    """What sequences of one batch take, by place, ascending; each is found once."""

    def __init__(self, batch: RolloutBatch, prefixes: SortedPrefixes, sizes: SequenceSizes) -> None:
        self.sizes = sizes
        self._batch = batch
        self._prefixes = prefixes
        self._sums: dict[bytes, RunSums] = {}
        self._shared: dict[tuple[int, int], Work] = {}
        self._forests: dict[bytes, Forest] = {}

    def sums(self, places: NDArray[np.int64]) -> RunSums:
        key = places.tobytes()
        found = self._sums.get(key)
        if found is None:
            found = self._sums[key] = self.sizes.run_sums(places)
        return found

    def shared(self, last: int, first: int) -> Work:
        """Work of what the place `first` shares with `last`, which is before it."""
        found = self._shared.get((last, first))
        if found is None:
            depth = self.sizes.lcp[last + 1 : first + 1].min(keepdims=True)
            rows = self.sizes.rows_within(np.array([first]), depth)
            found = Work(
                tokens=int(depth[0]),
                pairs=num_pairs(depth),
                rows=int(rows[0]),
                near_pairs=int(self.sizes.near_pairs(depth)[0]),
            )
            self._shared[last, first] = found
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
        self, known: KnownWork, *, tokens: int, costs: CostModel, limits: TokenLimits
    ) -> None:
        """`tokens`: packed ones that are asked to be held at a time, at most."""
        self.known = known
        self.budget = max(1, min(tokens, limits.at_once))
        self.costs = costs
        self._limits = limits

    def split(self, places: NDArray[np.int64]) -> tuple[Part, ...]:
        """The cheapest parts of the sequences at `places`; one, at once, where they fit."""
        if self._fits(places):
            work = self.known.sums(places).work(0, len(places))
            return (Part(places=places, stages=(), work=work),)
        return self._cheapest(places, _MAX_DEPTH).parts

    def _fits(self, places: NDArray[np.int64]) -> bool:
        return self._run_fits(self.known.sums(places), 0, len(places))

    def _run_fits(self, sums: RunSums, start: int, stop: int) -> bool:
        return stop - start == 1 or sums.num_tokens(start, stop) <= self.budget

    def _cheapest(self, places: NDArray[np.int64], depth: int) -> _Choice:
        """The cheapest of three ways: cut where the budget ends; streamed; each subtree apart."""
        if self._fits(places):
            return self._at_once(places, [0, len(places)])
        choices = [self._at_once(places, self._cuts(places)), self._streamed(places)]
        if depth > 0:
            choices.append(self._subtrees(places, depth))
        return min(choices, key=lambda choice: (choice.is_refused, choice.cost))

    def _at_once(self, places: NDArray[np.int64], bounds: Sequence[int]) -> _Choice:
        """Runs of `places` between neighbouring `bounds`."""
        sums = self.known.sums(places)
        parts = tuple(
            Part(places=places[start:stop], stages=(), work=sums.work(start, stop))
            for start, stop in pairwise(bounds)
        )
        return _Choice(
            parts=parts,
            cost=sum(self.costs.packed(part.work) for part in parts),
            is_refused=any(part.work.tokens > self._limits.at_once for part in parts),
        )

    def _streamed(self, places: NDArray[np.int64]) -> _Choice:
        forest = self.known.forest(places)
        limits, small = self._limits, self.costs.call_tokens
        room = max(1, min(self.budget, limits.streamed))
        stages = cut_into_stages(forest, room, small)
        for _ in range(_MAX_CUTS):
            over = self._held(stages, forest) - limits.streamed
            if over <= 0 or room == 1:
                break
            # Smaller stages hand on more states: this is tried again.
            room = max(1, room - over)
            stages = cut_into_stages(forest, room, small)
        work = self.known.sums(places).work(0, len(places))
        # One stage is all at once.
        is_streamed = len(stages) > 1
        most = self._limits.streamed if is_streamed else self._limits.at_once
        return _Choice(
            parts=(Part(places=places, stages=stages if is_streamed else (), work=work),),
            cost=self.costs.streamed(work, stages),
            is_refused=(self._held(stages, forest) if is_streamed else peak_tokens(stages)) > most,
        )

    def _held(self, stages: Sequence[Stage], forest: Forest) -> int:
        """Most tokens held at a time, those that states stand for among them."""
        of_state = self._limits.of_state
        states = peak_states(stages, forest) * of_state if of_state else 0
        return peak_tokens(stages) + states

    def _subtrees(self, places: NDArray[np.int64], depth: int) -> _Choice:
        """Subtrees below the common prefix, which each part repeats; neighbours that fit meet."""
        sums = self.known.sums(places)
        trunk = min(sums.shared[1:])
        firsts = [i for i, shared in enumerate(sums.shared) if i == 0 or shared == trunk]
        found: list[_Choice] = []
        opened = 0
        for start, stop in pairwise([*firsts, len(places)]):
            if self._run_fits(sums, opened, stop):
                continue
            if opened < start:
                found.append(self._at_once(places, [opened, start]))
            opened = start
            if not self._run_fits(sums, start, stop):
                found.append(self._cheapest(places[start:stop], depth - 1))
                opened = stop
        if opened < len(places):
            found.append(self._at_once(places, [opened, len(places)]))
        return _Choice(
            parts=tuple(part for choice in found for part in choice.parts),
            cost=sum(choice.cost for choice in found),
            is_refused=any(choice.is_refused for choice in found),
        )

    def _cuts(self, places: NDArray[np.int64]) -> list[int]:
        """Bounds of runs of at most the budget's packed tokens, or of one place."""
        sums = self.known.sums(places)
        bounds = [0]
        while bounds[-1] < len(places):
            start = bounds[-1]
            most = self.budget - sums.shared[start] + sums.tokens[start]
            bounds.append(max(start + 1, bisect_right(sums.tokens, most) - 1))
        return bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """One micro-batch: the parts that it packs together, and what running them takes."""

    # Several, or one with stages.
    parts: tuple[Part, ...]
    work: Work
    cost: float

    @property
    def places(self) -> NDArray[np.int64]:
        """Places in the sorted order, ascending."""
        return np.sort(np.concatenate([part.places for part in self.parts]))

    @property
    def stages(self) -> tuple[Stage, ...]:
        return self.parts[0].stages


@dataclass(slots=True, kw_only=True)
class _Open:
    """The micro-batch that parts still join, and the last place in it."""

    parts: list[Part] = field(default_factory=list[Part])
    work: Work = field(default_factory=lambda: Work(tokens=0, pairs=0, rows=0))
    last: int = -1
    # Places of the first so many parts, ascending.
    _sorted: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    _num_sorted: int = 0

    def around(self, first: int, last: int) -> NDArray[np.int64]:
        """Places in [first, last], and the nearest on either side, ascending."""
        added = [part.places for part in self.parts[self._num_sorted :]]
        # Mostly two ascending runs, which a stable sort merges.
        self._sorted = np.sort(np.concatenate([self._sorted, *added]), kind="stable")
        self._num_sorted = len(self.parts)
        start, stop = np.searchsorted(self._sorted, [first, last])
        return self._sorted[max(0, int(start) - 1) : int(stop) + 1]


class Filler:
    """Fills micro-batches under the splitter's budget; remembers how it has split groups."""

    def __init__(self, splitter: GroupSplitter, micro_batch_tokens: int) -> None:
        """`micro_batch_tokens`: those asked for, of which the splitter's budget is what fits."""
        self.micro_batch_tokens = micro_batch_tokens
        self.budget = splitter.budget
        self.costs: CostModel = splitter.costs
        self._known = splitter.known
        self._splitter = splitter
        self._split: dict[bytes, tuple[Part, ...]] = {}

    def fill(self, groups: Iterable[NDArray[np.int64]]) -> list[Filled]:
        """Groups (their places, ascending), by first place, join the open micro-batch or open the
        next."""
        filled: list[Filled] = []
        current = _Open()
        for group in groups:
            for part in self._parts(group):
                if part.stages:
                    filled += [*self._close(current), self._streamed(part)]
                    current = _Open()
                    continue
                work = self._joined(current, part)
                if current.parts and work.tokens > self.budget:
                    filled += self._close(current)
                    current = _Open()
                    work = part.work
                current.parts.append(part)
                current.work = work
                current.last = max(current.last, int(part.places[-1]))
        return filled + self._close(current)

    def _parts(self, group: NDArray[np.int64]) -> tuple[Part, ...]:
        key = group.tobytes()
        found = self._split.get(key)
        if found is None:
            found = self._split[key] = self._splitter.split(group)
        return found

    def _joined(self, current: _Open, part: Part) -> Work:
        """What running them all together takes."""
        if not current.parts:
            return part.work
        first = int(part.places[0])
        if first < current.last:
            # What is further away shares with its neighbours as before.
            around = current.around(first, int(part.places[-1]))
            work_of = self._known.sizes.work
            added = work_of(np.sort(np.concatenate([around, part.places])))
            shared = work_of(around)
        else:
            added, shared = part.work, self._known.shared(current.last, first)
        return Work(
            tokens=current.work.tokens + added.tokens - shared.tokens,
            pairs=current.work.pairs + added.pairs - shared.pairs,
            rows=current.work.rows + added.rows - shared.rows,
            near_pairs=current.work.near_pairs + added.near_pairs - shared.near_pairs,
        )

    def _close(self, current: _Open) -> list[Filled]:
        """What it holds, run at once; nothing where nothing has joined."""
        if not current.parts:
            return []
        cost = self.costs.packed(current.work)
        return [Filled(parts=tuple(current.parts), work=current.work, cost=cost)]

    def _streamed(self, part: Part) -> Filled:
        return Filled(
            parts=(part,), work=part.work, cost=self.costs.streamed(part.work, part.stages)
        )
