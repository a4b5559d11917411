"""Tile lists of libraries that take block-sparse masks: counts and indices, full tiles apart.

Every attended pair lies in one listed tile pair, and a tile pair that is listed as full needs no
mask; the mask itself is never evaluated.

Rows are counted from the first query and the first key at hand, as in `tiles.py`: query row q
attends key row k if and only if `k - delta <= q < end[k]`.
"""

from dataclasses import dataclass, replace

import numpy as np

from ratoon_kernels.span import Span
from ratoon_kernels.tiles import (
    Int32Array,
    Int64Array,
    Sweeps,
    reduce_key_tiles,
    sweep_query_tiles,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGrid:
    """Tile sizes, and the shapes that a compiled kernel asks for.

    Attributes:
        key_tile: Keys of a tile, in both directions.
        query_tile: Queries of a tile where a query tile's key tiles are walked.
        backward_query_tile: Queries of a tile where a key tile's query tiles are walked.
        padded_queries: Query rows of the kernel, at least those at hand.
        padded_keys: Key rows of the kernel, a whole number of tiles.
        is_full_width: Lists are as wide as the grid, not as the longest of them: the shapes then
            depend on the padded lengths alone.
    """

    key_tile: int
    query_tile: int
    backward_query_tile: int
    padded_queries: int
    padded_keys: int
    is_full_width: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TileLists:
    """For each of R tiles of one side, tiles of the other in rising order; 0 behind the counts.

    Attributes:
        partial_count_R: int32 [R].
        partial_index_RW: int32 [R, W], W at least 1.
        full_count_R: int32 [R].
        full_index_RW: int32 [R, W'], W' at least 1.
    """

    partial_count_R: Int32Array
    partial_index_RW: Int32Array
    full_count_R: Int32Array
    full_index_RW: Int32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMask:
    """The mask of some queries and keys on a grid.

    Attributes:
        end_S: int32 [padded keys]; one past the last query row that attends each key row, clipped
            to the queries at hand, 0 for the keys that fill up.
        delta: Packed index of the first query minus that of the first key.
        of_queries: The key tiles of each query tile.
        of_keys: The query tiles of each key tile.
    """

    end_S: Int32Array
    delta: int
    of_queries: TileLists
    of_keys: TileLists


def build_block_mask(
    node_table_M4: Int64Array, queries: Span, keys: Span, grid: BlockGrid
) -> BlockMask:
    """Lists the tile pairs of queries and keys that hold work, in time linear in the lists.

    Args:
        node_table_M4: Start, stop, end and parent of each node in packed order.
        queries: Packed range of the queries, not empty.
        keys: Packed range of the keys, not empty.
        grid: Tile sizes and shapes.
    """
    end_S = np.zeros(grid.padded_keys, np.int32)
    start, stop, end, _ = node_table_M4.T
    num_keys_M = np.clip(stop, keys.start, keys.stop) - np.clip(start, keys.start, keys.stop)
    end_in_rows_M = np.clip(end - queries.start, 0, len(queries)).astype(np.int32)
    end_S[: len(keys)] = np.repeat(end_in_rows_M, num_keys_M)
    delta = queries.start - keys.start
    tiles = reduce_key_tiles(end_S, size=grid.key_tile, num_queries=len(queries), delta=delta)
    sweeps, backward_sweeps = (
        _without_padding(sweep_query_tiles(tiles, size))
        for size in (grid.query_tile, grid.backward_query_tile)
    )
    num_query_tiles = -(-grid.padded_queries // grid.query_tile)
    num_backward_tiles = -(-grid.padded_queries // grid.backward_query_tile)
    num_key_tiles = grid.padded_keys // grid.key_tile
    full_width = grid.is_full_width
    return BlockMask(
        end_S=end_S,
        delta=delta,
        of_queries=_list_key_tiles(sweeps, num_query_tiles, num_key_tiles if full_width else 1),
        of_keys=_list_query_tiles(backward_sweeps, num_backward_tiles if full_width else 1),
    )


def _without_padding(sweeps: Sweeps) -> Sweeps:
    """Empties the intervals of key tiles of padding alone, whose queries would start past T."""
    return replace(sweeps, start_B=np.minimum(sweeps.start_B, sweeps.stop_B))


def _list_query_tiles(sweeps: Sweeps, least_width: int) -> TileLists:
    """Lists the query tiles of each key tile, which are intervals."""
    before = sweeps.full_start_B - sweeps.start_B
    partial_count = before + (sweeps.stop_B - sweeps.full_stop_B)
    column = np.arange(max(least_width, partial_count.max(initial=0)))
    # The partial ones lie before and behind the full ones.
    skipped = np.where(
        column < before[:, None], 0, (sweeps.full_stop_B - sweeps.full_start_B)[:, None]
    )
    partial_index = sweeps.start_B[:, None] + skipped + column
    full_count = sweeps.full_stop_B - sweeps.full_start_B
    column = np.arange(max(least_width, full_count.max(initial=0)))
    full_index = sweeps.full_start_B[:, None] + column
    return _as_lists(partial_count, partial_index, full_count, full_index)


def _list_key_tiles(sweeps: Sweeps, num_query_tiles: int, least_width: int) -> TileLists:
    """Lists the key tiles of each query tile: the transpose of the intervals."""
    start, stop, full_start, full_stop = (
        np.concatenate(bounds)
        for bounds in (
            (sweeps.start_B, sweeps.full_stop_B),
            (sweeps.full_start_B, sweeps.stop_B),
            (sweeps.full_start_B,),
            (sweeps.full_stop_B,),
        )
    )
    key = np.arange(len(sweeps.start_B))
    partial = _transpose(np.tile(key, 2), start, stop, num_query_tiles, least_width)
    full = _transpose(key, full_start, full_stop, num_query_tiles, least_width)
    return _as_lists(*partial, *full)


def _transpose(
    key: Int64Array, start: Int64Array, stop: Int64Array, num_query_tiles: int, least_width: int
) -> tuple[Int64Array, Int64Array]:
    """Returns the counts [R] and indices [R, W] of the keys whose [start, stop) hold each query."""
    length = stop - start
    offset = np.cumsum(length) - length
    query = np.arange(int(length.sum())) - np.repeat(offset - start, length)
    key = np.repeat(key, length)
    order = np.lexsort((key, query))
    query, key = query[order], key[order]
    count = np.bincount(query, minlength=num_query_tiles)
    column = np.arange(len(query)) - np.repeat(np.cumsum(count) - count, count)
    index = np.zeros((num_query_tiles, max(least_width, count.max(initial=0))), np.int64)
    index[query, column] = key
    return count, index


def _as_lists(
    partial_count: Int64Array,
    partial_index: Int64Array,
    full_count: Int64Array,
    full_index: Int64Array,
) -> TileLists:
    def within(count: Int64Array, index: Int64Array) -> Int32Array:
        is_listed = np.arange(index.shape[1]) < count[:, None]
        return np.where(is_listed, index, 0).astype(np.int32)

    return TileLists(
        partial_count_R=partial_count.astype(np.int32),
        partial_index_RW=within(partial_count, partial_index),
        full_count_R=full_count.astype(np.int32),
        full_index_RW=within(full_count, full_index),
    )
