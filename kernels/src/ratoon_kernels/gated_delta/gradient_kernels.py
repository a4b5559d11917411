"""Triton kernels of the gated delta rule's gradients of queries, keys, decays and strengths.

A program is half of a chunk and one head of keys; it adds over the heads of values that read it,
in order, and writes each gradient once. Queries and keys have a kernel each: the sums of both at
once would leave room for one program a multiprocessor. As in `chunk_kernels.py`, products have 32
rows.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from ratoon_kernels.gated_delta.chunk_kernels import (
    _decays,
    _half_of,
    _tile,
    _tile_transposed,
)

_HALF = tl.constexpr(32)
_CHUNK = tl.constexpr(64)


@triton.jit
def _before(
    left_LV,
    update_LV,
    state_VD,
    row_H,
    is_H,
    row_L,
    is_L,
    left_stride,
    row_stride,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """This half's rows times the state before the chunk, and times updates."""
    column_D = tl.arange(0, D)
    by_state_HD = tl.zeros([_HALF, D], tl.float32)
    by_update_HL = tl.zeros([_HALF, _CHUNK], tl.float32)
    for block in tl.range(0, V // BLOCK, num_stages=STAGES):
        column_B = block * BLOCK + tl.arange(0, BLOCK)
        left_HB = _tile(left_LV, row_H, left_stride, column_B, is_H)
        state_BD = tl.load(state_VD + column_B[:, None] * D + column_D[None, :])
        update_BL = _tile_transposed(update_LV, row_L, row_stride, column_B, is_L)
        by_state_HD = tl.dot(left_HB, state_BD, by_state_HD)
        by_update_HL = tl.dot(left_HB, update_BL, by_update_HL)
    return by_state_HD, by_update_HL


@triton.jit
def _behind(
    dout_LV,
    dright_LV,
    update_LV,
    state_VD,
    dstate_VD,
    row_H,
    is_H,
    row_L,
    is_L,
    dout_stride,
    row_stride,
    is_first,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Updates times gradients of the state behind the chunk, of outputs and of right sides.

    And this half's share of the state times its gradient.
    """
    column_D = tl.arange(0, D)
    end_HD = tl.zeros([_HALF, D], tl.float32)
    dscore_HL = tl.zeros([_HALF, _CHUNK], tl.float32)
    dlower_HL = tl.zeros([_HALF, _CHUNK], tl.float32)
    kept_D = tl.zeros([D], tl.float32)
    for block in tl.range(0, V // BLOCK, num_stages=STAGES):
        column_B = block * BLOCK + tl.arange(0, BLOCK)
        offset_BD = column_B[:, None] * D + column_D[None, :]
        update_HB = _tile(update_LV, row_H, row_stride, column_B, is_H)
        dstate_BD = tl.load(dstate_VD + offset_BD)
        dout_BL = _tile_transposed(dout_LV, row_L, dout_stride, column_B, is_L)
        dright_BL = _tile_transposed(dright_LV, row_L, row_stride, column_B, is_L)
        end_HD = tl.dot(update_HB, dstate_BD, end_HD)
        dscore_HL = tl.dot(update_HB, dout_BL, dscore_HL)
        dlower_HL = tl.dot(update_HB, dright_BL, dlower_HL)
        if (2 * block < V // BLOCK) == is_first:
            state_BD = tl.load(state_VD + offset_BD).to(tl.float32)
            kept_D += tl.sum(state_BD * dstate_BD.to(tl.float32), axis=0)
    return end_HD, dscore_HL, dlower_HL, tl.sum(kept_D, axis=0)


@triton.jit
def _unnormalised(dnormal_HD, x_HD, inverse_H):
    """Gradient of rows from that of the rows over their norms."""
    normal_HD = x_HD.to(tl.float32) * inverse_H[:, None]
    along_H = tl.sum(dnormal_HD * normal_HD, axis=1)
    return (dnormal_HD - normal_HD * along_H[:, None]) * inverse_H[:, None]


@triton.jit
def write_dqueries(
    q_TKD,
    k_TKD,
    inverse_q_TK,
    inverse_k_TK,
    total_TN,
    dout_TNV,
    update_TNV,
    state_CNVD,
    dq_TKD,
    dtotal_TN,
    start_C,
    length_C,
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
    """Gradients of queries, and what sums of log-decays take from them."""
    chunk, start, length, first, key_head = _half_of(start_C, length_C, K)
    if first >= length:
        return
    # From here on rows count from the chunk's first.
    q_TKD += start * q_stride
    k_TKD += start * k_stride
    inverse_q_TK += start * K
    inverse_k_TK += start * K
    total_TN += start * N
    dout_TNV += start * dout_stride
    update_TNV += start * (N * V)
    dq_TKD += start * (K * D)
    dtotal_TN += start * N
    row_H = first + tl.arange(0, _HALF)
    row_L = tl.arange(0, _CHUNK)
    is_H = row_H < length
    is_L = row_L < length
    column_D = tl.arange(0, D)
    dtype = q_TKD.dtype.element_ty
    inverse_q_H = tl.load(inverse_q_TK + row_H * K + key_head, mask=is_H, other=0.0)
    inverse_k_L = tl.load(inverse_k_TK + row_L * K + key_head, mask=is_L, other=0.0)
    q_LD = q_TKD + key_head * q_head_stride
    k_LD = k_TKD + key_head * k_head_stride
    state_NVD = state_CNVD + chunk.to(tl.int64) * (N * V * D)
    is_pair = (row_H[:, None] >= row_L[None, :]) & is_H[:, None]
    dq_HD = tl.zeros([_HALF, D], tl.float32)
    for member in tl.range(0, N // K, disable_licm=True):
        head = key_head * (N // K) + member
        total_H = tl.load(total_TN + row_H * N + head, mask=is_H, other=0.0)
        total_L = tl.load(total_TN + row_L * N + head, mask=is_L, other=0.0)
        read_HD, dscore_HL = _before(
            dout_TNV + head * dout_head_stride,
            update_TNV + head * V,
            state_NVD + head * (V * D),
            row_H,
            is_H,
            row_L,
            is_L,
            dout_stride,
            N * V,
            D,
            V,
            BLOCK,
            STAGES,
        )
        dscore_HL *= _decays(total_H, total_L, is_pair) * inverse_k_L[None, :]
        keys_LD = _tile(k_LD, row_L, k_stride, column_D, is_L)
        read_HD = tl.dot(dscore_HL.to(dtype), keys_LD, read_HD * tl.exp(total_H)[:, None])
        queries_HD = _tile(q_LD, row_H, q_stride, column_D, is_H).to(tl.float32)
        by_query_H = tl.sum(queries_HD * read_HD, axis=1) * inverse_q_H * scale
        tl.store(dtotal_TN + row_H * N + head, by_query_H, mask=is_H)
        dq_HD += read_HD
    queries_HD = _tile(q_LD, row_H, q_stride, column_D, is_H)
    dq_HD = _unnormalised(dq_HD * scale, queries_HD, inverse_q_H)
    offset_HD = (row_H * K + key_head)[:, None] * D + column_D[None, :]
    tl.store(dq_TKD + offset_HD, dq_HD.to(dtype), mask=is_H[:, None])


@triton.jit
def write_dkeys(  # noqa: PLR0915
    q_TKD,
    k_TKD,
    beta_TN,
    inverse_q_TK,
    inverse_k_TK,
    total_TN,
    dout_TNV,
    update_TNV,
    dright_TNV,
    state_CNVD,
    dstate_CNVD,
    dbeta_value_TN,
    dk_TKD,
    dbeta_TN,
    dbehind_TN,
    dlast_TN,
    dkept_CPN,
    start_C,
    length_C,
    scale,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    beta_stride,
    dout_stride,
    dout_head_stride,
    K: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients of keys and strengths, and what sums of log-decays lose to keys."""
    chunk, start, length, first, key_head = _half_of(start_C, length_C, K)
    # From here on rows count from the chunk's first.
    q_TKD += start * q_stride
    k_TKD += start * k_stride
    beta_TN += start * beta_stride
    inverse_q_TK += start * K
    inverse_k_TK += start * K
    total_TN += start * N
    dout_TNV += start * dout_stride
    update_TNV += start * (N * V)
    dright_TNV += start * (N * V)
    dbeta_value_TN += start * N
    dk_TKD += start * (K * D)
    dbeta_TN += start * N
    dbehind_TN += start * N
    dlast_TN += start * N
    row_H = first + tl.arange(0, _HALF)
    row_L = tl.arange(0, _CHUNK)
    is_H = row_H < length
    is_L = row_L < length
    column_D = tl.arange(0, D)
    dtype = q_TKD.dtype.element_ty
    inverse_k_H = tl.load(inverse_k_TK + row_H * K + key_head, mask=is_H, other=0.0)
    inverse_q_L = tl.load(inverse_q_TK + row_L * K + key_head, mask=is_L, other=0.0)
    inverse_k_L = tl.load(inverse_k_TK + row_L * K + key_head, mask=is_L, other=0.0)
    q_LD = q_TKD + key_head * q_head_stride
    k_LD = k_TKD + key_head * k_head_stride
    state_NVD = state_CNVD + chunk.to(tl.int64) * (N * V * D)
    dstate_NVD = dstate_CNVD + chunk.to(tl.int64) * (N * V * D)
    dkept_N = dkept_CPN + (chunk.to(tl.int64) * 2 + first // _HALF) * N
    dk_HD = tl.zeros([_HALF, D], tl.float32)
    for member in tl.range(0, N // K, disable_licm=True):
        head = key_head * (N // K) + member
        total_H = tl.load(total_TN + row_H * N + head, mask=is_H, other=0.0)
        total_L = tl.load(total_TN + row_L * N + head, mask=is_L, other=0.0)
        end = tl.load(total_TN + (length - 1) * N + head)
        beta_H = tl.load(beta_TN + row_H * beta_stride + head, mask=is_H, other=0.0)
        beta_H = beta_H.to(tl.float32)
        beta_L = tl.load(beta_TN + row_L * beta_stride + head, mask=is_L, other=0.0)

        # This half's rows against the state before the chunk, and against the rows before them.
        right_HD, dlower_HL = _before(
            dright_TNV + head * V,
            update_TNV + head * V,
            state_NVD + head * (V * D),
            row_H,
            is_H,
            row_L,
            is_L,
            N * V,
            N * V,
            D,
            V,
            BLOCK,
            STAGES,
        )
        is_pair = (row_H[:, None] > row_L[None, :]) & is_H[:, None]
        dlower_HL *= _decays(total_H, total_L, is_pair) * inverse_k_L[None, :]
        keys_LD = _tile(k_LD, row_L, k_stride, column_D, is_L)
        right_HD = tl.dot(dlower_HL.to(dtype), keys_LD, right_HD * tl.exp(total_H)[:, None])
        keys_HD = _tile(k_LD, row_H, k_stride, column_D, is_H).to(tl.float32)
        by_right_H = -tl.sum(keys_HD * right_HD, axis=1) * inverse_k_H
        dbeta_H = tl.load(dbeta_value_TN + row_H * N + head, mask=is_H, other=0.0)
        tl.store(dbeta_TN + row_H * N + head, (dbeta_H + by_right_H).to(dtype), mask=is_H)
        dk_HD -= right_HD * beta_H[:, None]

        # Against the gradient of the state behind the chunk, and against the rows behind them.
        end_HD, dscore_HL, dlower_HL, kept = _behind(
            dout_TNV + head * dout_head_stride,
            dright_TNV + head * V,
            update_TNV + head * V,
            state_NVD + head * (V * D),
            dstate_NVD + head * (V * D),
            row_H,
            is_H,
            row_L,
            is_L,
            dout_stride,
            N * V,
            first == 0,
            D,
            V,
            BLOCK,
            STAGES,
        )
        tl.store(dkept_N + head, kept * tl.exp(end))
        is_pair = (row_H[:, None] <= row_L[None, :]) & is_L[None, :]
        decay_HL = _decays(-total_H, -total_L, is_pair)
        dlower_HL *= decay_HL * (beta_L.to(tl.float32) * inverse_k_L)[None, :]
        dlower_HL = tl.where(row_H[:, None] < row_L[None, :], -dlower_HL, 0.0).to(dtype)
        dscore_HL = (dscore_HL * decay_HL * (scale * inverse_q_L)[None, :]).to(dtype)
        end_HD *= tl.exp(end - total_H)[:, None]
        keys_HD = _tile(k_LD, row_H, k_stride, column_D, is_H).to(tl.float32)
        by_end_H = tl.sum(keys_HD * end_HD, axis=1) * inverse_k_H
        tl.store(dlast_TN + row_H * N + head, by_end_H, mask=is_H)
        end_HD = tl.dot(dscore_HL, _tile(q_LD, row_L, q_stride, column_D, is_L), end_HD)
        end_HD = tl.dot(dlower_HL, _tile(k_LD, row_L, k_stride, column_D, is_L), end_HD)
        by_behind_H = tl.sum(keys_HD * end_HD, axis=1) * inverse_k_H - beta_H * by_right_H
        tl.store(dbehind_TN + row_H * N + head, by_behind_H, mask=is_H)
        dk_HD += end_HD
    keys_HD = _tile(k_LD, row_H, k_stride, column_D, is_H)
    dk_HD = _unnormalised(dk_HD, keys_HD, inverse_k_H)
    offset_HD = (row_H * K + key_head)[:, None] * D + column_D[None, :]
    tl.store(dk_TKD + offset_HD, dk_HD.to(dtype), mask=is_H[:, None])
