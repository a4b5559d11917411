"""One block of the reference on the CPU, through torch's own CPU flash attention.

Nothing of the size queries x keys exists but a block's mask of at most GROUP_TOKENS^2.

The two ATen operators behind `scaled_dot_product_attention` are called directly because only they
return and take the log-sum-exp; their causal mask is aligned at the upper left, as blocks need it.
"""

from typing import Final

import torch
from torch import Tensor

from ratoon_kernels.precision import accumulation_dtype
from ratoon_kernels.tree_attention.blocks import BlockMask
from ratoon_kernels.tree_attention.operands import Operands, Upstream

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# One of them carries dLSE; the rest keep the width even for the CPU's matrix units.
_NUM_EXTRA_COLUMNS: Final = 8


def block_forward(block: Operands, mask: BlockMask) -> tuple[Tensor, Tensor]:
    """Returns out_QNH (dtype of q) and lse_NQ (accumulation dtype) of one block."""
    out_1NQH, lse_1NQ = _forward(
        _heads_first(block.q_QNH),
        _heads_first(block.k_SKH),
        _heads_first(block.v_SKH),
        0.0,
        mask is BlockMask.CAUSAL,
        attn_mask=_additive_mask(block, mask, block.q_QNH.dtype),
        scale=block.scale,
    )
    return _tokens_first(out_1NQH), lse_1NQ[0]


def block_backward(
    block: Operands, upstream: Upstream, mask: BlockMask
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq_QNH, dk_SKH and dv_SKH of one block, in the accumulation dtype."""
    # The operator adds up dK and dV over its own blocks of queries in the dtype that it is given:
    # in 16 bits the error would grow with their number.
    dtype = accumulation_dtype(block.q_QNH.dtype)
    q, k, v = (x.to(dtype) for x in (block.q_QNH, block.k_SKH, block.v_SKH))
    dout, out = upstream.dout_QNH.to(dtype), upstream.out_QNH.to(dtype)
    if upstream.dlse_NQ is not None:
        dout, out = _append_dlse(dout, out, upstream.dlse_NQ)
        q, k, v = (_append_zeros(x) for x in (q, k, v))
    grads = _backward(
        _heads_first(dout),
        _heads_first(q),
        _heads_first(k),
        _heads_first(v),
        _heads_first(out),
        upstream.lse_NQ[None],
        0.0,
        mask is BlockMask.CAUSAL,
        attn_mask=_additive_mask(block, mask, dtype),
        scale=block.scale,
    )
    head_dim = block.q_QNH.shape[-1]
    dq_QNH, dk_SKH, dv_SKH = (_tokens_first(grad)[..., :head_dim] for grad in grads)
    return dq_QNH, dk_SKH, dv_SKH


def _heads_first(x_TNH: Tensor) -> Tensor:
    return x_TNH.transpose(0, 1).unsqueeze(0)


def _tokens_first(x_1NTH: Tensor) -> Tensor:
    return x_1NTH[0].transpose(0, 1)


def _additive_mask(block: Operands, mask: BlockMask, dtype: torch.dtype) -> Tensor | None:
    """Returns the mask of a SUBTREES block, whose queries and keys are the same tokens."""
    if mask is not BlockMask.SUBTREES:
        return None
    start, stop = block.keys.start, block.keys.stop
    index = torch.arange(start, stop, dtype=torch.int32)
    is_attended = (index <= index[:, None]) & (index[:, None] < block.end_T[start:stop])
    zeros = torch.zeros(is_attended.shape, dtype=dtype)
    return zeros.masked_fill_(~is_attended, -torch.inf)


def _append_zeros(x_TNH: Tensor) -> Tensor:
    return torch.nn.functional.pad(x_TNH, (0, _NUM_EXTRA_COLUMNS))


def _append_dlse(dout_QNH: Tensor, out_QNH: Tensor, dlse_NQ: Tensor) -> tuple[Tensor, Tensor]:
    """Makes the operator's own delta = rowsum(dout * out) come out as delta - dlse.

    dS = P * (dP - delta + dlse), and v has zeros in the extra columns, so dP stays as it is.
    """
    dout, out = _append_zeros(dout_QNH), _append_zeros(out_QNH)
    head_dim = out_QNH.shape[-1]
    out[..., head_dim] = -dlse_NQ.T
    dout[..., head_dim] = 1
    return dout, out
