"""Offsets of the sections of a packed schedule, as one small tensor."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

# The numbers of kv heads that the splits of the backward are cut for, most heads first.
SPLIT_KV_HEADS: Final = (8, 4, 2, 1)


@dataclass(frozen=True, slots=True)
class Section:
    """Rows of a table: the first lies `offset` int32 from its start."""

    offset: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelSections:
    """Sections of one split of the backward.

    Attributes:
        pieces: Rows of 8 int32.
        split_tiles: Rows of 4 int32.
        num_slots: Slots that all split key tiles take together.
    """

    pieces: Section
    split_tiles: Section
    num_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleHeader:
    """Values that a launcher reads of a packed schedule; the rows are those of `Schedule`.

    Attributes:
        num_queries: Q.
        num_keys: S.
        delta: Packed index of the first query minus that of the first key.
        num_query_tiles: Tiles of the forward's grid of queries.
        num_key_tiles: Tiles of the grid of keys.
        end: Rows of 1 int32.
        runs: Rows of 2 int32.
        forward_items: Rows of 4 int32.
        sweep: The backward with dQ.
        levels: The deterministic backward, for each of `SPLIT_KV_HEADS`.
    """

    num_queries: int
    num_keys: int
    delta: int
    num_query_tiles: int
    num_key_tiles: int
    end: Section
    runs: Section
    forward_items: Section
    sweep: LevelSections
    levels: tuple[LevelSections, ...]

    def level(self, num_kv_heads: int) -> LevelSections:
        """Returns the split for that many kv heads: the next smaller one, which cuts finer."""
        fits = (i for i, heads in enumerate(SPLIT_KV_HEADS) if heads <= num_kv_heads)
        return self.levels[next(fits)]

    def to_tensor(self) -> Tensor:
        """Returns int64 [16 + 5 per level] on the CPU."""
        numbers = [
            *(self.num_queries, self.num_keys, self.delta),
            *(self.num_query_tiles, self.num_key_tiles),
        ]
        for section in (self.end, self.runs, self.forward_items):
            numbers += [section.offset, section.count]
        for level in (self.sweep, *self.levels):
            for section in (level.pieces, level.split_tiles):
                numbers += [section.offset, section.count]
            numbers.append(level.num_slots)
        return torch.tensor(numbers, dtype=torch.int64)

    @classmethod
    def from_tensor(cls, header: Tensor) -> "ScheduleHeader":
        """Reads what `to_tensor` wrote."""
        numbers = iter(header.tolist())
        num_queries, num_keys, delta, num_query_tiles, num_key_tiles = (
            next(numbers) for _ in range(5)
        )
        end, runs, forward_items = (Section(next(numbers), next(numbers)) for _ in range(3))
        sweep, *levels = (
            LevelSections(
                pieces=Section(next(numbers), next(numbers)),
                split_tiles=Section(next(numbers), next(numbers)),
                num_slots=next(numbers),
            )
            for _ in ("sweep", *SPLIT_KV_HEADS)
        )
        return cls(
            num_queries=num_queries,
            num_keys=num_keys,
            delta=delta,
            num_query_tiles=num_query_tiles,
            num_key_tiles=num_key_tiles,
            end=end,
            runs=runs,
            forward_items=forward_items,
            sweep=sweep,
            levels=tuple(levels),
        )
