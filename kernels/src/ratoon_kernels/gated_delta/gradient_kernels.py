"""The Triton kernel of the gated delta rule's gradients of queries, keys, decays and strengths.

A program is half of a chunk and one head of keys; it adds over the heads of values that read it,
in order, and writes each gradient once. As in `chunk_kernels.py`, products have 32 rows.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from ratoon_kernels.gated_delta.chunk_kernels import _decays, _tile, _tile_transposed

_HALF = tl.constexpr(32)
_CHUNK = tl.constexpr(64)


@triton.jit
def _products_with_states(
    dout_TV,
    dright_TV,
    update_TV,
    state_VD,
    dstate_VD,
    token_H,
    is_H,
    dout_stride,
    row_stride,
    first_is_0,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows of three gradients times states, and this half's share of state times gradient."""
    column_D = tl.arange(0, D)
    read_HD = tl.zeros([_HALF, D], tl.float32)
    right_HD = tl.zeros([_HALF, D], tl.float32)
    end_HD = tl.zeros([_HALF, D], tl.float32)
    kept_D = tl.zeros([D], tl.float32)
    for block in range(V // BLOCK):
        column_B = block * BLOCK + tl.arange(0, BLOCK)
        offset_BD = column_B[:, None] * D + column_D[None, :]
        state_BD = tl.load(state_VD + offset_BD)
        dstate_BD = tl.load(dstate_VD + offset_BD)
        read_HD = tl.dot(_tile(dout_TV, token_H, dout_stride, column_B, is_H), state_BD, read_HD)
        right_HD = tl.dot(_tile(dright_TV, token_H, row_stride, column_B, is_H), state_BD, right_HD)
        end_HD = tl.dot(_tile(update_TV, token_H, row_stride, column_B, is_H), dstate_BD, end_HD)
        if (2 * block < V // BLOCK) == first_is_0:
            kept_D += tl.sum(state_BD.to(tl.float32) * dstate_BD.to(tl.float32), axis=0)
    return read_HD, right_HD, end_HD, tl.sum(kept_D, axis=0)


@triton.jit
def _unnormalised(dnormal_HD, x_HD, inverse_H):
    """Gradient of rows from that of the rows over their norms."""
    normal_HD = x_HD.to(tl.float32) * inverse_H[:, None]
    along_H = tl.sum(dnormal_HD * normal_HD, axis=1)
    return (dnormal_HD - normal_HD * along_H[:, None]) * inverse_H[:, None]


@triton.jit
def write_gradients(
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
    dq_TKD,
    dk_TKD,
    dbeta_TN,
    dtotal_TN,
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
):
    key_head = tl.program_id(0) % K
    chunk = tl.program_id(0) // K // 2
    first = tl.program_id(0) // K % 2 * _HALF
    start = tl.load(start_C + chunk).to(tl.int64)
    length = tl.load(length_C + chunk)
    row_H = first + tl.arange(0, _HALF)
    row_L = tl.arange(0, _CHUNK)
    is_H = row_H < length
    is_L = row_L < length
    token_H = start + row_H
    token_L = start + row_L
    column_D = tl.arange(0, D)
    column_V = tl.arange(0, V)
    dtype = q_TKD.dtype.element_ty
    inverse_q_H = tl.load(inverse_q_TK + token_H * K + key_head, mask=is_H, other=0.0)
    inverse_k_H = tl.load(inverse_k_TK + token_H * K + key_head, mask=is_H, other=0.0)
    inverse_q_L = tl.load(inverse_q_TK + token_L * K + key_head, mask=is_L, other=0.0)
    inverse_k_L = tl.load(inverse_k_TK + token_L * K + key_head, mask=is_L, other=0.0)
    q_TD = q_TKD + key_head * q_head_stride
    k_TD = k_TKD + key_head * k_head_stride
    is_earlier = (row_H[:, None] >= row_L[None, :]) & is_H[:, None]
    is_later = (row_H[:, None] <= row_L[None, :]) & is_L[None, :]
    dq_HD = tl.zeros([_HALF, D], tl.float32)
    dk_HD = tl.zeros([_HALF, D], tl.float32)
    for member in range(N // K):
        head = key_head * (N // K) + member
        total_H = tl.load(total_TN + token_H * N + head, mask=is_H, other=0.0)
        total_L = tl.load(total_TN + token_L * N + head, mask=is_L, other=0.0)
        end = tl.load(total_TN + (start + length - 1) * N + head)
        beta_H = tl.load(beta_TN + token_H * beta_stride + head, mask=is_H, other=0.0)
        beta_L = tl.load(beta_TN + token_L * beta_stride + head, mask=is_L, other=0.0)
        beta_H = beta_H.to(tl.float32)
        beta_L = beta_L.to(tl.float32)
        dout_TV = dout_TNV + head * dout_head_stride
        dright_TV = dright_TNV + head * V
        update_TV = update_TNV + head * V
        states = (chunk.to(tl.int64) * N + head) * V * D
        read_HD, right_HD, end_HD, kept = _products_with_states(
            dout_TV,
            dright_TV,
            update_TV,
            state_CNVD + states,
            dstate_CNVD + states,
            token_H,
            is_H,
            dout_stride,
            N * V,
            first == 0,
            D,
            V,
            BLOCK,
        )
        part = (chunk.to(tl.int64) * 2 + first // _HALF) * N + head
        tl.store(dkept_CPN + part, kept * tl.exp(end))

        # Pairs of this half's rows with those before them.
        decay_HL = _decays(total_H, total_L, is_earlier)
        update_VL = _tile_transposed(update_TV, token_L, N * V, column_V, is_L)
        dout_HV = _tile(dout_TV, token_H, dout_stride, column_V, is_H)
        dright_HV = _tile(dright_TV, token_H, N * V, column_V, is_H)
        dscore_HL = tl.dot(dout_HV, update_VL) * decay_HL * inverse_k_L[None, :]
        dlower_HL = tl.dot(dright_HV, update_VL) * decay_HL * inverse_k_L[None, :]
        dlower_HL = tl.where(row_H[:, None] > row_L[None, :], -dlower_HL, 0.0)
        k_LD = _tile(k_TD, token_L, k_stride, column_D, is_L)
        dq_part_HD = read_HD * tl.exp(total_H)[:, None]
        dq_part_HD = tl.dot(dscore_HL.to(dtype), k_LD, dq_part_HD)
        mixed_HD = -right_HD * tl.exp(total_H)[:, None]
        mixed_HD = tl.dot(dlower_HL.to(dtype), k_LD, mixed_HD)

        # Pairs with those behind them.
        decay_HL = _decays(-total_H, -total_L, is_later)
        dout_VL = _tile_transposed(dout_TV, token_L, dout_stride, column_V, is_L)
        dright_VL = _tile_transposed(dright_TV, token_L, N * V, column_V, is_L)
        update_HV = _tile(update_TV, token_H, N * V, column_V, is_H)
        dscore_HL = tl.dot(update_HV, dout_VL) * decay_HL * (scale * inverse_q_L)[None, :]
        dlower_HL = tl.dot(update_HV, dright_VL) * decay_HL * (beta_L * inverse_k_L)[None, :]
        dlower_HL = tl.where(row_H[:, None] < row_L[None, :], -dlower_HL, 0.0)
        at_end_HD = end_HD * tl.exp(end - total_H)[:, None]
        q_LD = _tile(q_TD, token_L, q_stride, column_D, is_L)
        behind_HD = tl.dot(dscore_HL.to(dtype), q_LD)
        behind_HD = tl.dot(dlower_HL.to(dtype), k_LD, behind_HD)

        q_HD = _tile(q_TD, token_H, q_stride, column_D, is_H).to(tl.float32)
        k_HD = _tile(k_TD, token_H, k_stride, column_D, is_H).to(tl.float32)
        by_query_H = tl.sum(q_HD * dq_part_HD, axis=1) * inverse_q_H * scale
        by_mixed_H = tl.sum(k_HD * mixed_HD, axis=1) * inverse_k_H
        by_end_H = tl.sum(k_HD * at_end_HD, axis=1) * inverse_k_H
        by_behind_H = tl.sum(k_HD * behind_HD, axis=1) * inverse_k_H
        dtotal_H = by_query_H + beta_H * by_mixed_H - by_end_H - by_behind_H
        tl.store(dtotal_TN + token_H * N + head, dtotal_H, mask=is_H)
        tl.store(dlast_TN + token_H * N + head, by_end_H, mask=is_H)
        dbeta_H = by_mixed_H + tl.load(dbeta_value_TN + token_H * N + head, mask=is_H, other=0.0)
        tl.store(dbeta_TN + token_H * N + head, dbeta_H.to(dtype), mask=is_H)
        dq_HD += dq_part_HD
        dk_HD += mixed_HD * beta_H[:, None] + at_end_HD + behind_HD

    dq_HD = _unnormalised(
        dq_HD * scale, _tile(q_TD, token_H, q_stride, column_D, is_H), inverse_q_H
    )
    dk_HD = _unnormalised(dk_HD, _tile(k_TD, token_H, k_stride, column_D, is_H), inverse_k_H)
    offset = (token_H * K + key_head)[:, None] * D + column_D[None, :]
    tl.store(dq_TKD + offset, dq_HD.to(dtype), mask=is_H[:, None])
    tl.store(dk_TKD + offset, dk_HD.to(dtype), mask=is_H[:, None])
