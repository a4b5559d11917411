"""Tile metadata of a packed forest: which pairs of query and key tiles hold work, and which kind.

In: `end` of every key. Out: a `TileTable`, host arrays that the GPU backends upload once for a
micro-batch. Invariant: a tile pair that is left out holds no attended pair, and one that is called
full holds no other.

For a key tile [k0, k1) with `mn`, `mx` the least and greatest `end` of it and a query tile
[q0, q1): skip where `k0 >= q1` or `mx <= q0`; full where `k1 - 1 <= q0` and `mn >= q1`; else
partial. The diagonal is partial always: a ragged last tile of one token needs its bounds checked.
So key tile j is full to the query tiles [j + 1, full_stop[j]) and not skipped by [j, stop[j]): no
list over pairs is ever walked, only the ends of intervals.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class TileTable:
    """Work of a forest on one grid of B tiles, the last of which may be ragged.

    The forward walks, for query tile i, the runs [run_offsets[i], run_offsets[i + 1]): each is the
    key tiles [run_start, run_stop), full ones together, partial ones one by one, in key order. The
    backward needs no list: key tile j sweeps the query tiles [j, stop[j]).

    Attributes:
        tile_size: Tokens of a tile.
        min_end_B: int32 [B]; least `end` of each key tile.
        max_end_B: int32 [B]; greatest `end` of each key tile.
        full_stop_B: int32 [B]; key tile j is full for the query tiles [j + 1, full_stop_B[j]).
        stop_B: int32 [B]; key tile j is skipped from query tile stop_B[j] on.
        run_offsets: int32 [B + 1]; CSR offsets by query tile.
        run_start: int32 [number of runs]; first key tile.
        run_stop: int32 [number of runs]; one past the last key tile.
        run_is_full: bool [number of runs]; needs no mask code.
        forward_order_B: int32 [B]; query tiles, those of most key tiles first.
        backward_order_B: int32 [B]; key tiles, those of most query tiles first.
    """

    tile_size: int
    min_end_B: Int32Array
    max_end_B: Int32Array
    full_stop_B: Int32Array
    stop_B: Int32Array
    run_offsets: Int32Array
    run_start: Int32Array
    run_stop: Int32Array
    run_is_full: BoolArray
    forward_order_B: Int32Array
    backward_order_B: Int32Array

    @property
    def num_tiles(self) -> int:
        """B, the number of tiles of the grid."""
        return len(self.stop_B)


def build_tile_table(end_T: Int32Array, *, tile_size: int) -> TileTable:
    """Classifies all tile pairs of a forest in time linear in tiles + runs.

    Args:
        end_T: int32 of shape [T]; one past the last packed query that attends each key.
        tile_size: Tokens of a tile, for queries and keys alike.
    """
    num_tokens = len(end_T)
    tile_start = np.arange(0, num_tokens, tile_size)
    tile = np.arange(len(tile_start))
    min_end = _reduce_tiles(np.minimum, end_T, tile_start)
    max_end = _reduce_tiles(np.maximum, end_T, tile_start)
    # Query tiles that end at or before min_end; the ragged last one ends at T.
    num_within = np.where(min_end == num_tokens, len(tile), min_end // tile_size)
    full_stop = np.maximum(num_within, tile + 1)
    stop = -(-max_end // tile_size)
    query_tile, run_start, run_stop, run_is_full = _runs(tile, full_stop, stop)
    run_offsets = np.searchsorted(query_tile, np.arange(len(tile) + 1))
    num_key_tiles = np.bincount(query_tile, run_stop - run_start, minlength=len(tile))
    return TileTable(
        tile_size=tile_size,
        min_end_B=min_end.astype(np.int32),
        max_end_B=max_end.astype(np.int32),
        full_stop_B=full_stop.astype(np.int32),
        stop_B=stop.astype(np.int32),
        run_offsets=run_offsets.astype(np.int32),
        run_start=run_start.astype(np.int32),
        run_stop=run_stop.astype(np.int32),
        run_is_full=run_is_full,
        forward_order_B=_longest_first(num_key_tiles),
        backward_order_B=_longest_first(stop - tile),
    )


def _reduce_tiles(reduce: np.ufunc, end_T: Int32Array, tile_start: Int64Array) -> Int64Array:
    if not len(end_T):
        return np.zeros(0, np.int64)
    return reduce.reduceat(end_T, tile_start).astype(np.int64)


def _runs(
    tile: Int64Array, full_stop: Int64Array, stop: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array, BoolArray]:
    """Returns query tile, first and past-the-last key tile, and fullness of all runs, sorted."""
    # A run of full key tiles starts at j for the query tiles to which j is full and j - 1 is not,
    # and stops after j for those to which j is full and j + 1 is not: intervals of query tiles.
    full_stop_before = np.concatenate((np.zeros(1, np.int64), full_stop))[: len(tile)]
    full_stop_after = np.concatenate((full_stop, np.zeros(1, np.int64)))[1:]
    start_query, start_key = _expand(tile, np.maximum(tile + 1, full_stop_before), full_stop)
    # j + 1 is never full to query tile j + 1, so j's run always stops there.
    last_query, last_key = _expand(tile, tile + 1, np.minimum(tile + 2, full_stop))
    more_query, more_key = _expand(tile, np.maximum(tile + 2, full_stop_after), full_stop)
    stop_query = np.concatenate((last_query, more_query))
    stop_key = np.concatenate((last_key, more_key)) + 1
    diagonal_query, diagonal_key = tile, tile
    edge_query, edge_key = _expand(tile, np.maximum(tile + 1, full_stop), stop)
    start_order = np.lexsort((start_key, start_query))
    stop_order = np.lexsort((stop_key, stop_query))
    query = np.concatenate((start_query[start_order], diagonal_query, edge_query))
    first = np.concatenate((start_key[start_order], diagonal_key, edge_key))
    past = np.concatenate((stop_key[stop_order], diagonal_key + 1, edge_key + 1))
    is_full = np.arange(len(query)) < len(start_query)
    order = np.lexsort((first, query))
    return query[order], first[order], past[order], is_full[order]


def _expand(key: Int64Array, first: Int64Array, stop: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Lists (query tile, key tile) for each key tile and each query tile of [first, stop)."""
    count = np.maximum(stop - first, 0)
    offset = np.cumsum(count) - count
    query = np.arange(int(count.sum())) - np.repeat(offset - first, count)
    return query, np.repeat(key, count)


def _longest_first(length: npt.NDArray[np.int64] | npt.NDArray[np.float64]) -> Int32Array:
    return np.argsort(-length, kind="stable").astype(np.int32)
