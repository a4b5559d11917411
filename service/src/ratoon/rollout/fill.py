"""Micro-batches filled with groups in sorted order, so that those that share prefixes meet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ratoon.rollout.costs import CostModel, Work
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
