"""Launches the kernels of the backward: prepare, main, finish.

The workspace is fp32 dQ (none in deterministic mode), two floats a query and head, and fp32 dK and
dV of no more key tiles than there are: those of the tiles that are cut, or, in deterministic mode,
of their pieces.

In deterministic mode dQ has a kernel of its own, shaped like the forward, and the main kernel does
without it: seven products instead of five, and every sum in one order.
"""

import torch
from torch import Tensor

from ratoon_kernels.jit import head_slab_map, head_tile_map
from ratoon_kernels.schedule import TILE_SIZE, WorkSections
from ratoon_kernels.tree_attention.cuda_launch import Call, aligned
from ratoon_kernels.tree_attention.cuda_specs import (
    BACKWARD_KEYS,
    BACKWARD_QUERIES,
    FINISH_KEYS,
    NUM_THREADS,
    QUERY_KEYS,
    ROW_BLOCK,
    SHARED_BYTES,
    SLAB,
    SMALL_THREADS,
    STORE_ROWS,
)
from ratoon_kernels.tree_attention.operands import Upstream

_STATS_PER_QUERY = 2
# The last items come longest first, those of as many whole kv heads as have about this many: with
# fewer, blocks end apart, and with more, dQ leaves the cache.
_TAIL_ITEMS = 384


