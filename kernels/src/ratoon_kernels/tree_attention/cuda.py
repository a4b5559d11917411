"""The cuda backend of tree attention: our own kernels for Hopper (sm_90a).

It allocates everything that its kernels write, and they write every element of it; nothing here
waits for the GPU.
"""

import torch
from torch import Tensor

from ratoon_kernels.jit import availability, head_slab_map, head_tile_map, memset_zero
from ratoon_kernels.layout import TreeLayout
from ratoon_kernels.schedule import TILE_SIZE
from ratoon_kernels.tiles import Span
from ratoon_kernels.tree_attention import cuda_backward
from ratoon_kernels.tree_attention.cuda_launch import Call
from ratoon_kernels.tree_attention.cuda_specs import (
    DTYPES,
    FORWARD_KEYS,
    HEAD_DIMS,
    NUM_THREADS,
    SHARED_BYTES,
    SPECS,
    STORE_ROWS,
)
from ratoon_kernels.tree_attention.operands import Operands, Upstream


def unavailable_reason() -> str | None:
    """Returns why this machine cannot run it, or None."""
    return availability.unavailable_reason(SPECS)


def unsupported_reason(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    _is_deterministic: bool,
    value_dim: int | None = None,
    _window: int | None = None,
) -> str | None:
    """Returns why it does not serve such a call, or None."""
    if dtype not in DTYPES:
        return f"dtype {dtype}, it has bf16 and fp16"
    if (head_dim, value_dim or head_dim) not in HEAD_DIMS:
        sizes = ", ".join(str(q) if q == v else f"{q} with values of {v}" for q, v in HEAD_DIMS)
        values = f" with values of {value_dim}" if value_dim not in (None, head_dim) else ""
        return f"head_dim {head_dim}{values}, it has {sizes}"
    return availability.unsupported_reason(device)


def plan(layout: TreeLayout, window: int | None = None) -> list[Tensor]:
    """Returns what it reads of a layout beside `end_T`: the packed schedule and its header."""
    if window is None:
        return [layout.schedule_table, layout.schedule_header]
    tensors = layout.windowed_schedule(window)
    return [tensors.table, tensors.header]


def partial_plan(
    layout: TreeLayout, queries: Span, keys: Span, window: int | None = None
) -> list[Tensor]:
    """Returns the packed schedule of these ranges and its header, kept by the layout."""
    tensors = layout.partial_schedule(queries, keys, window)
    return [tensors.table, tensors.header]


def forward(operands: Operands) -> tuple[Tensor, Tensor]:
    """Returns out_TNV (dtype of q) and lse_NT (fp32) of the whole forest."""
    return _launch_forward(Call.of(operands, is_partial=False))


def backward(operands: Operands, upstream: Upstream) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq_TNH, dk_TKH and dv_TKV of the whole forest, in the dtype of q."""
    dk_TKH, dv_TKH = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for x in (operands.k_SKH, operands.v_SKH)
    )
    call = Call.of(operands, is_partial=False)
    return cuda_backward.launch(call, upstream, dk_TKH, dv_TKH), dk_TKH, dv_TKH


def partial_forward(operands: Operands) -> tuple[Tensor, Tensor]:
    """Returns out_QNV and lse_NQ over the keys at hand, both fp32."""
    return _launch_forward(Call.of(operands, is_partial=True))


def partial_backward(
    operands: Operands, upstream: Upstream, dk_acc_SKH: Tensor, dv_acc_SKH: Tensor
) -> Tensor:
    """Adds to the two fp32 buffers and returns dq_QNH in fp32."""
    return cuda_backward.launch(
        Call.of(operands, is_partial=True), upstream, dk_acc_SKH, dv_acc_SKH
    )


def _launch_forward(call: Call) -> tuple[Tensor, Tensor]:
    """Returns out_QNV (dtype of q, fp32 in the partial form) and lse_NQ in fp32."""
    num_queries, num_heads, head_dim = call.q_QNH.shape
    out_dtype = torch.float32 if call.is_partial else call.q_QNH.dtype
    out_shape = (num_queries, num_heads, call.v_SKH.shape[2])
    out_QNV = torch.empty(out_shape, dtype=out_dtype, device=call.device)
    lse_NQ = call.empty(num_heads, num_queries)
    if num_queries == 0:
        return out_QNV, lse_NQ
    if call.header.num_keys == 0:
        return out_QNV.zero_(), lse_NQ.fill_(-torch.inf)
    q_map = head_tile_map(call.q_QNH, TILE_SIZE)
    k_map, v_map = (head_tile_map(x, FORWARD_KEYS[head_dim]) for x in (call.k_SKH, call.v_SKH))
    # The partial form writes without a map: any valid one fills the place.
    out_map = q_map if call.is_partial else head_slab_map(out_QNV, STORE_ROWS)
    counter = torch.empty(1, dtype=torch.int32, device=call.device)
    memset_zero(counter, call.stream)
    header = call.header
    num_items = header.forward_items.count * num_heads
    call.kernel("forward").launch(
        grid=call.grid(num_items),
        block=NUM_THREADS,
        shared_bytes=SHARED_BYTES,
        stream=call.stream,
        args=(
            *(q_map, k_map, v_map, out_map),
            *(call.section(header.forward_items), call.section(header.runs)),
            *(call.section(header.end), call.section(header.start), counter, out_QNV, lse_NQ),
            0 if call.sink_N is None else call.sink_N,
            *(num_items, num_heads, call.heads_per_kv_head, num_queries, header.delta),
            call.scale_log2,
        ),
    )
    return out_QNV, lse_NQ
