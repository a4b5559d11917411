"""Tile lists of libraries that take block-sparse masks, made once and kept on the device.

Every attended pair lies in one listed tile pair, and a tile pair that is listed as full needs no
mask; the mask itself is never evaluated. Rows are counted from the first query and the first key at
hand, as in `tiles.py`: query row q attends key row k if and only if `k - delta <= q < end[k]`, and,
under a window, `start[q] <= k` as in `windows.py`.

A plan is a function of its key alone, the node table's values among it, so one that is kept for the
next layer, or for the backward, is what would be built again. The lists differ by backend, head_dim
and GPU, so the layout does not carry them; and the op must be traceable, so they are made where it
is opaque. All layers of a micro-batch ask for the same ones.
"""

import functools
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from ratoon_kernels.errors import BackendUnavailableError
from ratoon_kernels.layout import TreeLayout
from ratoon_kernels.tiles import (
    BoolArray,
    Int64Array,
    Span,
    Sweeps,
    expand_ranges,
    reduce_key_tiles,
    sweep_query_tiles,
)
from ratoon_kernels.tree_attention.operands import Operands
from ratoon_kernels.windows import build_window, pair_tiles

# The index tensors of one side then stay within 2 * 2048**2 * 4 bytes = 32 MiB of tiles of 128.
MAX_TOKENS: Final = 2**18
# The ranges that one layer runs over in turn: waves of a stream, or ranks of context parallelism.
_NUM_KEPT: Final = 16
_NODE_COLUMNS: Final = 4
# Counts [R] and indices [R, W] of partial tiles, then of full ones.
_Lists = tuple[Int64Array, Int64Array, Int64Array, Int64Array]


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

    All are int32, with a batch and a head of one in front, as libraries take them.

    Attributes:
        partial_count_11R: Number of partial tiles.
        partial_index_11RW: Which they are, W at least 1.
        full_count_11R: Number of full tiles.
        full_index_11RW: Which they are, W at least 1.
    """

    partial_count_11R: Tensor
    partial_index_11RW: Tensor
    full_count_11R: Tensor
    full_index_11RW: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """The mask of some queries and keys on a grid.

    Attributes:
        end_S: int32 [padded keys]; one past the last query row that attends each key row, clipped
            to the queries at hand, 0 for the keys that fill up.
        start_Q: int32 [padded queries]; first key row that each query row attends, or None without
            a window.
        delta_1: int32; packed index of the first query minus that of the first key.
        of_queries: The key tiles of each query tile.
        of_keys: The query tiles of each key tile.
    """

    end_S: Tensor
    start_Q: Tensor | None
    delta_1: Tensor
    of_queries: TileLists
    of_keys: TileLists


def plan_tensors(backend: str, layout: TreeLayout, *num_rows: int) -> list[Tensor]:
    """Returns the tensors that `block_plan` reads of a layout, for calls with the given number of
    rows.

    Raises:
        BackendUnavailableError: There are more rows than `MAX_TOKENS`.
    """
    if max(num_rows) > MAX_TOKENS:
        reason = (
            f"its index tensors grow with the square of the tokens: {max(num_rows)} tokens, at "
            f"most {MAX_TOKENS} are served"
        )
        raise BackendUnavailableError("tree_attention", backend, reason)
    return [layout.node_table_M4]


def block_plan(operands: Operands, grid: BlockGrid) -> BlockPlan:
    """Returns the plan of the operands' ranges, none of them empty, on their device and stream."""
    device = operands.q_QNH.device
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    nodes = operands.plan[0].numpy().tobytes()
    return _build(nodes, operands.queries, operands.keys, operands.window, grid, device, stream)


@functools.lru_cache(maxsize=_NUM_KEPT)
def _build(
    nodes: bytes,
    queries: Span,
    keys: Span,
    window: int | None,
    grid: BlockGrid,
    device: torch.device,
    _stream: int,
) -> BlockPlan:
    node_table_M4 = np.frombuffer(nodes, np.int64).reshape(-1, _NODE_COLUMNS)
    # Autograd may meet the plan after an inference call has made it.
    with torch.inference_mode(mode=False):
        return build_block_plan(node_table_M4, queries, keys, grid, device, window)


