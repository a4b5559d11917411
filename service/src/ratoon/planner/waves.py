"""A forest that does not fit, cut into stages: prefixes that stay, and waves of whole sibling
subtrees.

A stage and what stays for it are within the budget, or a single path, which cannot be less.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ratoon.rollout.packed import Forest, Stage


def cut_into_stages(forest: Forest, budget: int, small_tokens: int) -> tuple[Stage, ...]:
    """Cut `forest` so that no more than `budget` packed tokens are held at a time.

    A subtree that fits beside the prefixes above it joins a wave; of one that does not, the root
    becomes a prefix. A root of up to `small_tokens` that directly follows the prefix above it joins
    that one instead, where its siblings leave room: it stays longer, but saves a forward.
    """
    return _Cutter(forest, budget, small_tokens).run()


def resident_tokens(stages: Sequence[Stage]) -> list[int]:
    """Tokens of the prefixes that stay while each stage is run."""
    resident: list[int] = []
    for stage in stages:
        parent = stage.parent
        above = 0 if parent < 0 else resident[parent] + stages[parent].num_tokens
        resident.append(above)
    return resident


def peak_tokens(stages: Sequence[Stage]) -> int:
    """Most tokens held at a time."""
    resident = resident_tokens(stages)
    return max(
        (above + part.num_tokens for above, part in zip(resident, stages, strict=True)), default=0
    )


def peak_states(stages: Sequence[Stage], forest: Forest) -> int:
    """Most nodes at a time from whose ends later stages continue, where a layer passes on a state
    at each."""
    starts = np.array([stage.start for stage in stages], np.int64)
    home = np.searchsorted(starts, forest.node_start, side="right") - 1
    parent = forest.node_parent
    handed = np.unique(parent[(parent >= 0) & (home[parent] != home)])
    of_stage = np.bincount(home[handed], minlength=len(stages)).tolist()
    # What a stage hands on stays as long as what was handed on to it.
    for index, stage in enumerate(stages):
        of_stage[index] += of_stage[stage.parent] if stage.parent >= 0 else 0
    return max(of_stage, default=0)


def runs_of(stages: Sequence[Stage]) -> Iterator[tuple[int, bool]]:
    """Each stage's forward, and its backward (True) once nothing still to come descends from it."""
    parents = {stage.parent for stage in stages}
    still_open: list[int] = []
    for index, stage in enumerate(stages):
        while still_open and still_open[-1] != stage.parent:
            yield still_open.pop(), True
        yield index, False
        if index in parents:
            still_open.append(index)
        else:
            yield index, True
    for index in reversed(still_open):
        yield index, True


def first_misplaced(stages: Sequence[Stage], num_tokens: int) -> int | None:
    """The first stage that is no part of a partition of [0, num_tokens) in nested order.

    Nested: a parent is open, that is, no stage since has had a parent above it. None: all are
    well; `len(stages)`: tokens are left over. What no stages at all leave over is well.
    """
    stop = 0
    still_open: list[int] = []
    for index, stage in enumerate(stages):
        while still_open and still_open[-1] != stage.parent:
            still_open.pop()
        is_placed = stage.start == stop < stage.stop <= num_tokens
        if not is_placed or (stage.parent >= 0 and not still_open):
            return index
        still_open.append(index)
        stop = stage.stop
    return len(stages) if stages and stop != num_tokens else None


def fits_forest(stages: Sequence[Stage], forest: Forest) -> bool:
    """Whether every node is whole, with its parent in the same stage or in one that stays."""
    if first_misplaced(stages, forest.num_tokens) is not None:
        return False
    starts = np.array([stage.start for stage in stages], np.int64)
    home = np.searchsorted(starts, forest.node_start, side="right") - 1
    if (home != np.searchsorted(starts, forest.node_stop - 1, side="right") - 1).any():
        return False
    lines = [frozenset[int]()] * len(stages)
    for index, stage in enumerate(stages):
        above = lines[stage.parent] if stage.parent >= 0 else frozenset[int]()
        lines[index] = above | {index}
    return all(
        parent < 0 or int(home[parent]) in lines[int(home[node])]
        for node, parent in enumerate(forest.node_parent.tolist())
    )


