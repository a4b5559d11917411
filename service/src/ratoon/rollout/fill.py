"""Micro-batches filled with groups in sorted order, so that those that share prefixes meet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ratoon.rollout.costs import CostModel, Work, num_pairs
from ratoon.rollout.packed import Stage
from ratoon.rollout.split import GroupSplitter, Part


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _SizedPart:
    """A part, what running it by itself takes, and its first and last place."""

    part: Part
    work: Work
    first: int
    last: int


@dataclass(slots=True, kw_only=True)
class _Open:
    """The micro-batch that parts still join, and the last place in it."""

    parts: list[Part] = field(default_factory=list[Part])
    work: Work = field(default_factory=lambda: Work(tokens=0, pairs=0, rows=0))
    last: int = -1


class Filler:
    """Fills micro-batches under the splitter's budget; remembers how it has split groups."""

    def __init__(self, splitter: GroupSplitter, micro_batch_tokens: int) -> None:
        """`micro_batch_tokens`: those asked for, of which the splitter's budget is what fits."""
        self.micro_batch_tokens = micro_batch_tokens
        self.budget = splitter.budget
        self.costs: CostModel = splitter.costs
        self._known = splitter.known
        self._splitter = splitter
        self._split: dict[bytes, tuple[_SizedPart, ...]] = {}
        self._shared: dict[tuple[int, int], Work] = {}

    def fill(self, groups: Iterable[NDArray[np.int64]]) -> list[Filled]:
        """Groups (their places, ascending), by first place, join the open micro-batch or open the
        next."""
        filled: list[Filled] = []
        current = _Open()
        for group in groups:
            for sized in self._parts(group):
                if sized.part.stages:
                    filled += [*self._close(current), self._streamed(sized)]
                    current = _Open()
                    continue
                work = self._joined(current, sized)
                if current.parts and work.tokens > self.budget:
                    filled += self._close(current)
                    current = _Open()
                    work = sized.work
                current.parts.append(sized.part)
                current.work = work
                current.last = max(current.last, sized.last)
        return filled + self._close(current)

    def _parts(self, group: NDArray[np.int64]) -> tuple[_SizedPart, ...]:
        key = group.tobytes()
        found = self._split.get(key)
        if found is None:
            found = self._split[key] = tuple(
                _SizedPart(
                    part=part,
                    work=self._known.work(part.places),
                    first=int(part.places[0]),
                    last=int(part.places[-1]),
                )
                for part in self._splitter.split(group)
            )
        return found

    def _joined(self, current: _Open, sized: _SizedPart) -> Work:
        """What running them all together takes."""
        if not current.parts:
            return sized.work
        if sized.first < current.last:
            places = [*(part.places for part in current.parts), sized.part.places]
            return self._known.work(np.sort(np.concatenate(places)))
        shared = self._shared_work(current.last, sized.first)
        return Work(
            tokens=current.work.tokens + sized.work.tokens - shared.tokens,
            pairs=current.work.pairs + sized.work.pairs - shared.pairs,
            rows=current.work.rows + sized.work.rows - shared.rows,
        )

    def _shared_work(self, last: int, first: int) -> Work:
        """Of what the place `first` shares with `last`, which is before it."""
        found = self._shared.get((last, first))
        if found is None:
            depth = self._known.sizes.lcp[last + 1 : first + 1].min(keepdims=True)
            rows = self._known.sizes.rows_within(np.array([first]), depth)
            found = Work(tokens=int(depth[0]), pairs=num_pairs(depth), rows=int(rows[0]))
            self._shared[last, first] = found
        return found

    def _close(self, current: _Open) -> list[Filled]:
        """What it holds, run at once; nothing where nothing has joined."""
        if not current.parts:
            return []
        cost = self.costs.packed(current.work)
        return [Filled(parts=tuple(current.parts), work=current.work, cost=cost)]

    def _streamed(self, sized: _SizedPart) -> Filled:
        cost = self.costs.streamed(sized.work, sized.part.stages)
        return Filled(parts=(sized.part,), work=sized.work, cost=cost)
