"""The reference backend of tree attention: eager torch, any device, the truth for the others.

For the same inputs and thread count the bits are the same on every call: blocks run in packed
order, and each sum has one order, in the accumulation dtype.
"""

import torch
from torch import Tensor

from ratoon_kernels.layout import TreeLayout
from ratoon_kernels.precision import ACCUMULATION_DTYPES
from ratoon_kernels.tiles import Span
from ratoon_kernels.tree_attention import block_flash, blocks
from ratoon_kernels.tree_attention.blocks import Block, cut_into_blocks
from ratoon_kernels.tree_attention.operands import Operands, Upstream


def unavailable_reason() -> str | None:
    """Returns None: torch is all that it needs."""
    return None


def unsupported_reason(
    _device: torch.device,
    dtype: torch.dtype,
    _head_dim: int,
    _is_deterministic: bool,
    _value_dim: int | None = None,
    _window: int | None = None,
) -> str | None:
    """Returns why it does not serve such a call, or None."""
    return None if dtype in ACCUMULATION_DTYPES else f"no support for dtype {dtype}"


def plan(layout: TreeLayout, window: int | None = None) -> list[Tensor]:
    """Returns what it reads of a layout beside `end_T`: the host node table, and depths."""
    table = [layout.node_table_M4]
    return table if window is None else [*table, layout.position_T]


def partial_plan(
    layout: TreeLayout, _queries: Span, _keys: Span, window: int | None = None
) -> list[Tensor]:
    """Returns the same for any part of the forest."""
    return plan(layout, window)


def forward(operands: Operands) -> tuple[Tensor, Tensor]:
    """Returns out_TNV (dtype of q) and lse_NT (accumulation dtype) of the whole forest."""
    out_TNV, lse_NT = partial_forward(operands)
    return out_TNV.to(operands.q_QNH.dtype), lse_NT


def backward(operands: Operands, upstream: Upstream) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq_TNH, dk_TKH and dv_TKV of the whole forest, in the dtype of q."""
    dtype = operands.q_QNH.dtype
    dk_acc_TKH, dv_acc_TKV = (
        torch.zeros(x.shape, dtype=operands.accumulation_dtype, device=x.device)
        for x in (operands.k_SKH, operands.v_SKH)
    )
    dq_acc_TNH = partial_backward(operands, upstream, dk_acc_TKH, dv_acc_TKV)
    return dq_acc_TNH.to(dtype), dk_acc_TKH.to(dtype), dv_acc_TKV.to(dtype)


def partial_forward(operands: Operands) -> tuple[Tensor, Tensor]:
    """Returns out_QNV and lse_NQ over the keys at hand, both in the accumulation dtype.

    A query that attends none of them has output 0 and log-sum-exp -inf.
    """
    dtype, device = operands.accumulation_dtype, operands.q_QNH.device
    num_queries, num_heads, _ = operands.out_shape
    kernel = _block_kernel(operands)
    out_QNV = torch.zeros(operands.out_shape, dtype=dtype, device=device)
    lse_NQ = torch.full((num_heads, num_queries), -torch.inf, dtype=dtype, device=device)
    written_stop = operands.queries.start
    for block in _blocks_of(operands):
        part = operands.narrow(block.queries, block.keys)
        rows = block.queries.rows_from(operands.queries.start)
        more_QNV, more_lse_NQ = kernel.block_forward(part, block.mask)
        # Blocks come in packed order: queries past all earlier blocks have no output yet.
        if block.queries.start >= written_stop:
            out_QNV[rows], lse_NQ[:, rows] = more_QNV, more_lse_NQ
        else:
            _merge_into(out_QNV[rows], lse_NQ[:, rows], more_QNV, more_lse_NQ)
        written_stop = max(written_stop, block.queries.stop)
    return out_QNV, lse_NQ


def partial_backward(
    operands: Operands, upstream: Upstream, dk_acc_SKH: Tensor, dv_acc_SKH: Tensor
) -> Tensor:
    """Adds to the two buffers; returns dq_QNH. All three are in the accumulation dtype."""
    q_QNH = operands.q_QNH
    kernel = _block_kernel(operands)
    dq_acc_QNH = torch.zeros(q_QNH.shape, dtype=operands.accumulation_dtype, device=q_QNH.device)
    for block in _blocks_of(operands):
        part = operands.narrow(block.queries, block.keys)
        rows = block.queries.rows_from(operands.queries.start)
        key_rows = block.keys.rows_from(operands.keys.start)
        dq, dk, dv = kernel.block_backward(part, upstream.narrow(rows), block.mask)
        dq_acc_QNH[rows] += dq
        dk_acc_SKH[key_rows] += dk
        dv_acc_SKH[key_rows] += dv
    return dq_acc_QNH


def _blocks_of(operands: Operands) -> list[Block]:
    return cut_into_blocks(operands.plan[0], operands.queries, operands.keys, operands.window)


def _block_kernel(operands: Operands):
    # The CPU's operator takes the maximum before it scales: NaN for a scale of 0 or less.
    is_flash = operands.q_QNH.device.type == "cpu" and operands.scale > 0
    return block_flash if is_flash else blocks


def _merge_into(out_QNV: Tensor, lse_NQ: Tensor, more_QNV: Tensor, more_lse_NQ: Tensor) -> None:
    """Merges a block into what earlier blocks gave the same queries, whose weights are not zero."""
    merged_NQ = torch.logaddexp(lse_NQ, more_lse_NQ)
    out_QNV.mul_((lse_NQ - merged_NQ).exp_().T[..., None])
    out_QNV.addcmul_(more_QNV, (more_lse_NQ - merged_NQ).exp_().T[..., None])
    lse_NQ.copy_(merged_NQ)
