"""One block of the reference on the CPU, through torch's own CPU flash attention.

Nothing of the size queries x keys exists but a block's mask: of GROUP_TOKENS^2 at most, or, of a
window W, of the lesser of W and WINDOW_QUERIES times that and W.

One head size is all that the operators know: where values have another one than queries and keys,
zeros fill the smaller ones up.

The two ATen operators behind `scaled_dot_product_attention` are called directly because only they
return and take the log-sum-exp; their causal mask is aligned at the upper left, as blocks need it.
"""

from typing import Final

import torch
from torch import Tensor

from ratoon_kernels.precision import accumulation_dtype
from ratoon_kernels.tree_attention.blocks import BlockMask, attended_pairs
from ratoon_kernels.tree_attention.operands import Operands, Upstream

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# One of them carries dLSE; the rest keep the width even for the CPU's matrix units.
_NUM_EXTRA_COLUMNS: Final = 8


def block_forward(block: Operands, mask: BlockMask) -> tuple[Tensor, Tensor]:
    """Returns out_QNV (dtype of q) and lse_NQ (accumulation dtype) of one block."""
    width, value_dim = _width(block), block.v_SKH.shape[-1]
    out_1NQW, lse_1NQ = _forward(
        *(_heads_first(_widen(x, width)) for x in (block.q_QNH, block.k_SKH, block.v_SKH)),
        0.0,
        mask is BlockMask.CAUSAL,
        attn_mask=_additive_mask(block, mask, block.q_QNH.dtype),
        scale=block.scale,
    )
    return _tokens_first(out_1NQW)[..., :value_dim], lse_1NQ[0]


def block_backward(
    block: Operands, upstream: Upstream, mask: BlockMask
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq_QNH, dk_SKH and dv_SKV of one block, in the accumulation dtype."""
    # The operator adds up dK and dV over its own blocks of queries in the dtype that it is given:
    # in 16 bits the error would grow with their number.
    dtype = accumulation_dtype(block.q_QNH.dtype)
    inputs = (
        *(upstream.dout_QNH, block.q_QNH, block.k_SKH, block.v_SKH),
        upstream.out_QNH,
    )
    width = _width(block)
    column = width
    if upstream.dlse_NQ is not None:
        width += _NUM_EXTRA_COLUMNS
    dout, q, k, v, out = (_widen(x.to(dtype), width) for x in inputs)
    if upstream.dlse_NQ is not None:
        # The operator's own delta = rowsum(dout * out) comes out as delta - dlse: dS = P * (dP -
        # delta + dlse), and v has zeros in the extra columns, so dP stays as it is.
        out[..., column] = -upstream.dlse_NQ.T
        dout[..., column] = 1
    grads = _backward(
        *(_heads_first(x) for x in (dout, q, k, v, out)),
        upstream.lse_NQ[None],
        0.0,
        mask is BlockMask.CAUSAL,
        attn_mask=_additive_mask(block, mask, dtype),
        scale=block.scale,
    )
    head_dim, value_dim = block.q_QNH.shape[-1], block.v_SKH.shape[-1]
    dq, dk, dv = (_tokens_first(grad) for grad in grads)
    return dq[..., :head_dim], dk[..., :head_dim], dv[..., :value_dim]


def _heads_first(x_TNH: Tensor) -> Tensor:
    return x_TNH.transpose(0, 1).unsqueeze(0)


def _tokens_first(x_1NTH: Tensor) -> Tensor:
    return x_1NTH[0].transpose(0, 1)


def _width(block: Operands) -> int:
    return max(block.q_QNH.shape[-1], block.v_SKH.shape[-1])


def _widen(x_TNH: Tensor, width: int) -> Tensor:
    """Returns the tensor, or a copy with zeros behind each row."""
    missing = width - x_TNH.shape[-1]
    return torch.nn.functional.pad(x_TNH, (0, missing)) if missing else x_TNH


def _additive_mask(block: Operands, mask: BlockMask, dtype: torch.dtype) -> Tensor | None:
    if mask is not BlockMask.PAIRS:
        return None
    is_attended_QS = attended_pairs(block, block.queries)
    zeros = torch.zeros(is_attended_QS.shape, dtype=dtype)
    return zeros.masked_fill_(~is_attended_QS, -torch.inf)
