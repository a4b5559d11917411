"""Launches the forward kernel, if there is a query."""

import torch
from torch import Tensor

from ratoon_kernels.jit import head_slab_map, head_tile_map, memset_zero
from ratoon_kernels.schedule import TILE_SIZE
from ratoon_kernels.tree_attention.cuda_launch import Call
from ratoon_kernels.tree_attention.cuda_specs import NUM_THREADS, SHARED_BYTES, STORE_ROWS


def launch(call: Call) -> tuple[Tensor, Tensor]:
    """Returns out_QNH (dtype of q, fp32 in the partial form) and lse_NQ in fp32."""
    num_queries, num_heads, _ = call.q_QNH.shape
    out_dtype = torch.float32 if call.is_partial else call.q_QNH.dtype
    out_QNH = torch.empty(call.q_QNH.shape, dtype=out_dtype, device=call.device)
    lse_NQ = call.empty(num_heads, num_queries)
    if num_queries == 0:
        return out_QNH, lse_NQ
    if call.header.num_keys == 0:
        return out_QNH.zero_(), lse_NQ.fill_(-torch.inf)
    q_map, k_map, v_map = (
        head_tile_map(x, TILE_SIZE) for x in (call.q_QNH, call.k_SKH, call.v_SKH)
    )
    # The partial form writes without a map: any valid one fills the place.
    out_map = q_map if call.is_partial else head_slab_map(out_QNH, STORE_ROWS)
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
            *(call.section(header.end), counter, out_QNH, lse_NQ),
            *(num_items, num_heads, call.heads_per_kv_head, num_queries, header.delta),
            call.scale_log2,
        ),
    )
    return out_QNH, lse_NQ