def build_block_plan(
    node_table_M4: Int64Array,
    queries: Span,
    keys: Span,
    grid: BlockGrid,
    device: torch.device | str,
    window: int | None = None,
) -> BlockPlan:
    """Lists the tile pairs of queries and keys that hold work, in time linear in the lists.

    Args:
        node_table_M4: Start, stop, end and parent of each node in packed order.
        queries: Packed range of the queries, not empty.
        keys: Packed range of the keys, not empty.
        grid: Tile sizes and shapes.
        device: Where the plan is read.
        window: Tokens of its path that a query sees, or None.
    """
    end_S = np.zeros(grid.padded_keys, np.int32)
    start, stop, end, _ = node_table_M4.T
    num_keys_M = np.clip(stop, keys.start, keys.stop) - np.clip(start, keys.start, keys.stop)
    end_in_rows_M = np.clip(end - queries.start, 0, len(queries)).astype(np.int32)
    end_S[: len(keys)] = np.repeat(end_in_rows_M, num_keys_M)
    delta = queries.start - keys.start
    tiles = reduce_key_tiles(end_S, size=grid.key_tile, num_queries=len(queries), delta=delta)
    num_query_tiles = -(-grid.padded_queries // grid.query_tile)
    num_backward_tiles = -(-grid.padded_queries // grid.backward_query_tile)
    num_key_tiles = grid.padded_keys // grid.key_tile
    widths = (num_key_tiles, num_backward_tiles) if grid.is_full_width else (1, 1)
    cut = None if window is None else build_window(node_table_M4, window)
    sizes = (grid.query_tile, grid.backward_query_tile)
    if cut is None:
        sweeps, backward_sweeps = (
            _without_padding(sweep_query_tiles(tiles, size)) for size in sizes
        )
        of_queries = _list_key_tiles(sweeps, num_query_tiles, widths[0])
        of_keys = _list_query_tiles(backward_sweeps, widths[1])
        start_Q = None
    else:
        pairs, backward = (pair_tiles(cut, queries, keys, tiles, size) for size in sizes)
        of_queries = _list_pairs(
            pairs.query_P, pairs.key_P, pairs.is_full_P, num_query_tiles, widths[0]
        )
        of_keys = _list_pairs(
            backward.key_P, backward.query_P, backward.is_full_P, num_key_tiles, widths[1]
        )
        start = np.zeros(grid.padded_queries, np.int32)
        first_key = cut.start_T[queries.start : queries.stop] - keys.start
        start[: len(queries)] = np.clip(first_key, 0, len(keys))
        start_Q = torch.from_numpy(start).to(device)
    return BlockPlan(
        end_S=torch.from_numpy(end_S).to(device),
        start_Q=start_Q,
        delta_1=torch.tensor([delta], dtype=torch.int32, device=device),
        of_queries=_as_lists(*of_queries, device),
        of_keys=_as_lists(*of_keys, device),
    )


def _list_pairs(
    row: Int64Array, tile: Int64Array, is_full: BoolArray, num_rows: int, least_width: int
) -> _Lists:
    partial = _as_matrix(row[~is_full], tile[~is_full], num_rows, least_width)
    return *partial, *_as_matrix(row[is_full], tile[is_full], num_rows, least_width)


def _without_padding(sweeps: Sweeps) -> Sweeps:
    """Empties the intervals of key tiles of padding alone, whose queries would start past T."""
    return replace(sweeps, start_B=np.minimum(sweeps.start_B, sweeps.stop_B))


def _list_query_tiles(sweeps: Sweeps, least_width: int) -> _Lists:
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
    return partial_count, partial_index, full_count, full_index


def _list_key_tiles(sweeps: Sweeps, num_query_tiles: int, least_width: int) -> _Lists:
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
    return *partial, *full


def _transpose(
    key: Int64Array, start: Int64Array, stop: Int64Array, num_query_tiles: int, least_width: int
) -> tuple[Int64Array, Int64Array]:
    """Returns the counts [R] and indices [R, W] of the keys whose [start, stop) hold each query."""
    query, key = expand_ranges(key, start, stop)
    return _as_matrix(query, key, num_query_tiles, least_width)


def _as_matrix(
    row: Int64Array, tile: Int64Array, num_rows: int, least_width: int
) -> tuple[Int64Array, Int64Array]:
    """Returns the number [R] and the rising list [R, W] of each row's tiles."""
    order = np.lexsort((tile, row))
    row, tile = row[order], tile[order]
    count = np.bincount(row, minlength=num_rows)
    column = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    index = np.zeros((num_rows, max(least_width, count.max(initial=0))), np.int64)
    index[row, column] = tile
    return count, index


def _as_lists(
    partial_count: Int64Array,
    partial_index: Int64Array,
    full_count: Int64Array,
    full_index: Int64Array,
    device: torch.device | str,
) -> TileLists:
    def upload(array: Int64Array) -> Tensor:
        return torch.from_numpy(array[None, None].astype(np.int32)).to(device)

    def within(count: Int64Array, index: Int64Array) -> Int64Array:
        is_listed = np.arange(index.shape[1]) < count[:, None]
        return np.where(is_listed, index, 0)

    return TileLists(
        partial_count_11R=upload(partial_count),
        partial_index_11RW=upload(within(partial_count, partial_index)),
        full_count_11R=upload(full_count),
        full_index_11RW=upload(within(full_count, full_index)),
    )
