"""The work lists of the CUDA kernels of tree attention, made on the host once per micro-batch.

Over all items of the forward, and over all pieces of each split of the backward, every attended
pair is computed once.

The forward is query-stationary: an item is a query tile with its runs of key tiles. The backward
is key-stationary: a piece is a key tile with a part of the query tiles that it sweeps. Lists are
longest first, so that blocks that take the next item when they are done end at about one time; but
the backward with dQ goes through the queries window by window, so that dQ stays in the cache. Where
a prompt's key tiles sweep more than that, they are cut into pieces, whose dK and dV are added up.
A window leaves a key tile the query tiles within reach, of each branch some: pieces as well.
"""

import bisect
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from ratoon_kernels.tiles import (
    BoolArray,
    Int32Array,
    Int64Array,
    Span,
    Sweeps,
    TileTable,
    build_tile_table,
    reduce_key_tiles,
    sweep_query_rows,
)
from ratoon_kernels.windows import Window, pair_tiles, table_of_pairs

TILE_SIZE: Final = 128
# Query rows of a stride of the backward: three steps of a kernel that takes 80 rows at a time, or
# five of one that takes 48. A sweep is cut between strides, so no cut leaves part of a step.
BACKWARD_STRIDE: Final = 240
# The backward with dQ goes through the queries in windows of at most this many strides: Q, dO and
# fp32 dQ of one, for four query heads of 128, are 8 MB, and stay in an H200's L2 cache while all
# key tiles pass over them.
_MAX_WINDOW: Final = 8
# Nor do windows exceed this part of the forest, so that no piece outlasts the others; but below the
# least, adding up dK and dV costs more than it brings.
_WINDOW_PART: Final = 128
_MIN_WINDOW: Final = 2
# The kernels keep eight query rows together.
_ROWS_TOGETHER: Final = 8
# In the deterministic backward a key tile is split when it holds more than an eighth of the mean
# work of one of an H200's SMs: with pieces no longer than that, longest first leaves SMs idle for a
# few percent of the time.
_PIECES_IN_FLIGHT: Final = 132 * 8
# Below this many strides a piece costs more to start and to add up than it takes off the longest.
_MIN_PIECE: Final = 1
# Sections start at 16 bytes, so that kernels read rows of 4 and 8 as vectors.
_ALIGNMENT: Final = 4
# The numbers of kv heads that the splits of the backward are cut for, most heads first.
SPLIT_KV_HEADS: Final = (8, 4, 2, 1)


