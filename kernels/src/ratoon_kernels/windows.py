"""Cuts a forest by a window: which keys each token sees, and which tiles hold any of them.

A window of W lets a token see the last W tokens of its path, itself among them. Packed indices rise
along a path, so of the keys on its path it sees those from one packed index on, its `start`: query
q attends key k if and only if `start[q] <= k <= q < end[k]`. `start` is not sorted: behind a fork
it goes back.

A run is a node with its first child, the first child of that, and so on: adjacent tokens of one
path, whose depth differs from the packed index by a constant. A path is the run of its last token
and, of each run above, what lies before the next one's fork. So what a run's tokens see is strips:
queries of one run against keys of another, where query q sees the keys from q plus a constant on.
No list over all pairs of tiles is walked.
"""

from dataclasses import dataclass

import numpy as np

from ratoon_kernels.tiles import (
    BoolArray,
    Int64Array,
    KeyTiles,
    Span,
    Sweeps,
    TileTable,
    expand_ranges,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What the T tokens of a forest see through a window; int64 arrays in packed indices.

    Strip p holds the queries [query_start_P[p], query_stop_P[p]) and the keys
    [key_start_P[p], key_stop_P[p]); query q of it sees its keys of [q + offset_P[p], q]. Every
    visible pair is in one strip.

    Attributes:
        start_T: [T]; the first key that each token sees.
        query_start_P: [P].
        query_stop_P: [P].
        key_start_P: [P].
        key_stop_P: [P].
        offset_P: [P].
    """

    start_T: Int64Array
    query_start_P: Int64Array
    query_stop_P: Int64Array
    key_start_P: Int64Array
    key_stop_P: Int64Array
    offset_P: Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class TilePairs:
    """Pairs of a query tile and a key tile that hold work, by query tile, then by key tile.

    Attributes:
        query_P: int64 [P].
        key_P: int64 [P].
        is_full_P: bool [P]; every query of the one attends every key of the other.
    """

    query_P: Int64Array
    key_P: Int64Array
    is_full_P: BoolArray


def build_window(node_table_M4: Int64Array, size: int) -> Window | None:
    """Cuts a forest into strips, in time linear in tokens and strips but for a sort.

    Args:
        node_table_M4: Start, stop, end and parent of each node in packed order.
        size: Tokens of its path that a token sees, at least 1.

    Returns:
        None where no path is longer.
    """
    start_M, stop_M, _, parent_M = node_table_M4.T
    depth_M = _first_depths(node_table_M4)
    if int((depth_M + stop_M - start_M).max(initial=0)) <= size:
        return None
    num_tokens = int(stop_M[-1])
    is_first_child = (parent_M >= 0) & (stop_M[parent_M] == start_M)
    run_of_node = np.cumsum(~is_first_child) - 1
    of_root = parent_M < 0
    start, shift, above, fork = (
        column[~is_first_child]
        for column in (
            start_M,
            depth_M - start_M,  # plus a packed index: a token's depth
            np.where(of_root, -1, run_of_node[parent_M]),
            np.where(of_root, 0, stop_M[parent_M]),
        )
    )
    stop = np.append(start[1:], num_tokens)
    # Level by level: a run, and one above it with the end of what is on the path there.
    run = np.arange(len(start))
    at, key_stop = run, stop
    levels: list[tuple[Int64Array, ...]] = []
    while len(run):
        offset = shift[run] - shift[at] - (size - 1)
        query_stop = np.minimum(stop[run], key_stop - offset)
        levels.append((start[run], query_stop, start[at], key_stop, offset))
        goes_on = (start[run] + offset < start[at]) & (above[at] >= 0)
        run, at = run[goes_on], at[goes_on]
        key_stop, at = fork[at], above[at]
    columns = [np.concatenate(column) for column in zip(*levels, strict=True)]
    query_start, query_stop, key_start, key_stop, offset = columns
    token, strip = expand_ranges(np.arange(len(offset)), query_start, query_stop)
    start_T = np.arange(num_tokens)
    np.minimum.at(start_T, token, np.maximum(key_start[strip], token + offset[strip]))
    return Window(
        start_T=start_T,
        query_start_P=query_start,
        query_stop_P=query_stop,
        key_start_P=key_start,
        key_stop_P=key_stop,
        offset_P=offset,
    )


def _first_depths(node_table_M4: Int64Array) -> Int64Array:
    """Returns the depth of each node's first token: its packed index less what ended before it."""
    start_M, stop_M, end_M, _ = node_table_M4.T
    order = np.argsort(end_M, kind="stable")
    ended = np.concatenate((np.zeros(1, np.int64), np.cumsum((stop_M - start_M)[order])))
    return start_M - ended[np.searchsorted(end_M[order], start_M, side="right")]


def pair_tiles(
    window: Window, queries: Span, keys: Span, key_tiles: KeyTiles, query_tile_size: int
) -> TilePairs:
    """Finds the pairs of tiles that hold work.

    Args:
        window: The forest's.
        queries: Packed range of the queries.
        keys: Packed range of the keys.
        key_tiles: The tiles of these keys.
        query_tile_size: Queries of a tile.
    """
    size, delta = query_tile_size, key_tiles.delta
    start = np.maximum(window.query_start_P - queries.start, 0)
    stop = np.minimum(window.query_stop_P - queries.start, len(queries))
    tile, strip = _tiles_of(np.arange(len(start)), start, stop, size)
    first = np.maximum(start[strip], tile * size)
    key_start = np.maximum(window.key_start_P[strip] - keys.start, 0)
    key_start = np.maximum(key_start, first + delta + window.offset_P[strip])
    key_stop = np.minimum(window.key_stop_P[strip] - keys.start, len(keys))
    key_stop = np.minimum(key_stop, np.minimum(stop[strip], (tile + 1) * size) + delta)
    key, query = _tiles_of(tile, key_start, key_stop, key_tiles.size)
    num_key_tiles = max(len(key_tiles.min_end_B), 1)
    query, key = np.divmod(np.unique(query * num_key_tiles + key), num_key_tiles)
    # The last start of any query of a tile.
    first_row = np.arange(0, len(queries), size)
    first_seen = window.start_T[queries.start : queries.stop] - keys.start
    last_start = np.maximum.reduceat(first_seen, first_row) if len(first_row) else first_row
    past_row = np.minimum(first_row + size, len(queries))
    is_full = (
        (last_start[query] <= key * key_tiles.size)
        & ((key + 1) * key_tiles.size - 1 - delta <= first_row[query])
        & (past_row[query] <= key_tiles.min_end_B[key])
    )
    return TilePairs(query_P=query, key_P=key, is_full_P=is_full)


def _tiles_of(
    value: Int64Array, start: Int64Array, stop: Int64Array, size: int
) -> tuple[Int64Array, Int64Array]:
    """Lists (tile, value) for each value and each tile that [start, stop) touches."""
    return expand_ranges(value, start // size, np.where(start < stop, -(-stop // size), 0))


def sweeps_of_pairs(pairs: TilePairs) -> Sweeps:
    """Joins the adjacent query tiles of each key tile; of each such range, the first full ones."""
    order = np.lexsort((pairs.query_P, pairs.key_P))
    query, key, is_full = pairs.query_P[order], pairs.key_P[order], pairs.is_full_P[order]
    is_first = _breaks(key, query)
    first = np.flatnonzero(is_first)
    row = np.cumsum(is_first) - 1
    stop = query[np.append(first[1:], len(query)) - 1] + 1 if len(query) else query
    full_start, full_stop = stop.copy(), stop.copy()
    opens = np.flatnonzero(is_full & (is_first | ~np.append(np.zeros(1, np.bool_), is_full)[:-1]))
    is_last = np.append(is_first, np.ones(1, np.bool_))[1:]
    closes = np.flatnonzero(is_full & (is_last | ~np.append(is_full, np.zeros(1, np.bool_))[1:]))
    rows, which = np.unique(row[opens], return_index=True)
    full_start[rows], full_stop[rows] = query[opens[which]], query[closes[which]] + 1
    return Sweeps(
        key_B=key[first],
        start_B=query[first],
        stop_B=stop,
        full_start_B=full_start,
        full_stop_B=full_stop,
    )


def table_of_pairs(pairs: TilePairs, tile_size: int, num_queries: int) -> TileTable:
    """Returns pairs of one grid for both sides by their query tiles."""
    num_query_tiles = -(-num_queries // tile_size)
    joined = _breaks(pairs.query_P, pairs.key_P)
    # Partial tiles are runs of their own.
    joined |= ~pairs.is_full_P
    joined[1:] |= ~pairs.is_full_P[:-1]
    first = np.flatnonzero(joined)
    last = np.append(first[1:], len(pairs.key_P)) - 1
    return TileTable(
        tile_size=tile_size,
        num_query_tiles=num_query_tiles,
        sweeps=sweeps_of_pairs(pairs),
        run_offsets=np.searchsorted(pairs.query_P[first], np.arange(num_query_tiles + 1)),
        run_start=pairs.key_P[first],
        run_stop=pairs.key_P[last] + 1 if len(first) else first,
        run_is_full=pairs.is_full_P[first],
    )


def _breaks(major: Int64Array, minor: Int64Array) -> BoolArray:
    """Tells where a pair does not follow the one before: another major, or no next minor."""
    is_first = np.ones(len(major), np.bool_)
    is_first[1:] = (major[1:] != major[:-1]) | (minor[1:] != minor[:-1] + 1)
    return is_first
