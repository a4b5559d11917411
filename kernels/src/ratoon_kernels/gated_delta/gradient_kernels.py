"""Triton kernels of the gated delta rule's gradients of queries, keys, decays and strengths.

A program is half of a chunk and one head of keys; it adds over the heads of values that read it,
in order, and writes each gradient once. Queries and keys have a kernel each: the sums of both at
once would leave room for one program a multiprocessor. As in `chunk_kernels.py`, products have 32
rows.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from ratoon_kernels.gated_delta.chunk_kernels import _half_of, _tile, _tile_transposed

_HALF = tl.constexpr(32)
_CHUNK = tl.constexpr(64)
# Rows of a state summed at once.
_SUMMED = tl.constexpr(16)


@triton.jit
def _through_norm(dx_HD, x_HD, inverse_H):
    """Gradient of rows from what it would be were their norms constants."""
    x_HD = x_HD.to(tl.float32)
    along_H = tl.sum(dx_HD * x_HD, axis=1) * inverse_H * inverse_H
    return dx_HD - x_HD * along_H[:, None]


@triton.jit
def write_dqueries(
    q_TKD,
    k_TKD,
    inverse_q_TK,
    total_TN,
    dout_TNV,
    state_CNVD,
    dscore_TNL,
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
    total_TN += start * N
    dout_TNV += start * dout_stride
    dscore_TNL += start * (N * _CHUNK)
    dq_TKD += start * (K * D)
    dtotal_TN += start * N
    row_H = first + tl.arange(0, _HALF)
    is_H = row_H < length
    column_D = tl.arange(0, D)
    inverse_H = tl.load(inverse_q_TK + row_H * K + key_head, mask=is_H, other=0.0)
    q_LD = q_TKD + key_head * q_head_stride
    k_LD = k_TKD + key_head * k_head_stride
    state_NVD = state_CNVD + chunk.to(tl.int64) * (N * V * D)
    dq_HD = tl.zeros([_HALF, D], tl.float32)
    for member in tl.range(0, N // K, disable_licm=True):
        head = key_head * (N // K) + member
        dout_LV = dout_TNV + head * dout_head_stride
        state_VD = state_NVD + head * (V * D)
        read_HD = tl.zeros([_HALF, D], tl.float32)
        for block in tl.range(0, V // BLOCK, num_stages=STAGES):
            column_B = block * BLOCK + tl.arange(0, BLOCK)
            dout_HB = _tile(dout_LV, row_H, dout_stride, column_B, is_H)
            state_BD = tl.load(state_VD + column_B[:, None] * D + column_D[None, :])
            read_HD = tl.dot(dout_HB, state_BD, read_HD)
        total_H = tl.load(total_TN + row_H * N + head, mask=is_H, other=0.0)
        read_HD *= (tl.exp(total_H) * inverse_H * scale)[:, None]
        for half in tl.range(0, 2, num_stages=STAGES):
            row_O = half * _HALF + tl.arange(0, _HALF)
            dscore_HO = _tile(dscore_TNL + head * _CHUNK, row_H, N * _CHUNK, row_O, is_H)
            keys_OD = _tile(k_LD, row_O, k_stride, column_D, row_O < length)
            read_HD = tl.dot(dscore_HO, keys_OD, read_HD)
        queries_HD = _tile(q_LD, row_H, q_stride, column_D, is_H).to(tl.float32)
        by_query_H = tl.sum(queries_HD * read_HD, axis=1)
        tl.store(dtotal_TN + row_H * N + head, by_query_H, mask=is_H)
        dq_HD += read_HD
    dq_HD = _through_norm(dq_HD, _tile(q_LD, row_H, q_stride, column_D, is_H), inverse_H)
    dq = dq_TKD + (row_H * K + key_head)[:, None] * D + column_D[None, :]
    tl.store(dq, dq_HD.to(dq_TKD.dtype.element_ty), mask=is_H[:, None])


@triton.jit
def write_dkeys(  # noqa: PLR0915
    q_TKD,
    k_TKD,
    beta_TN,
    inverse_k_TK,
    total_TN,
    update_TNV,
    dright_TNV,
    state_CNVD,
    dstate_CNVD,
    dscore_TNL,
    dlower_TNL,
    dbeta_value_TN,
    dk_TKD,
    dbeta_TN,
    dbehind_TN,
    dlast_TN,
    dkept_CPN,
    start_C,
    length_C,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    beta_stride,
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
    inverse_k_TK += start * K
    total_TN += start * N
    update_TNV += start * (N * V)
    dright_TNV += start * (N * V)
    dscore_TNL += start * (N * _CHUNK)
    dlower_TNL += start * (N * _CHUNK)
    dbeta_value_TN += start * N
    dk_TKD += start * (K * D)
    dbeta_TN += start * N
    dbehind_TN += start * N
    dlast_TN += start * N
    row_H = first + tl.arange(0, _HALF)
    is_H = row_H < length
    column_D = tl.arange(0, D)
    dtype = q_TKD.dtype.element_ty
    inverse_H = tl.load(inverse_k_TK + row_H * K + key_head, mask=is_H, other=0.0)
    q_LD = q_TKD + key_head * q_head_stride
    k_LD = k_TKD + key_head * k_head_stride
    state_NVD = state_CNVD + chunk.to(tl.int64) * (N * V * D)
    dstate_NVD = dstate_CNVD + chunk.to(tl.int64) * (N * V * D)
    dkept_N = dkept_CPN + (chunk.to(tl.int64) * 2 + first // _HALF) * N
    dk_HD = tl.zeros([_HALF, D], tl.float32)
    for member in tl.range(0, N // K, disable_licm=True):
        head = key_head * (N // K) + member
        state_VD = state_NVD + head * (V * D)
        dstate_VD = dstate_NVD + head * (V * D)
        total_H = tl.load(total_TN + row_H * N + head, mask=is_H, other=0.0)
        end = tl.load(total_TN + (length - 1) * N + head)
        beta_H = tl.load(beta_TN + row_H * beta_stride + head, mask=is_H, other=0.0)
        beta_H = beta_H.to(tl.float32)
        dlower_LL = dlower_TNL + head * _CHUNK

        # Against the state before the chunk, and the rows before.
        right_HD = tl.zeros([_HALF, D], tl.float32)
        for block in tl.range(0, V // BLOCK, num_stages=STAGES):
            column_B = block * BLOCK + tl.arange(0, BLOCK)
            dright_HB = _tile(dright_TNV + head * V, row_H, N * V, column_B, is_H)
            state_BD = tl.load(state_VD + column_B[:, None] * D + column_D[None, :])
            right_HD = tl.dot(dright_HB, state_BD, right_HD)
        right_HD *= (tl.exp(total_H) * inverse_H)[:, None]
        for half in tl.range(0, 2, num_stages=STAGES):
            row_O = half * _HALF + tl.arange(0, _HALF)
            dlower_HO = _tile(dlower_LL, row_H, N * _CHUNK, row_O, is_H)
            keys_OD = _tile(k_LD, row_O, k_stride, column_D, row_O < length)
            right_HD = tl.dot(dlower_HO, keys_OD, right_HD)
        keys_HD = _tile(k_LD, row_H, k_stride, column_D, is_H).to(tl.float32)
        by_right_H = -tl.sum(keys_HD * right_HD, axis=1)
        dbeta_H = tl.load(dbeta_value_TN + row_H * N + head, mask=is_H, other=0.0)
        tl.store(dbeta_TN + row_H * N + head, (dbeta_H + by_right_H).to(dtype), mask=is_H)
        dk_HD -= right_HD * beta_H[:, None]

        # Against the gradient of the state behind the chunk, and the rows behind.
        end_HD = tl.zeros([_HALF, D], tl.float32)
        for block in tl.range(0, V // BLOCK, num_stages=STAGES):
            column_B = block * BLOCK + tl.arange(0, BLOCK)
            update_HB = _tile(update_TNV + head * V, row_H, N * V, column_B, is_H)
            dstate_BD = tl.load(dstate_VD + column_B[:, None] * D + column_D[None, :])
            end_HD = tl.dot(update_HB, dstate_BD, end_HD)
        end_HD *= (tl.exp(end - total_H) * inverse_H)[:, None]
        keys_HD = _tile(k_LD, row_H, k_stride, column_D, is_H).to(tl.float32)
        tl.store(dlast_TN + row_H * N + head, tl.sum(keys_HD * end_HD, axis=1), mask=is_H)
        for half in tl.range(0, 2, num_stages=STAGES):
            row_O = half * _HALF + tl.arange(0, _HALF)
            is_O = row_O < length
            beta_O = tl.load(beta_TN + row_O * beta_stride + head, mask=is_O, other=0.0)
            dlower_HO = _tile_transposed(dlower_LL, row_O, N * _CHUNK, row_H, is_O)
            dlower_HO = -dlower_HO.to(tl.float32) * beta_O.to(tl.float32)[None, :]
            dscore_HO = _tile_transposed(dscore_TNL + head * _CHUNK, row_O, N * _CHUNK, row_H, is_O)
            keys_OD = _tile(k_LD, row_O, k_stride, column_D, is_O)
            queries_OD = _tile(q_LD, row_O, q_stride, column_D, is_O)
            end_HD = tl.dot(dlower_HO.to(dtype), keys_OD, end_HD)
            end_HD = tl.dot(dscore_HO, queries_OD, end_HD)
        # Keys are read again, so that no registers keep them through products.
        keys_HD = _tile(k_LD, row_H, k_stride, column_D, is_H).to(tl.float32)
        by_behind_H = tl.sum(keys_HD * end_HD, axis=1) - beta_H * by_right_H
        tl.store(dbehind_TN + row_H * N + head, by_behind_H, mask=is_H)
        dk_HD += end_HD

        # Each half of the chunk sums half of the state times its gradient.
        kept_BD = tl.zeros([_SUMMED, D], tl.float32)
        for block in tl.range(0, V // 2 // _SUMMED, num_stages=STAGES):
            column_B = first // _HALF * (V // 2) + block * _SUMMED + tl.arange(0, _SUMMED)
            offset_BD = column_B[:, None] * D + column_D[None, :]
            state_BD = tl.load(state_VD + offset_BD).to(tl.float32)
            kept_BD += state_BD * tl.load(dstate_VD + offset_BD).to(tl.float32)
        kept = tl.sum(tl.sum(kept_BD, axis=0), axis=0)
        tl.store(dkept_N + head, kept * tl.exp(end))
    dk_HD = _through_norm(dk_HD, _tile(k_LD, row_H, k_stride, column_D, is_H), inverse_H)
    dk = dk_TKD + (row_H * K + key_head)[:, None] * D + column_D[None, :]
    tl.store(dk, dk_HD.to(dtype), mask=is_H[:, None])