def launch(call: Call, upstream: Upstream, dk_SKH: Tensor, dv_SKH: Tensor) -> Tensor:
    """Returns dq_QNH; writes dK and dV, or adds to them in the partial form.

    Args:
        call: The operands.
        upstream: Gradients, output and log-sum-exp of the queries; its `dsink_N` is written.
        dk_SKH: dtype of k, fp32 in the partial form.
        dv_SKH: The same.
    """
    num_queries, num_heads, head_dim = call.q_QNH.shape
    _, num_kv_heads, value_dim = call.v_SKH.shape
    dq_dtype = torch.float32 if call.is_partial else call.q_QNH.dtype
    dq_QNH = torch.empty(call.q_QNH.shape, dtype=dq_dtype, device=call.device)
    if num_queries == 0 or call.header.num_keys == 0:
        if upstream.dsink_N is not None:
            upstream.dsink_N.zero_()
        return dq_QNH.zero_()
    # A step may reach past the last query.
    num_blocks = -(-(num_queries + max(BACKWARD_QUERIES.values()) - 1) // ROW_BLOCK)
    num_rows = num_blocks * ROW_BLOCK
    # Eight rows lie together: both of their statistics, and their dQ in the order of fragments.
    stats = call.empty(num_heads, num_rows // 8, _STATS_PER_QUERY, 8)
    num_slabs = head_dim // SLAB
    dq_acc = None if call.is_deterministic else call.empty(num_slabs, num_heads, num_rows, SLAB)
    counters = torch.empty(2, dtype=torch.int32, device=call.device)
    dout_QNH = aligned(upstream.dout_QNH)
    level = call.header.level(num_kv_heads) if dq_acc is None else call.header.sweep
    slots = call.empty(num_kv_heads, level.num_slots, TILE_SIZE * (head_dim + value_dim))
    _prepare(call, upstream, dout_QNH, stats, dq_acc, slots, counters)
    if call.sink_N is not None and upstream.dsink_N is not None:
        _add_up_sinks(call, call.sink_N, stats, upstream.dsink_N)
    _add_up_keys(call, level, dout_QNH, stats, dq_acc, slots, counters, dk_SKH, dv_SKH)
    if dq_acc is None:
        _launch_queries(call, dout_QNH, stats, counters, dq_QNH)
    else:
        call.kernel("backward_finish_queries").launch(
            grid=(-(-num_queries // ROW_BLOCK), num_heads * num_slabs, 1),
            block=SMALL_THREADS,
            shared_bytes=0,
            stream=call.stream,
            args=(dq_acc, dq_QNH, num_queries, num_rows, call.scale),
        )
    return dq_QNH if call.sign == 1 else dq_QNH.mul_(call.sign)


def _prepare(
    call: Call,
    upstream: Upstream,
    dout_QNH: Tensor,
    stats: Tensor,
    dq_acc: Tensor | None,
    slots: Tensor,
    counters: Tensor,
) -> None:
    num_heads, num_eights, _, _ = stats.shape
    out_QNH = aligned(upstream.out_QNH)
    lse_NQ = upstream.lse_NQ if upstream.lse_NQ.stride(1) == 1 else upstream.lse_NQ.contiguous()
    dlse_NQ = upstream.dlse_NQ
    if dlse_NQ is not None and dlse_NQ.stride(1) != 1:
        dlse_NQ = dlse_NQ.contiguous()
    call.kernel("backward_prepare").launch(
        grid=(num_eights * 8 // ROW_BLOCK, num_heads, 1),
        block=SMALL_THREADS,
        shared_bytes=0,
        stream=call.stream,
        args=(
            *_rows(out_QNH),
            *_rows(dout_QNH),
            *(lse_NQ, lse_NQ.stride(0)),
            *((0, 0) if dlse_NQ is None else (dlse_NQ, dlse_NQ.stride(0))),
            *(stats, 0 if dq_acc is None else dq_acc, slots, slots.numel() // 4, counters),
            *(call.q_QNH.shape[0], call.scale),
        ),
    )


def _add_up_sinks(call: Call, sink_N: Tensor, stats: Tensor, dsink_N: Tensor) -> None:
    """Writes the sinks' gradient, for which `sink_gradient` would read output and dout again."""
    minus_lse, minus_delta = stats.unbind(2)
    share = torch.add(sink_N[:, None, None], minus_lse, alpha=call.scale).exp_()
    torch.sum(share.mul_(minus_delta), dim=(1, 2), out=dsink_N)


def _rows(x_QNH: Tensor) -> tuple[Tensor, int, int]:
    return x_QNH, x_QNH.stride(0) * x_QNH.element_size(), x_QNH.stride(1) * x_QNH.element_size()


def _add_up_keys(
    call: Call,
    level: WorkSections,
    dout_QNH: Tensor,
    stats: Tensor,
    dq_acc: Tensor | None,
    slots: Tensor,
    counters: Tensor,
    dk_SKH: Tensor,
    dv_SKH: Tensor,
) -> None:
    """Launches the main kernel, then the sums of the key tiles that are cut."""
    num_keys, num_kv_heads, head_dim = call.k_SKH.shape
    key_rows = BACKWARD_KEYS[head_dim]
    num_items = level.pieces.count * (TILE_SIZE // key_rows) * num_kv_heads
    if num_items == 0:
        return
    dk, dv = _pairs(dk_SKH), _pairs(dv_SKH)
    num_heads, num_eights, _, _ = stats.shape
    step_rows = BACKWARD_QUERIES[head_dim]
    q_map, dout_map = (head_tile_map(x, step_rows) for x in (call.q_QNH, dout_QNH))
    k_map, v_map = (head_tile_map(x, key_rows) for x in (call.k_SKH, call.v_SKH))
    call.kernel("backward", with_dq=dq_acc is not None).launch(
        grid=call.grid(num_items),
        block=NUM_THREADS,
        shared_bytes=SHARED_BYTES,
        stream=call.stream,
        args=(
            *(q_map, k_map, v_map, dout_map),
            *(call.section(level.pieces), call.section(call.header.end)),
            *(call.section(call.header.start), counters),
            *(stats, 0 if dq_acc is None else dq_acc, slots, dk, dv),
            *(dk.stride(0), dk.stride(1), dv.stride(0), dv.stride(1)),
            *(level.pieces.count, level.num_slots, num_kv_heads, call.heads_per_kv_head),
            *(8 * num_eights, num_keys, call.header.delta, num_heads * 8 * num_eights),
            min(num_kv_heads, max(1, round(_TAIL_ITEMS * num_kv_heads / num_items))),
            *(call.scale, call.scale_log2),
        ),
    )
    if level.split_tiles.count:
        _add_up_slots(call, level, slots, dk, dv)
    for given, written in ((dk_SKH, dk), (dv_SKH, dv)):
        if written is not given:
            given.copy_(written)


def _pairs(gradient_SKH: Tensor) -> Tensor:
    """Returns the buffer, or a copy of it where two adjacent values are not one aligned access."""
    pair_bytes = 2 * gradient_SKH.element_size()
    is_even = all(stride % 2 == 0 for stride in gradient_SKH.stride()[:2])
    return (
        gradient_SKH
        if is_even and gradient_SKH.data_ptr() % pair_bytes == 0
        else gradient_SKH.clone(memory_format=torch.contiguous_format)
    )


def _add_up_slots(call: Call, level: WorkSections, slots: Tensor, dk: Tensor, dv: Tensor) -> None:
    num_keys, num_kv_heads, _ = call.k_SKH.shape
    call.kernel("backward_finish_keys").launch(
        grid=(level.split_tiles.count, num_kv_heads, 2 * TILE_SIZE // FINISH_KEYS),
        block=SMALL_THREADS,
        shared_bytes=0,
        stream=call.stream,
        args=(
            *(call.section(level.split_tiles), slots, dk, dv),
            *(dk.stride(0), dk.stride(1), dv.stride(0), dv.stride(1)),
            *(level.num_slots, num_keys),
        ),
    )


def _launch_queries(
    call: Call, dout_QNH: Tensor, stats: Tensor, counters: Tensor, dq_QNH: Tensor
) -> None:
    num_queries, num_heads, head_dim = call.q_QNH.shape
    header = call.header
    q_map, dout_map = (head_tile_map(x, TILE_SIZE) for x in (call.q_QNH, dout_QNH))
    k_map, v_map = (head_tile_map(x, QUERY_KEYS[head_dim]) for x in (call.k_SKH, call.v_SKH))
    dq_map = q_map if call.is_partial else head_slab_map(dq_QNH, STORE_ROWS)
    num_items = header.forward_items.count * num_heads
    call.kernel("backward_queries").launch(
        grid=call.grid(num_items),
        block=NUM_THREADS,
        shared_bytes=SHARED_BYTES,
        stream=call.stream,
        args=(
            *(q_map, k_map, v_map, dout_map, dq_map),
            *(call.section(header.forward_items), call.section(header.runs)),
            *(call.section(header.end), call.section(header.start), counters[1:], stats, dq_QNH),
            *(num_items, num_heads, call.heads_per_kv_head, num_queries),
            *(8 * stats.shape[1], header.delta, call.scale, call.scale_log2),
        ),
    )