@dataclass(slots=True)
class _Cut:
    """A stage that still grows."""

    start: int
    stop: int
    parent: int


@dataclass(slots=True, kw_only=True)
class _Prefix:
    """A prefix whose subtree is being cut: index, one past its subtree, tokens that stay."""

    index: int
    end: int
    resident: int


class _Cutter:
    """Walks the nodes in packed order. States: before, within and after `run`, once."""

    def __init__(self, forest: Forest, budget: int, small_tokens: int) -> None:
        self._start: list[int] = forest.node_start.tolist()
        self._stop: list[int] = forest.node_stop.tolist()
        self._end: list[int] = forest.node_end.tolist()
        self._longest = _longest_paths(forest)
        self._node_starts = forest.node_start
        self._budget = budget
        self._small_tokens = small_tokens
        self._stages: list[_Cut] = []
        self._prefixes: list[_Prefix] = []

    def run(self) -> tuple[Stage, ...]:
        node = 0
        while node < len(self._start):
            start, end = self._start[node], self._end[node]
            while self._prefixes and start >= self._prefixes[-1].end:
                self._prefixes.pop()
            if self._joins_prefix(node):
                self._grow_prefix(self._stop[node] - start)
            elif end == self._stop[node] or self._resident + end - start <= self._budget:
                self._add_to_wave(start, end)
                node = bisect_left(self._start, end)
                continue
            else:
                self._open_prefix(node)
            node += 1
        return tuple(
            Stage(start=cut.start, stop=cut.stop, parent=cut.parent) for cut in self._stages
        )

    @property
    def _resident(self) -> int:
        return self._prefixes[-1].resident if self._prefixes else 0

    @property
    def _parent(self) -> int:
        return self._prefixes[-1].index if self._prefixes else -1

    def _joins_prefix(self, node: int) -> bool:
        """Whether the node directly follows the innermost prefix and had better be part of it."""
        start, stop, end = self._start[node], self._stop[node], self._end[node]
        if not self._prefixes or self._stages[self._parent].stop != start:
            return False
        prefix = self._prefixes[-1]
        if end == prefix.end:
            # An only child: nothing is run without it.
            return True
        if stop - start > self._small_tokens or self._resident + end - start <= self._budget:
            return False
        first, last = np.searchsorted(self._node_starts, [end, prefix.end])
        room = self._budget - prefix.resident - (stop - start)
        return int(self._longest[first:last].max()) <= room

    def _grow_prefix(self, num_tokens: int) -> None:
        prefix = self._prefixes[-1]
        self._stages[prefix.index].stop += num_tokens
        prefix.resident += num_tokens

    def _open_prefix(self, node: int) -> None:
        start, stop = self._start[node], self._stop[node]
        cut = _Cut(start, stop, self._parent)
        resident = self._resident + stop - start
        self._prefixes.append(
            _Prefix(index=len(self._stages), end=self._end[node], resident=resident)
        )
        self._stages.append(cut)

    def _add_to_wave(self, start: int, end: int) -> None:
        """Add whole subtrees to the wave before them, or else begin one."""
        parent = self._parent
        last = self._stages[-1] if self._stages else None
        # With the same parent it is a wave, or a single path that leaves no room.
        if (
            last is not None
            and last.parent == parent
            and self._resident + end - last.start <= self._budget
        ):
            last.stop = end
        else:
            self._stages.append(_Cut(start, end, parent))


def _longest_paths(forest: Forest) -> NDArray[np.int64]:
    """Tokens of the longest path down from the start of each node, int64 [M]."""
    longest = forest.node_stop - forest.node_start
    parents: list[int] = forest.node_parent.tolist()
    own: list[int] = longest.tolist()
    below = [0] * len(own)
    for node in range(len(own) - 1, -1, -1):
        parent = parents[node]
        if parent >= 0:
            below[parent] = max(below[parent], own[node] + below[node])
    return longest + np.array(below, np.int64)
