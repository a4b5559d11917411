"""Triton kernels of the gated delta rule whose programs are chunks: all of a forest at once.

A chunk is at most 64 tokens of one node. What enters are rows as the model gives them, inverse
norms of queries and keys, sums of log-decays within a chunk, and states; what leaves are the rows
that the recurrence over states takes, outputs, and gradients. No program reads what another of its
launch writes, so that the same inputs give the same bits.

Products have 32 rows, never 64: with four warps Triton 3.6 then takes mma.sync, not wgmma, whose
operands in registers its assembler (ptxas 12.8, 12.9) overwrites while they are being read. A
product is transposed by computing it transposed, and no decay is above 1 before it is masked.

In shape suffixes L is 64 rows of a chunk, H 32 of them; `README.md` has the formulas.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

_HALF = tl.constexpr(32)
_CHUNK = tl.constexpr(64)
_BLOCK = tl.constexpr(16)


@triton.jit
def _tile(base, row, row_stride, column, is_row):
    """Rows of a matrix, zeros where there is none."""
    return tl.load(
        base + row[:, None] * row_stride + column[None, :], mask=is_row[:, None], other=0.0
    )


@triton.jit
def _tile_transposed(base, row, row_stride, column, is_row):
    """Rows of a matrix as columns."""
    return tl.load(
        base + row[None, :] * row_stride + column[:, None], mask=is_row[None, :], other=0.0
    )


@triton.jit
def _decays(total_A, total_B, is_later_AB):
    """exp of differences of sums of log-decays, 0 where the row is not the later."""
    difference_AB = tl.where(is_later_AB, total_A[:, None] - total_B[None, :], 0.0)
    return tl.where(is_later_AB, tl.exp(difference_AB), 0.0)


@triton.jit
def _exact_dot(a, b):
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _invert(lower_HH):
    """Inverse of 1 + a strictly lower triangle: substitution in blocks of 16, then their pair."""
    half = tl.arange(0, 2)
    row = tl.arange(0, 16)
    is_same = half[:, None, None, None] == half[None, None, :, None]
    blocks = tl.sum(tl.where(is_same, tl.reshape(lower_HH, [2, 16, 2, 16]), 0.0), axis=2)
    i = row[None, :, None]
    inverse = tl.zeros([2, 16, 16], tl.float32) + tl.where(i == row[None, None, :], 1.0, 0.0)
    for step in range(1, 16):
        factor = tl.sum(tl.where(i == step, blocks, 0.0), axis=1)
        change = tl.sum(factor[:, :, None] * inverse, axis=1)
        inverse = tl.where(i == step, inverse - change[:, None, :], inverse)
    whole_HH = tl.reshape(tl.where(is_same, inverse[:, :, None, :], 0.0), [32, 32])
    row_H = tl.arange(0, 32)
    is_below = (row_H[:, None] >= 16) & (row_H[None, :] < 16)
    below_HH = tl.where(is_below, lower_HH, 0.0)
    return whole_HH - _exact_dot(_exact_dot(whole_HH, below_HH), whole_HH)


@triton.jit
def inverse_norms(
    x_TKD,
    inverse_TK,
    num_rows,
    token_stride,
    head_stride,
    epsilon,
    K: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """1 / |row| of every head of every token."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offset = (row // K) * token_stride + (row % K) * head_stride
    is_row = row < num_rows
    x_RD = tl.load(
        x_TKD + offset[:, None] + tl.arange(0, D)[None, :], mask=is_row[:, None], other=0.0
    ).to(tl.float32)
    tl.store(inverse_TK + row, tl.rsqrt(tl.sum(x_RD * x_RD, axis=1) + epsilon), mask=is_row)


@triton.jit
def _half_of(start_C, length_C, N: tl.constexpr):
    """Half of a chunk, and head, of a program: chunk, first token, length, first row, head."""
    head = tl.program_id(0) % N
    half = tl.program_id(0) // N
    chunk = half // 2
    start = tl.load(start_C + chunk).to(tl.int64)
    return chunk, start, tl.load(length_C + chunk), half % 2 * _HALF, head


