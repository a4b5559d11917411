"""Triton kernels of the gated delta rule's states: one launch runs a whole tree, either way.

A task is a node, a head and a block of values. Tasks are taken by ticket in an order in which every
node comes after those that it waits for, so that a task that waits is never one whose turn keeps
another's away: a grid of any size ends. A node waits for its parent's end forwards, for its
children's gradients backwards, and adds these in packed order.

A task holds a transposed block of the state, [B, D], in fp32. As in `chunk_kernels.py`, products
have 32 rows.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from ratoon_kernels.gated_delta.chunk_kernels import _tile, _tile_transposed

_CHUNK = tl.constexpr(64)


@triton.jit
def _wait(flag):
    value = tl.atomic_add(flag, 0, sem="acquire")
    while value == 0:
        value = tl.atomic_add(flag, 0, sem="acquire")


@triton.jit
def _raise_flag(flag):
    # All threads' stores come before the flag.
    tl.debug_barrier()
    tl.atomic_xchg(flag, 1, sem="release")


@triton.jit
def _state_offsets(row, head, value_B, N: tl.constexpr, D: tl.constexpr, V: tl.constexpr):
    """Where a block of a state [D, V] lies, transposed."""
    base = (row.to(tl.int64) * N + head) * D * V
    return base + tl.arange(0, D)[None, :] * V + value_B[:, None]


@triton.jit
def run_states(
    k_TKD,
    inverse_TK,
    total_TN,
    seen_TND,
    update_TNV,
    first_SNDV,
    end_SNDV,
    handed_ENDV,
    state_CNVD,
    flags,
    order_M,
    start_M,
    stop_M,
    chunk_M,
    parent_M,
    slot_M,
    first_M,
    handed_M,
    k_stride,
    k_head_stride,
    K: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Writes the state before each chunk, and its updates in place of those without a state."""
    blocks = V // BLOCK
    ticket = tl.atomic_add(flags, 1)
    node = tl.load(order_M + ticket // (N * blocks))
    task = ticket % (N * blocks)
    head = task // blocks
    key_head = head // (N // K)
    value_B = task % blocks * BLOCK + tl.arange(0, BLOCK)
    column_D = tl.arange(0, D)
    row_L = tl.arange(0, _CHUNK)
    dtype = k_TKD.dtype.element_ty
    start = tl.load(start_M + node)
    stop = tl.load(stop_M + node)
    first_chunk = tl.load(chunk_M + node)
    parent = tl.load(parent_M + node)
    slot = tl.load(slot_M + node)
    k_TD = k_TKD + key_head * k_head_stride
    state_BD = tl.zeros([BLOCK, D], tl.float32)
    if first_SNDV is not None:
        row = tl.load(first_M + node)
        if row >= 0:
            state_BD = tl.load(first_SNDV + _state_offsets(row, head, value_B, N, D, V))
    if parent >= 0:
        _wait(flags + 1 + parent * (N * blocks) + task)
        parent_slot = tl.load(slot_M + parent)
        state_BD = tl.load(end_SNDV + _state_offsets(parent_slot, head, value_B, N, D, V))
    for step in tl.range(0, tl.cdiv(stop - start, _CHUNK), num_stages=STAGES):
        token = start + step * _CHUNK
        length = tl.minimum(stop - token, _CHUNK)
        is_L = row_L < length
        token = token.to(tl.int64)
        chunk = (first_chunk + step).to(tl.int64)
        place = (chunk * N + head) * V * D
        state = state_CNVD + place + value_B[:, None] * D + column_D[None, :]
        narrow_BD = state_BD.to(dtype)
        tl.store(state, narrow_BD)
        seen_DL = _tile_transposed(
            seen_TND + token * (N * D) + head * D, row_L, N * D, column_D, is_L
        )
        k_LD = _tile(k_TD + token * k_stride, row_L, k_stride, column_D, is_L)
        update = (
            update_TNV + token * (N * V) + head * V + row_L[None, :] * (N * V) + value_B[:, None]
        )
        update_BL = tl.load(update, mask=is_L[None, :], other=0.0).to(tl.float32)
        update_BL -= tl.dot(narrow_BD, seen_DL)
        tl.store(update, update_BL.to(dtype), mask=is_L[None, :])
        total_L = tl.load(total_TN + token * N + row_L * N + head, mask=is_L, other=0.0)
        end = tl.load(total_TN + (token + length - 1) * N + head)
        rest_L = tl.load(inverse_TK + token * K + row_L * K + key_head, mask=is_L, other=0.0)
        rest_L *= tl.exp(end - total_L)
        state_BD = tl.dot((update_BL * rest_L[None, :]).to(dtype), k_LD, state_BD * tl.exp(end))
    if handed_ENDV is not None:
        row = tl.load(handed_M + node)
        if row >= 0:
            tl.store(handed_ENDV + _state_offsets(row, head, value_B, N, D, V), state_BD)
    if slot >= 0:
        tl.store(end_SNDV + _state_offsets(slot, head, value_B, N, D, V), state_BD)
        _raise_flag(flags + 1 + node * (N * blocks) + task)


@triton.jit
def run_dstates(
    q_TKD,
    k_TKD,
    inverse_q_TK,
    inverse_k_TK,
    total_TN,
    seen_TND,
    dout_TNV,
    dupdate_TNV,
    dend_ENDV,
    dfirst_SNDV,
    dstate_CNVD,
    flags,
    order_M,
    start_M,
    stop_M,
    chunk_M,
    slot_M,
    handed_M,
    child_M,
    children,
    scale,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    dout_stride,
    dout_head_stride,
    K: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Writes the gradient of the state behind each chunk, and completes those of updates."""
    blocks = V // BLOCK
    ticket = tl.atomic_add(flags, 1)
    node = tl.load(order_M + ticket // (N * blocks))
    task = ticket % (N * blocks)
    head = task // blocks
    key_head = head // (N // K)
    value_B = task % blocks * BLOCK + tl.arange(0, BLOCK)
    column_D = tl.arange(0, D)
    row_L = tl.arange(0, _CHUNK)
    dtype = k_TKD.dtype.element_ty
    start = tl.load(start_M + node)
    stop = tl.load(stop_M + node)
    first_chunk = tl.load(chunk_M + node)
    slot = tl.load(slot_M + node)
    q_TD = q_TKD + key_head * q_head_stride
    k_TD = k_TKD + key_head * k_head_stride
    dstate_BD = tl.zeros([BLOCK, D], tl.float32)
    if dend_ENDV is not None:
        row = tl.load(handed_M + node)
        if row >= 0:
            dstate_BD = tl.load(dend_ENDV + _state_offsets(row, head, value_B, N, D, V))
    for entry in range(tl.load(child_M + node), tl.load(child_M + node + 1)):
        child = tl.load(children + entry)
        _wait(flags + 1 + child * (N * blocks) + task)
        child_slot = tl.load(slot_M + child)
        dstate_BD += tl.load(dfirst_SNDV + _state_offsets(child_slot, head, value_B, N, D, V))
    num_chunks = tl.cdiv(stop - start, _CHUNK)
    for step in tl.range(0, num_chunks, num_stages=STAGES):
        index = num_chunks - 1 - step
        token = start + index * _CHUNK
        length = tl.minimum(stop - token, _CHUNK)
        is_L = row_L < length
        token = token.to(tl.int64)
        chunk = (first_chunk + index).to(tl.int64)
        place = (chunk * N + head) * V * D
        dstate = dstate_CNVD + place + value_B[:, None] * D + column_D[None, :]
        narrow_BD = dstate_BD.to(dtype)
        tl.store(dstate, narrow_BD)
        k_DL = _tile_transposed(k_TD + token * k_stride, row_L, k_stride, column_D, is_L)
        q_LD = _tile(q_TD + token * q_stride, row_L, q_stride, column_D, is_L)
        seen_LD = _tile(seen_TND + token * (N * D) + head * D, row_L, N * D, column_D, is_L)
        dout_BL = _tile_transposed(
            dout_TNV + token * dout_stride + head * dout_head_stride,
            row_L,
            dout_stride,
            value_B,
            is_L,
        )
        total_L = tl.load(total_TN + token * N + row_L * N + head, mask=is_L, other=0.0)
        end = tl.load(total_TN + (token + length - 1) * N + head)
        rest_L = tl.load(inverse_k_TK + token * K + row_L * K + key_head, mask=is_L, other=0.0)
        rest_L *= tl.exp(end - total_L)
        read_L = scale * tl.load(
            inverse_q_TK + token * K + row_L * K + key_head, mask=is_L, other=0.0
        )
        read_L *= tl.exp(total_L)
        dupdate = (
            dupdate_TNV + token * (N * V) + head * V + row_L[None, :] * (N * V) + value_B[:, None]
        )
        dupdate_BL = tl.load(dupdate, mask=is_L[None, :], other=0.0).to(tl.float32)
        dupdate_BL += tl.dot(narrow_BD, k_DL) * rest_L[None, :]
        narrow_BL = dupdate_BL.to(dtype)
        tl.store(dupdate, narrow_BL, mask=is_L[None, :])
        read_BL = (dout_BL.to(tl.float32) * read_L[None, :]).to(dtype)
        dstate_BD = tl.dot(read_BL, q_LD, dstate_BD * tl.exp(end))
        dstate_BD -= tl.dot(narrow_BL, seen_LD)
    if slot >= 0:
        tl.store(dfirst_SNDV + _state_offsets(slot, head, value_B, N, D, V), dstate_BD)
        _raise_flag(flags + 1 + node * (N * blocks) + task)
