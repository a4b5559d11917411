"""Classifies pairs of query and key tiles: which hold work, and which of them need no mask.

A tile pair that is left out holds no attended pair, and one that is called full holds no other.

Rows are counted from the first query and the first key at hand; query row q attends key row k if
and only if `k - delta <= q < end[k]`, where `delta` is the packed index of the first query minus
that of the first key, and `end` is clipped to [0, Q]. For a key tile [k0, k1) with `mn`, `mx` the
least and greatest `end` of it and a query tile [q0, q1): skip where `k0 - delta >= q1` or
`mx <= q0`; full where `k1 - 1 - delta <= q0` and `mn >= q1`; else partial. A key tile that is not
whole counts `mn` as 0: its missing keys need the mask. So both kinds are, for a key tile, intervals
of query tiles, and no list over pairs is ever walked.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Span:
    """The packed tokens [start, stop)."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def rows_from(self, origin: int) -> slice:
        """Returns these tokens as rows of a tensor whose row 0 is the packed token `origin`."""
        return slice(self.start - origin, self.stop - origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyTiles:
    """Inputs of the classification of tile pairs: two ints for each of B key tiles.

    Attributes:
        size: Keys of a tile.
        num_queries: Q, the number of query rows.
        delta: Packed index of the first query minus that of the first key.
        min_end_B: int64 [B]; least `end` of each key tile, 0 where the tile is not whole.
        max_end_B: int64 [B]; greatest `end` of each key tile.
    """

    size: int
    num_queries: int
    delta: int
    min_end_B: Int64Array
    max_end_B: Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweeps:
    """The query tiles that hold work with key tiles, as B ranges: one of each key tile, or, under
    a window, as many as a key tile needs.

    Key tile key_B[j] is not skipped by the query tiles [start_B[j], stop_B[j]), and full to those
    of [full_start_B[j], full_stop_B[j]), which lie within. An empty range has equal ends.

    Attributes:
        key_B: int64 [B], not falling.
        start_B: int64 [B].
        stop_B: int64 [B].
        full_start_B: int64 [B].
        full_stop_B: int64 [B].
    """

    key_B: Int64Array
    start_B: Int64Array
    stop_B: Int64Array
    full_start_B: Int64Array
    full_stop_B: Int64Array

    def in_rows(self, tile_size: int, num_queries: int) -> "Sweeps":
        """Returns the ranges in query rows instead of tiles, none of them past the last query."""
        return Sweeps(
            key_B=self.key_B,
            start_B=self.start_B * tile_size,
            stop_B=np.minimum(self.stop_B * tile_size, num_queries),
            full_start_B=self.full_start_B * tile_size,
            full_stop_B=self.full_stop_B * tile_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TileTable:
    """Work on one grid: tiles of `tile_size` rows, for queries and keys alike.

    Query tile i reads the runs [run_offsets[i], run_offsets[i + 1]): each is the key tiles
    [run_start, run_stop), full ones together, partial ones one by one, in key order.

    Attributes:
        tile_size: Rows of a tile.
        num_query_tiles: The number of query tiles.
        sweeps: The query tiles of each key tile.
        run_offsets: int64 [num_query_tiles + 1]; CSR offsets by query tile.
        run_start: int64 [number of runs]; first key tile.
        run_stop: int64 [number of runs]; one past the last key tile.
        run_is_full: bool [number of runs]; needs no mask code.
    """

    tile_size: int
    num_query_tiles: int
    sweeps: Sweeps
    run_offsets: Int64Array
    run_start: Int64Array
    run_stop: Int64Array
    run_is_full: BoolArray


def reduce_key_tiles(
    end_padded: Int32Array, *, size: int, num_queries: int, delta: int
) -> KeyTiles:
    """Takes the least and greatest `end` of each key tile.

    Args:
        end_padded: int32 of a whole number of tiles; `end` clipped to [0, Q], 0 past the last key.
        size: Keys of a tile.
        num_queries: Q, the number of query rows.
        delta: Packed index of the first query minus that of the first key.
    """
    end_BK = end_padded.reshape(-1, size)
    return KeyTiles(
        size=size,
        num_queries=num_queries,
        delta=delta,
        min_end_B=end_BK.min(axis=1).astype(np.int64),
        max_end_B=end_BK.max(axis=1).astype(np.int64),
    )


def sweep_query_tiles(keys: KeyTiles, query_tile_size: int) -> Sweeps:
    """Finds the query tiles that each key tile sweeps, on a grid of queries of its own."""
    num_queries, size = keys.num_queries, query_tile_size
    first_key = np.arange(0, len(keys.min_end_B) * keys.size, keys.size)
    first_row = np.maximum(first_key - keys.delta, 0)
    stop = -(-keys.max_end_B // size)
    # Keys past the last query have the greatest `end` all the same: only here do they drop out.
    start = np.where(first_row < num_queries, first_row // size, stop)
    # From this row on, each query is past the tile's last key.
    all_seen_row = np.maximum(first_key + keys.size - 1 - keys.delta, 0)
    full_start = np.minimum(-(-all_seen_row // size), stop)
    # The last query tile may be ragged, so it lies within `min_end` at Q, not at a multiple.
    num_within = np.where(
        keys.min_end_B == num_queries, -(-num_queries // size), keys.min_end_B // size
    )
    return Sweeps(
        key_B=np.arange(len(start)),
        start_B=start,
        stop_B=stop,
        full_start_B=full_start,
        full_stop_B=np.maximum(num_within, full_start),
    )


def sweep_query_rows(keys: KeyTiles, alignment: int) -> Sweeps:
    """Finds the query rows that each key tile sweeps, from a multiple of `alignment` on.

    Rows past the last query count as seen where that is.
    """
    first_key = np.arange(0, len(keys.min_end_B) * keys.size, keys.size)
    first_row = np.maximum(first_key - keys.delta, 0)
    stop = keys.max_end_B
    all_seen_row = np.maximum(first_key + keys.size - 1 - keys.delta, 0)
    full_start = np.minimum(all_seen_row, stop)
    num_within = np.where(
        keys.min_end_B == keys.num_queries, np.iinfo(np.int32).max, keys.min_end_B
    )
    return Sweeps(
        key_B=np.arange(len(stop)),
        start_B=np.where(first_row < stop, first_row // alignment * alignment, stop),
        stop_B=stop,
        full_start_B=full_start,
        full_stop_B=np.maximum(num_within, full_start),
    )


def build_tile_table(keys: KeyTiles) -> TileTable:
    """Classifies all tile pairs in time linear in tiles + runs, but for a sort of the runs."""
    num_query_tiles = -(-keys.num_queries // keys.size)
    sweeps = sweep_query_tiles(keys, keys.size)
    num_key_tiles = len(sweeps.start_B)
    key = np.arange(num_key_tiles)
    full_start, full_stop = sweeps.full_start_B, sweeps.full_stop_B
    # One sorted list of numbers holds all runs: query tile, then first key tile, then fullness.
    starts = _full_run_bounds(key, full_start, full_stop, neighbour=-1)
    partial = (
        expand_ranges(key, sweeps.start_B, full_start),
        expand_ranges(key, full_stop, sweeps.stop_B),
    )
    runs = np.concatenate([query * num_key_tiles + first for query, first in (*starts, *partial)])
    num_full = sum(len(query) for query, _ in starts)
    runs *= 2
    runs[:num_full] += 1
    runs.sort()
    pair, is_full = runs >> 1, (runs & 1).astype(np.bool_)
    query, first = np.divmod(pair, max(num_key_tiles, 1))
    last = first.copy()
    stops = _full_run_bounds(key, full_start, full_stop, neighbour=1)
    last_pair = np.concatenate([query * num_key_tiles + last for query, last in stops])
    last_pair.sort()
    # The nth full run to start is the nth to stop: runs of one query tile do not overlap.
    last[is_full] = last_pair % max(num_key_tiles, 1)
    return TileTable(
        tile_size=keys.size,
        num_query_tiles=num_query_tiles,
        sweeps=sweeps,
        run_offsets=np.searchsorted(query, np.arange(num_query_tiles + 1)),
        run_start=first,
        run_stop=last + 1,
        run_is_full=is_full,
    )


def _full_run_bounds(
    key: Int64Array, full_start: Int64Array, full_stop: Int64Array, *, neighbour: int
) -> tuple[tuple[Int64Array, Int64Array], ...]:
    """Lists (query tile, key tile) where a full run ends at the side of `neighbour` (-1 or 1).

    It ends at j for the query tiles to which j is full and the neighbour is not: one interval
    without another, which is at most two.
    """
    other_start, other_stop = np.zeros_like(full_start), np.zeros_like(full_stop)
    if neighbour < 0:
        other_start[1:], other_stop[1:] = full_start[:-1], full_stop[:-1]
    else:
        other_start[:-1], other_stop[:-1] = full_start[1:], full_stop[1:]
    return (
        expand_ranges(key, full_start, np.minimum(full_stop, other_start)),
        expand_ranges(key, np.maximum(full_start, other_stop), full_stop),
    )


def expand_ranges(
    value: Int64Array, first: Int64Array, stop: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Lists (number, value) for each value and each number of its [first, stop)."""
    count = np.maximum(stop - first, 0)
    offset = np.cumsum(count) - count
    number = np.arange(int(count.sum())) - np.repeat(offset - first, count)
    return number, np.repeat(value, count)