@triton.jit
def invert_triangles(
    k_TKD,
    g_TN,
    beta_TN,
    inverse_TK,
    diagonal_TNH,
    start_C,
    length_C,
    k_stride,
    k_head_stride,
    g_stride,
    beta_stride,
    K: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    """(1 + lower)^-1 of each half of a chunk; one warp, whose sums need no shared memory."""
    _chunk, start, length, first, head = _half_of(start_C, length_C, N)
    if first >= length:
        return
    start += first
    # From here on rows count from the half's first.
    k_TKD += start * k_stride
    g_TN += start * g_stride
    beta_TN += start * beta_stride
    inverse_TK += start * K
    diagonal_TNH += start * (N * _HALF)
    key_head = head // (N // K)
    row_H = tl.arange(0, _HALF)
    column_D = tl.arange(0, D)
    is_H = row_H < length - first
    k_HD = _tile(k_TKD + key_head * k_head_stride, row_H, k_stride, column_D, is_H)
    k_DH = _tile_transposed(k_TKD + key_head * k_head_stride, row_H, k_stride, column_D, is_H)
    inverse_H = tl.load(inverse_TK + row_H * K + key_head, mask=is_H, other=0.0)
    beta_H = tl.load(beta_TN + row_H * beta_stride + head, mask=is_H, other=0.0).to(tl.float32)
    total_H = tl.cumsum(tl.load(g_TN + row_H * g_stride + head, mask=is_H, other=0.0), axis=0)
    lower_HH = tl.dot(k_HD, k_DH) * _decays(total_H, total_H, row_H[:, None] > row_H[None, :])
    lower_HH = lower_HH * (beta_H * inverse_H)[:, None] * inverse_H[None, :]
    diagonal = diagonal_TNH + (row_H * N + head)[:, None] * _HALF + row_H[None, :]
    tl.store(diagonal, _invert(lower_HH), mask=is_H[:, None])


@triton.jit
def solve_chunks(  # noqa: PLR0915
    k_TKD,
    v_TNV,
    g_TN,
    beta_TN,
    inverse_TK,
    diagonal_TNH,
    total_TN,
    solved_TNL,
    seen_TND,
    update_TNV,
    start_C,
    length_C,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    g_stride,
    beta_stride,
    K: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
):
    """Sums of log-decays, the whole (1 + lower)^-1, and its products with keys and with values."""
    chunk = tl.program_id(0) // N
    head = tl.program_id(0) % N
    key_head = head // (N // K)
    start = tl.load(start_C + chunk).to(tl.int64)
    length = tl.load(length_C + chunk)
    # From here on rows count from the chunk's first.
    k_TKD += start * k_stride
    v_TNV += start * v_stride
    g_TN += start * g_stride
    beta_TN += start * beta_stride
    inverse_TK += start * K
    diagonal_TNH += start * (N * _HALF)
    total_TN += start * N
    solved_TNL += start * (N * _CHUNK)
    seen_TND += start * (N * D)
    update_TNV += start * (N * V)
    dtype = k_TKD.dtype.element_ty
    row_H = tl.arange(0, _HALF)
    column_D = tl.arange(0, D)
    column_V = tl.arange(0, V)
    is_0 = row_H < length
    is_1 = row_H + _HALF < length
    token_0 = row_H
    token_1 = row_H + _HALF
    k_TD = k_TKD + key_head * k_head_stride
    k0_HD = _tile(k_TD, token_0, k_stride, column_D, is_0)
    k1_HD = _tile(k_TD, token_1, k_stride, column_D, is_1)
    k0_DH = _tile_transposed(k_TD, token_0, k_stride, column_D, is_0)
    inverse_0 = tl.load(inverse_TK + token_0 * K + key_head, mask=is_0, other=0.0)
    inverse_1 = tl.load(inverse_TK + token_1 * K + key_head, mask=is_1, other=0.0)
    beta_0 = tl.load(beta_TN + token_0 * beta_stride + head, mask=is_0, other=0.0).to(tl.float32)
    beta_1 = tl.load(beta_TN + token_1 * beta_stride + head, mask=is_1, other=0.0).to(tl.float32)
    g_0 = tl.load(g_TN + token_0 * g_stride + head, mask=is_0, other=0.0)
    g_1 = tl.load(g_TN + token_1 * g_stride + head, mask=is_1, other=0.0)
    total_0 = tl.cumsum(g_0, axis=0)
    total_1 = tl.cumsum(g_1, axis=0) + tl.sum(g_0, axis=0)
    tl.store(total_TN + token_0 * N + head, total_0, mask=is_0)
    tl.store(total_TN + token_1 * N + head, total_1, mask=is_1)

    x00_HH = _tile(diagonal_TNH + head * _HALF, token_0, N * _HALF, row_H, is_0)
    x11_HH = _tile(diagonal_TNH + head * _HALF, token_1, N * _HALF, row_H, is_1)
    is_any = (row_H[:, None] >= 0) & (row_H[None, :] >= 0)
    lower_HH = tl.dot(k1_HD, k0_DH) * _decays(total_1, total_0, is_any)
    lower_HH = lower_HH * (beta_1 * inverse_1)[:, None] * inverse_0[None, :]
    x10_HH = -_exact_dot(_exact_dot(x11_HH, lower_HH), x00_HH)

    solved_0 = solved_TNL + (token_0 * N + head)[:, None] * _CHUNK + row_H[None, :]
    solved_1 = solved_TNL + (token_1 * N + head)[:, None] * _CHUNK + row_H[None, :]
    tl.store(solved_0, x00_HH.to(dtype), mask=is_0[:, None])
    tl.store(solved_0 + _HALF, tl.zeros([_HALF, _HALF], dtype), mask=is_0[:, None])
    tl.store(solved_1, x10_HH.to(dtype), mask=is_1[:, None])
    tl.store(solved_1 + _HALF, x11_HH.to(dtype), mask=is_1[:, None])

    factor_0 = (beta_0 * inverse_0 * tl.exp(total_0))[None, :]
    factor_1 = (beta_1 * inverse_1 * tl.exp(total_1))[None, :]
    seen_HD = tl.dot((x00_HH * factor_0).to(dtype), k0_HD)
    seen_0 = seen_TND + (token_0 * N + head)[:, None] * D + column_D[None, :]
    tl.store(seen_0, seen_HD.to(dtype), mask=is_0[:, None])
    seen_HD = tl.dot((x10_HH * factor_0).to(dtype), k0_HD)
    seen_HD = tl.dot((x11_HH * factor_1).to(dtype), k1_HD, seen_HD)
    seen_1 = seen_TND + (token_1 * N + head)[:, None] * D + column_D[None, :]
    tl.store(seen_1, seen_HD.to(dtype), mask=is_1[:, None])

    v_TV = v_TNV + head * v_head_stride
    v0_HV = _tile(v_TV, token_0, v_stride, column_V, is_0)
    v1_HV = _tile(v_TV, token_1, v_stride, column_V, is_1)
    update_HV = tl.dot((x00_HH * beta_0[None, :]).to(dtype), v0_HV)
    update_0 = update_TNV + (token_0 * N + head)[:, None] * V + column_V[None, :]
    tl.store(update_0, update_HV.to(dtype), mask=is_0[:, None])
    update_HV = tl.dot((x10_HH * beta_0[None, :]).to(dtype), v0_HV)
    update_HV = tl.dot((x11_HH * beta_1[None, :]).to(dtype), v1_HV, update_HV)
    update_1 = update_TNV + (token_1 * N + head)[:, None] * V + column_V[None, :]
    tl.store(update_1, update_HV.to(dtype), mask=is_1[:, None])


@triton.jit
def write_outputs(
    q_TKD,
    k_TKD,
    inverse_q_TK,
    inverse_k_TK,
    total_TN,
    update_TNV,
    state_CNVD,
    out_TNV,
    start_C,
    length_C,
    scale,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    K: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Outputs of half a chunk, from the state before the chunk and from its updates."""
    chunk, start, length, first, head = _half_of(start_C, length_C, N)
    if first >= length:
        return
    # From here on rows count from the chunk's first.
    q_TKD += start * q_stride
    k_TKD += start * k_stride
    inverse_q_TK += start * K
    inverse_k_TK += start * K
    total_TN += start * N
    update_TNV += start * (N * V)
    out_TNV += start * (N * V)
    key_head = head // (N // K)
    row_H = first + tl.arange(0, _HALF)
    row_L = tl.arange(0, _CHUNK)
    is_H = row_H < length
    is_L = row_L < length
    column_V = tl.arange(0, V)
    total_H = tl.load(total_TN + row_H * N + head, mask=is_H, other=0.0)
    total_L = tl.load(total_TN + row_L * N + head, mask=is_L, other=0.0)
    factor_H = scale * tl.load(inverse_q_TK + row_H * K + key_head, mask=is_H, other=0.0)
    factor_L = tl.load(inverse_k_TK + row_L * K + key_head, mask=is_L, other=0.0)
    q_LD = q_TKD + key_head * q_head_stride
    k_LD = k_TKD + key_head * k_head_stride
    state_VD = state_CNVD + (chunk.to(tl.int64) * N + head) * V * D
    score_HL = tl.zeros([_HALF, _CHUNK], tl.float32)
    out_HV = tl.zeros([_HALF, V], tl.float32)
    for block in tl.range(0, D // BLOCK, num_stages=STAGES):
        column_B = block * BLOCK + tl.arange(0, BLOCK)
        q_HB = _tile(q_LD, row_H, q_stride, column_B, is_H)
        k_BL = _tile_transposed(k_LD, row_L, k_stride, column_B, is_L)
        state_BV = tl.load(state_VD + column_V[None, :] * D + column_B[:, None])
        score_HL = tl.dot(q_HB, k_BL, score_HL)
        out_HV = tl.dot(q_HB, state_BV, out_HV)
    is_seen = (row_H[:, None] >= row_L[None, :]) & is_H[:, None]
    score_HL *= factor_H[:, None] * factor_L[None, :] * _decays(total_H, total_L, is_seen)
    out_HV *= (factor_H * tl.exp(total_H))[:, None]
    update_LV = _tile(update_TNV + head * V, row_L, N * V, column_V, is_L)
    out_HV = tl.dot(score_HL.to(update_LV.dtype), update_LV, out_HV)
    out = out_TNV + (row_H * N + head)[:, None] * V + column_V[None, :]
    tl.store(out, out_HV.to(out_TNV.dtype.element_ty), mask=is_H[:, None])


@triton.jit
def begin_dupdates(
    q_TKD,
    k_TKD,
    inverse_q_TK,
    inverse_k_TK,
    total_TN,
    dout_TNV,
    dupdate_TNV,
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
):
    """What the gradient of the updates takes from outputs of its own chunk."""
    _chunk, start, length, first, head = _half_of(start_C, length_C, N)
    if first >= length:
        return
    # From here on rows count from the chunk's first.
    q_TKD += start * q_stride
    k_TKD += start * k_stride
    inverse_q_TK += start * K
    inverse_k_TK += start * K
    total_TN += start * N
    dout_TNV += start * dout_stride
    dupdate_TNV += start * (N * V)
    key_head = head // (N // K)
    row_H = first + tl.arange(0, _HALF)
    row_L = tl.arange(0, _CHUNK)
    is_H = row_H < length
    is_L = row_L < length
    column_D = tl.arange(0, D)
    column_V = tl.arange(0, V)
    total_H = tl.load(total_TN + row_H * N + head, mask=is_H, other=0.0)
    total_L = tl.load(total_TN + row_L * N + head, mask=is_L, other=0.0)
    factor_H = tl.load(inverse_k_TK + row_H * K + key_head, mask=is_H, other=0.0)
    factor_L = scale * tl.load(inverse_q_TK + row_L * K + key_head, mask=is_L, other=0.0)
    k_HD = _tile(k_TKD + key_head * k_head_stride, row_H, k_stride, column_D, is_H)
    q_DL = _tile_transposed(q_TKD + key_head * q_head_stride, row_L, q_stride, column_D, is_L)
    is_seen = (row_H[:, None] <= row_L[None, :]) & is_L[None, :]
    score_HL = tl.dot(k_HD, q_DL) * factor_H[:, None] * factor_L[None, :]
    score_HL = score_HL * _decays(-total_H, -total_L, is_seen)
    dout_LV = _tile(dout_TNV + head * dout_head_stride, row_L, dout_stride, column_V, is_L)
    dupdate_HV = tl.dot(score_HL.to(dout_LV.dtype), dout_LV)
    dupdate = dupdate_TNV + (row_H * N + head)[:, None] * V + column_V[None, :]
    tl.store(dupdate, dupdate_HV.to(dupdate_TNV.dtype.element_ty), mask=is_H[:, None])


@triton.jit
def solve_dupdates(
    v_TNV,
    beta_TN,
    inverse_q_TK,
    inverse_k_TK,
    total_TN,
    dout_TNV,
    update_TNV,
    solved_TNL,
    dupdate_TNV,
    dright_TNV,
    dv_TNV,
    dbeta_TN,
    dscore_TNL,
    dlower_TNL,
    start_C,
    length_C,
    scale,
    v_stride,
    v_head_stride,
    beta_stride,
    dout_stride,
    dout_head_stride,
    K: tl.constexpr,
    N: tl.constexpr,
    V: tl.constexpr,
):
    """Gradients of the right sides, of values, and of what strengths take from values.

    And of products of rows, as they enter gradients of queries and keys that have norms.
    """
    _chunk, start, length, first, head = _half_of(start_C, length_C, N)
    if first >= length:
        return
    # From here on rows count from the chunk's first.
    v_TNV += start * v_stride
    beta_TN += start * beta_stride
    inverse_q_TK += start * K
    inverse_k_TK += start * K
    total_TN += start * N
    dout_TNV += start * dout_stride
    update_TNV += start * (N * V)
    solved_TNL += start * (N * _CHUNK)
    dupdate_TNV += start * (N * V)
    dright_TNV += start * (N * V)
    dv_TNV += start * (N * V)
    dbeta_TN += start * N
    dscore_TNL += start * (N * _CHUNK)
    dlower_TNL += start * (N * _CHUNK)
    key_head = head // (N // K)
    row_H = first + tl.arange(0, _HALF)
    row_L = tl.arange(0, _CHUNK)
    is_H = row_H < length
    is_L = row_L < length
    column_V = tl.arange(0, V)
    solved_HL = _tile_transposed(solved_TNL + head * _CHUNK, row_L, N * _CHUNK, row_H, is_L)
    dupdate_LV = _tile(dupdate_TNV + head * V, row_L, N * V, column_V, is_L)
    dright_HV = tl.dot(solved_HL, dupdate_LV)
    beta_H = tl.load(beta_TN + row_H * beta_stride + head, mask=is_H, other=0.0).to(tl.float32)
    offset = (row_H * N + head)[:, None] * V + column_V[None, :]
    dtype = dv_TNV.dtype.element_ty
    narrow_HV = dright_HV.to(dtype)
    tl.store(dright_TNV + offset, narrow_HV, mask=is_H[:, None])
    tl.store(dv_TNV + offset, (dright_HV * beta_H[:, None]).to(dtype), mask=is_H[:, None])
    v_HV = _tile(v_TNV + head * v_head_stride, row_H, v_stride, column_V, is_H)
    dbeta_H = tl.sum(dright_HV * v_HV.to(tl.float32), axis=1)
    tl.store(dbeta_TN + row_H * N + head, dbeta_H, mask=is_H)

    update_VL = _tile_transposed(update_TNV + head * V, row_L, N * V, column_V, is_L)
    total_H = tl.load(total_TN + row_H * N + head, mask=is_H, other=0.0)
    total_L = tl.load(total_TN + row_L * N + head, mask=is_L, other=0.0)
    inverse_q_H = tl.load(inverse_q_TK + row_H * K + key_head, mask=is_H, other=0.0)
    inverse_k_H = tl.load(inverse_k_TK + row_H * K + key_head, mask=is_H, other=0.0)
    inverse_k_L = tl.load(inverse_k_TK + row_L * K + key_head, mask=is_L, other=0.0)
    is_pair = (row_H[:, None] >= row_L[None, :]) & is_H[:, None]
    decay_HL = _decays(total_H, total_L, is_pair) * inverse_k_L[None, :]
    offset = (row_H * N + head)[:, None] * _CHUNK + row_L[None, :]
    dout_HV = _tile(dout_TNV + head * dout_head_stride, row_H, dout_stride, column_V, is_H)
    dscore_HL = tl.dot(dout_HV, update_VL) * decay_HL * (inverse_q_H * scale)[:, None]
    tl.store(dscore_TNL + offset, dscore_HL.to(dtype), mask=is_H[:, None])
    dlower_HL = tl.dot(narrow_HV, update_VL) * decay_HL * inverse_k_H[:, None]
    dlower_HL = tl.where(row_H[:, None] > row_L[None, :], dlower_HL, 0.0)
    tl.store(dlower_TNL + offset, dlower_HL.to(dtype), mask=is_H[:, None])


@triton.jit
def sum_decays(
    dtotal_TN,
    dbehind_TN,
    dlast_TN,
    dkept_CPN,
    dg_TN,
    start_C,
    length_C,
    N: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Gradients of log-decays from those of their sums, one chunk and all heads a program."""
    chunk = tl.program_id(0).to(tl.int64)
    start = tl.load(start_C + chunk).to(tl.int64)
    length = tl.load(length_C + chunk)
    # From here on rows count from the chunk's first.
    dtotal_TN += start * N
    dbehind_TN += start * N
    dlast_TN += start * N
    dg_TN += start * N
    row_L = tl.arange(0, _CHUNK)
    head = tl.arange(0, HEADS)
    is_head = head < N
    mask = (row_L < length)[:, None] & is_head[None, :]
    offset = row_L[:, None] * N + head[None, :]
    dtotal_LN = tl.load(dtotal_TN + offset, mask=mask, other=0.0)
    dtotal_LN -= tl.load(dbehind_TN + offset, mask=mask, other=0.0)
    last_N = tl.sum(tl.load(dlast_TN + offset, mask=mask, other=0.0), axis=0)
    for part in tl.static_range(PARTS):
        kept = dkept_CPN + (chunk * PARTS + part) * N + head
        last_N += tl.load(kept, mask=is_head, other=0.0)
    dg_LN = tl.cumsum(dtotal_LN, axis=0, reverse=True) + last_N[None, :]
    tl.store(dg_TN + offset, dg_LN, mask=mask)