@dataclass(frozen=True, slots=True)
class Section:
    """Rows of a table: the first lies `offset` int32 from its start."""

    offset: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkSections:
    """Sections of one work list of the backward.

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
        start: Rows of 1 int32; none without a window.
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
    start: Section
    sweep: WorkSections
    levels: tuple[WorkSections, ...]

    def level(self, num_kv_heads: int) -> WorkSections:
        """Returns the split for that many kv heads: the next smaller one, which cuts finer."""
        fits = (i for i, heads in enumerate(SPLIT_KV_HEADS) if heads <= num_kv_heads)
        return self.levels[next(fits)]

    def to_tensor(self) -> Tensor:
        """Returns int64 [18 + 5 per level] on the CPU."""
        numbers = [
            *(self.num_queries, self.num_keys, self.delta),
            *(self.num_query_tiles, self.num_key_tiles),
        ]
        for section in (self.end, self.runs, self.forward_items, self.start):
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
        end, runs, forward_items, start = (Section(next(numbers), next(numbers)) for _ in range(4))
        sweep, *levels = (
            WorkSections(
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
            start=start,
            sweep=sweep,
            levels=tuple(levels),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkList:
    """The work of a backward: pieces of key tiles, and which key tiles are cut.

    Attributes:
        pieces: int32 [P, 8]; key tile, query rows [start, stop) that the piece sweeps, its slot or
            -1 where the key tile is whole, query rows [full_start, full_stop) that need no mask
            (not cut to the piece, maybe empty), 0, 0. A kernel takes whole steps from `start` on;
            the last one may reach past `stop`, but only to queries that attend no key of the tile.
            The deterministic backward's are longest first. Those of the backward with dQ are in the
            order of the windows of queries that they begin in, then of their key tiles; column 6 of
            row i is the index of the i-th longest piece, and all pieces of a split key tile share
            one slot.
        split_tiles: int32 [number of split key tiles, 4]; key tile, first slot, number of slots, 0.
    """

    pieces: Int32Array
    split_tiles: Int32Array

    @property
    def num_slots(self) -> int:
        """Slots of all split key tiles: without a window never more than there are key tiles."""
        return int(self.split_tiles[:, 2].sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Work of Q queries against S keys.

    Attributes:
        num_queries: Q.
        num_keys: S.
        delta: Packed index of the first query minus that of the first key.
        end: int32 [S rounded up to whole tiles]; one past the last query row that attends each
            key row, clipped to [0, Q], 0 for the keys that fill the last tile up.
        tiles: The forward's grid.
        runs: int32 [number of runs, 2]; first key tile, 2 * number of key tiles + is_full.
        forward_items: int32 [number of query tiles, 4]; query tile, runs [start, stop), number of
            key tiles, which may be 0.
        start: int32; the first key row that each query row attends, clipped to [0, S], with zeros
            behind for whole tiles and steps. Empty without a window.
        sweep: The backward with dQ.
        levels: The deterministic backward, cut for each number of kv heads in `SPLIT_KV_HEADS`.
    """

    num_queries: int
    num_keys: int
    delta: int
    end: Int32Array
    tiles: TileTable
    runs: Int32Array
    forward_items: Int32Array
    start: Int32Array
    sweep: WorkList
    levels: tuple[WorkList, ...]

    def pack(self) -> tuple[Int32Array, ScheduleHeader]:
        """Returns int32 of all sections one behind the other, and where each of them lies."""
        parts: list[Int32Array] = []

        def place(rows: Int32Array) -> Section:
            offset = sum(map(len, parts))
            parts.append(np.pad(rows.ravel(), (0, -rows.size % _ALIGNMENT)))
            return Section(offset, len(rows))

        def place_list(work: WorkList) -> WorkSections:
            return WorkSections(
                pieces=place(work.pieces),
                split_tiles=place(work.split_tiles),
                num_slots=work.num_slots,
            )

        header = ScheduleHeader(
            num_queries=self.num_queries,
            num_keys=self.num_keys,
            delta=self.delta,
            num_query_tiles=len(self.forward_items),
            num_key_tiles=len(self.end) // self.tiles.tile_size,
            end=place(self.end[:, None]),
            runs=place(self.runs),
            forward_items=place(self.forward_items),
            start=place(self.start[:, None]),
            sweep=place_list(self.sweep),
            levels=tuple(map(place_list, self.levels)),
        )
        return np.concatenate(parts), header


