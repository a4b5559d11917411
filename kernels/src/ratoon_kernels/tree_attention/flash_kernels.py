"""Calls of flash-attn-4: our mask as one of its mask functions, a plan as its block-sparse tensors.

Only `flash.py` imports this module, and only inside functions: the package is optional.

The entry points with an underscore are the ones that return and take the log-sum-exp, its gradient
and the lists of both directions; torch's own FlexAttention calls the same two. `flash.py` therefore
asks for one exact version.
"""

import cutlass  # pyright: ignore[reportMissingImports]
import torch
from cutlass import cute  # pyright: ignore[reportMissingImports]
from flash_attn.cute import utils  # pyright: ignore[reportMissingImports]
from flash_attn.cute.block_sparsity import (  # pyright: ignore[reportMissingImports]
    BlockSparseTensorsTorch,
)
from flash_attn.cute.interface import (  # pyright: ignore[reportMissingImports]
    _flash_attn_bwd,
    _flash_attn_fwd,
)
from torch import Tensor

from ratoon_kernels.tree_attention.block_plan import BlockGrid, BlockPlan, TileLists
from ratoon_kernels.tree_attention.operands import Operands, Upstream


@cute.jit
def _is_attended(_batch, _head, query, key, _seqlen_info, aux_tensors):
    """`k - delta <= q < end[k]`; the tensors are those of `_mask_tensors`."""
    end = utils.scalar_to_ssa(aux_tensors[0][utils.ssa_to_scalar(key)], cutlass.Int32)
    delta = utils.scalar_to_ssa(aux_tensors[1][0], cutlass.Int32)
    return (key - delta <= query) & (query < end)


def run_forward(operands: Operands, plan: BlockPlan, grid: BlockGrid) -> tuple[Tensor, Tensor]:
    """Returns out_QNH (dtype of q) and lse_NQ (fp32) over the keys at hand."""
    # The library packs the query heads of a kv head into one tile: a listed tile is then walked by
    # several, and the mask still sees queries. On an H200 that takes 2 to 8% less time than heads
    # apart (pack_gqa=False) for head_dim 128, and in sum as much for 64.
    with torch.cuda.device(operands.q_QNH.device):
        out_1QNH, lse_1NQ, *_ = _flash_attn_fwd(
            operands.q_QNH.unsqueeze(0),
            operands.k_SKH.unsqueeze(0),
            operands.v_SKH.unsqueeze(0),
            softmax_scale=operands.scale,
            mask_mod=_is_attended,
            aux_tensors=_mask_tensors(plan),
            block_sparse_tensors=_lists(plan.of_queries, (grid.query_tile, grid.key_tile)),
            return_lse=True,
        )
    return out_1QNH.squeeze(0), lse_1NQ.squeeze(0)


def run_backward(
    operands: Operands, upstream: Upstream, plan: BlockPlan, grid: BlockGrid
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq_QNH, dk_SKH and dv_SKH of the keys at hand, in the dtype of q."""
    dlse_NQ = upstream.dlse_NQ
    with torch.cuda.device(operands.q_QNH.device):
        grads = _flash_attn_bwd(
            operands.q_QNH.unsqueeze(0),
            operands.k_SKH.unsqueeze(0),
            operands.v_SKH.unsqueeze(0),
            upstream.out_QNH.unsqueeze(0),
            upstream.dout_QNH.unsqueeze(0),
            upstream.lse_NQ.contiguous().unsqueeze(0),
            softmax_scale=operands.scale,
            mask_mod=_is_attended,
            aux_tensors=_mask_tensors(plan),
            block_sparse_tensors=_lists(plan.of_keys, (grid.backward_query_tile, grid.key_tile)),
            dlse=None if dlse_NQ is None else dlse_NQ.contiguous().unsqueeze(0),
        )
    dq_1QNH, dk_1SKH, dv_1SKH = grads
    return dq_1QNH.squeeze(0), dk_1SKH.squeeze(0), dv_1SKH.squeeze(0)


def _mask_tensors(plan: BlockPlan) -> list[Tensor]:
    return [plan.end_S, plan.delta_1]


def _lists(lists: TileLists, block_size: tuple[int, int]) -> BlockSparseTensorsTorch:
    return BlockSparseTensorsTorch(
        mask_block_cnt=lists.partial_count_11R,
        mask_block_idx=lists.partial_index_11RW,
        full_block_cnt=lists.full_count_11R,
        full_block_idx=lists.full_index_11RW,
        block_size=block_size,
    )
