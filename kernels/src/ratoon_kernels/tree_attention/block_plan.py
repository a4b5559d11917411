"""Block masks on the device, made once for a forest, a pair of ranges and a grid.

A plan is a function of its key alone, the node table's values among it, so one that is kept for the
next layer, or for the backward, is what would be built again.

The lists differ by backend, head_dim and GPU, so the layout does not carry them; and the op must be
traceable, so they are made where it is opaque. All layers of a micro-batch ask for the same ones.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from ratoon_kernels.errors import BackendUnavailableError
from ratoon_kernels.layout import TreeLayout
from ratoon_kernels.span import Span
from ratoon_kernels.tiles import Int32Array
from ratoon_kernels.tree_attention.block_masks import BlockGrid, TileLists, build_block_mask
from ratoon_kernels.tree_attention.operands import Operands

# The index tensors of one side then stay within 2 * 2048**2 * 4 bytes = 32 MiB of tiles of 128.
MAX_TOKENS: Final = 2**18
# The ranges that one layer runs over in turn: waves of a stream, or ranks of context parallelism.
_NUM_KEPT: Final = 16
_NODE_COLUMNS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLists:
    """`TileLists` as libraries take them: int32, with a batch and a head of one in front.

    Attributes:
        partial_count_11R: Number of partial tiles of each of R tiles.
        partial_index_11RW: Which they are.
        full_count_11R: Number of full tiles.
        full_index_11RW: Which they are.
    """

    partial_count_11R: Tensor
    partial_index_11RW: Tensor
    full_count_11R: Tensor
    full_index_11RW: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """`BlockMask` on the device.

    Attributes:
        end_S: int32; query row q attends key row k if and only if `k - delta <= q < end_S[k]`.
        delta_1: int32; `delta`.
        of_queries: The key tiles of each query tile.
        of_keys: The query tiles of each key tile.
    """

    end_S: Tensor
    delta_1: Tensor
    of_queries: DeviceLists
    of_keys: DeviceLists


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
    return _build(nodes, operands.queries, operands.keys, grid, device, stream)


@functools.lru_cache(maxsize=_NUM_KEPT)
def _build(
    nodes: bytes, queries: Span, keys: Span, grid: BlockGrid, device: torch.device, _stream: int
) -> BlockPlan:
    node_table_M4 = np.frombuffer(nodes, np.int64).reshape(-1, _NODE_COLUMNS)
    mask = build_block_mask(node_table_M4, queries, keys, grid)
    # Autograd may meet the plan after an inference call has made it.
    with torch.inference_mode(mode=False):
        of_queries, of_keys = (_upload_lists(x, device) for x in (mask.of_queries, mask.of_keys))
        end_S, delta_1 = _upload((mask.end_S, np.array([mask.delta], np.int32)), device)
    return BlockPlan(end_S=end_S, delta_1=delta_1, of_queries=of_queries, of_keys=of_keys)


def _upload_lists(lists: TileLists, device: torch.device) -> DeviceLists:
    partial_count, partial_index, full_count, full_index = _upload(
        (
            lists.partial_count_R[None, None],
            lists.partial_index_RW[None, None],
            lists.full_count_R[None, None],
            lists.full_index_RW[None, None],
        ),
        device,
    )
    return DeviceLists(
        partial_count_11R=partial_count,
        partial_index_11RW=partial_index,
        full_count_11R=full_count,
        full_index_11RW=full_index,
    )


def _upload(arrays: Sequence[Int32Array], device: torch.device) -> list[Tensor]:
    return [torch.from_numpy(array).to(device) for array in arrays]