def build_schedule(
    end_T: Int32Array,
    queries: Span,
    keys: Span,
    window: Window | None = None,
    *,
    tile_size: int = TILE_SIZE,
    stride: int = BACKWARD_STRIDE,
) -> Schedule:
    """Builds the work lists of a range of queries against a range of keys.

    Args:
        end_T: int32 of shape [T]; one past the last packed query that attends each key.
        queries: Packed range of the queries.
        keys: Packed range of the keys.
        window: What cuts the keys of each query, if anything does.
        tile_size: Rows of the forward's tiles and of the backward's key tiles.
        stride: Query rows between which the backward's sweeps may be cut.
    """
    num_queries, num_keys = len(queries), len(keys)
    end = np.zeros(-(-num_keys // tile_size) * tile_size, np.int32)
    own = end[:num_keys]
    np.subtract(end_T[keys.start : keys.stop], queries.start, out=own)
    np.clip(own, 0, num_queries, out=own)
    delta = queries.start - keys.start
    key_tiles = reduce_key_tiles(end, size=tile_size, num_queries=num_queries, delta=delta)
    if window is None:
        tiles = build_tile_table(key_tiles)
        sweeps = sweep_query_rows(key_tiles, _ROWS_TOGETHER)
        start = np.zeros(0, np.int32)
    else:
        pairs = pair_tiles(window, queries, keys, key_tiles, tile_size)
        tiles = table_of_pairs(pairs, tile_size, num_queries)
        sweeps = tiles.sweeps.in_rows(tile_size, num_queries)
        start = np.zeros(-(-num_queries // tile_size) * tile_size + stride, np.int32)
        first_key = window.start_T[queries.start : queries.stop] - keys.start
        start[:num_queries] = np.clip(first_key, 0, num_keys)
    num_run_tiles = tiles.run_stop - tiles.run_start
    runs = np.stack((tiles.run_start, 2 * num_run_tiles + tiles.run_is_full), axis=1)
    num_key_tiles = len(key_tiles.min_end_B)
    return Schedule(
        num_queries=num_queries,
        num_keys=num_keys,
        delta=delta,
        end=end,
        tiles=tiles,
        runs=runs.astype(np.int32),
        forward_items=_forward_items(tiles, num_run_tiles),
        start=start,
        sweep=_sweep_list(sweeps, num_key_tiles, stride),
        levels=_split_levels(sweeps, num_key_tiles, stride),
    )


def _forward_items(tiles: TileTable, num_run_tiles: Int64Array) -> Int32Array:
    tiles_before = np.concatenate((np.zeros(1, np.int64), np.cumsum(num_run_tiles)))
    start, stop = tiles.run_offsets[:-1], tiles.run_offsets[1:]
    num_tiles = tiles_before[stop] - tiles_before[start]
    items = np.stack((np.arange(tiles.num_query_tiles), start, stop, num_tiles), axis=1)
    return items[_longest_first(num_tiles)].astype(np.int32)


def _sweep_list(sweeps: Sweeps, num_key_tiles: int, stride: int) -> WorkList:
    start, length = sweeps.start_B // stride, _num_strides(sweeps, stride)
    size = min(_MAX_WINDOW, max(_MIN_WINDOW, int(length.sum()) // _WINDOW_PART))
    # A sweep that is little longer than a window is not worth a slot.
    is_cut = length > size + size // 2
    first_window = start // size
    last_window = np.where(is_cut, (start + length - 1) // size, first_window)
    num_pieces = np.where(length > 0, last_window - first_window + 1, 0)
    row = np.repeat(np.arange(len(length)), num_pieces)
    first_piece = np.cumsum(num_pieces) - num_pieces
    window = first_window[row] + np.arange(len(row)) - first_piece[row]
    order = np.lexsort((row, window))
    row, window = row[order], window[order]
    begin = np.maximum(window * size - start[row], 0)
    end = np.where(
        is_cut[row], np.minimum((window + 1) * size - start[row], length[row]), length[row]
    )
    is_split = _pieces_of_keys(sweeps, num_pieces, num_key_tiles) > 1
    first_slot = np.cumsum(is_split) - 1
    slot = np.where(is_split, first_slot, -1)[sweeps.key_B[row]]
    pieces = _pieces(sweeps, row, begin, end, slot, stride)
    pieces[:, 6] = _longest_first(pieces[:, 2] - pieces[:, 1])
    return WorkList(pieces=pieces, split_tiles=_split_tiles(is_split, first_slot, is_split))


def _num_strides(sweeps: Sweeps, stride: int) -> Int64Array:
    return -(-(sweeps.stop_B - sweeps.start_B) // stride)


def _split_levels(sweeps: Sweeps, num_key_tiles: int, stride: int) -> tuple[WorkList, ...]:
    total = int(_num_strides(sweeps, stride).sum())
    caps = [
        _raise_cap(
            sweeps,
            num_key_tiles,
            stride,
            max(_MIN_PIECE, -(-heads * total // _PIECES_IN_FLIGHT)),
        )
        for heads in SPLIT_KV_HEADS
    ]
    by_cap = {cap: _cut(sweeps, num_key_tiles, stride, cap) for cap in set(caps)}
    return tuple(by_cap[cap] for cap in caps)


def _raise_cap(sweeps: Sweeps, num_key_tiles: int, stride: int, cap: int) -> int:
    """Returns the least cap, from the given one on, whose slots are no more than the key tiles.

    So the slots' memory is bounded by that of dK and dV in fp32. Under a window no cap may do that;
    then none cuts a range.
    """
    length = _num_strides(sweeps, stride)

    def slots_fit(cap: int) -> bool:
        of_keys = _pieces_of_keys(sweeps, _num_pieces(length, cap), num_key_tiles)
        return int(of_keys[of_keys > 1].sum()) <= num_key_tiles

    longest = int(length.max(initial=0))
    return cap + bisect.bisect_left(range(cap, max(cap, longest)), True, key=slots_fit)


def _num_pieces(length: Int64Array, cap: int) -> Int64Array:
    return -(-length // cap)


def _pieces_of_keys(sweeps: Sweeps, num_pieces: Int64Array, num_key_tiles: int) -> Int64Array:
    # bincount sums in fp64, which is exact below 2**53.
    return np.bincount(sweeps.key_B, num_pieces, minlength=num_key_tiles).astype(np.int64)


def _cut(sweeps: Sweeps, num_key_tiles: int, stride: int, cap: int) -> WorkList:
    length = _num_strides(sweeps, stride)
    num_pieces = _num_pieces(length, cap)
    of_keys = _pieces_of_keys(sweeps, num_pieces, num_key_tiles)
    is_split = of_keys > 1
    row = np.repeat(np.arange(len(length)), num_pieces)
    key = sweeps.key_B[row]
    index = np.arange(len(row)) - (np.cumsum(num_pieces) - num_pieces)[row]
    num_slots = np.where(is_split, of_keys, 0)
    first_slot = np.cumsum(num_slots) - num_slots
    begin = index * length[row] // num_pieces[row]
    end = (index + 1) * length[row] // num_pieces[row]
    in_key = np.arange(len(row)) - (np.cumsum(of_keys) - of_keys)[key]
    slot = np.where(is_split[key], first_slot[key] + in_key, -1)
    pieces = _pieces(sweeps, row, begin, end, slot, stride)
    return WorkList(
        pieces=pieces[_longest_first(pieces[:, 2] - pieces[:, 1])],
        split_tiles=_split_tiles(is_split, first_slot, num_slots),
    )


def _pieces(
    sweeps: Sweeps,
    row: Int64Array,
    begin: Int64Array,
    end: Int64Array,
    slot: Int64Array,
    stride: int,
) -> Int32Array:
    """Returns a piece for each of the rows of `sweeps`: its strides [begin, end)."""
    first = sweeps.start_B[row]
    start, stop = first + begin * stride, np.minimum(first + end * stride, sweeps.stop_B[row])
    pieces = np.zeros((len(row), 8), np.int32)
    full = (sweeps.full_start_B[row], sweeps.full_stop_B[row])
    pieces[:, :6] = np.stack((sweeps.key_B[row], start, stop, slot, *full), axis=1)
    return pieces


def _split_tiles(
    is_split: BoolArray, first_slot: Int64Array, num_slots: Int64Array | BoolArray
) -> Int32Array:
    tiles = np.flatnonzero(is_split)
    split = np.zeros((len(tiles), 4), np.int32)
    split[:, :3] = np.stack((tiles, first_slot[tiles], num_slots[tiles]), axis=1)
    return split


def _longest_first(length: Int64Array | Int32Array) -> Int64Array:
    return np.argsort(-length, kind="stable")
