"""Triton kernels of the causal convolution with SiLU over a packed forest, and of its gradients.

Which row a tap reads is a table, so that a node's first tokens are as any others. Sums are fp32 in
one order, and none is atomic. `before_TR` holds, for each token and each of 1 to R = W - 1 tokens
before it on its path, a row of x; of the given rows as -2 - row; or -1 where there is none.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def _row_before(x_TC, first_SRC, before, channel, is_channel, x_stride, C: tl.constexpr):
    """Rows of x or of the given ones, fp32; zeros where there is none."""
    mask = (before >= 0)[:, None] & is_channel[None, :]
    offset = before.to(tl.int64)[:, None] * x_stride + channel[None, :]
    row = tl.load(x_TC + offset, mask=mask, other=0.0).to(tl.float32)
    if first_SRC is not None:
        given = -2 - before
        mask = (given >= 0)[:, None] & is_channel[None, :]
        offset = given.to(tl.int64)[:, None] * C + channel[None, :]
        row += tl.load(first_SRC + offset, mask=mask, other=0.0).to(tl.float32)
    return row


@triton.jit
def convolve(
    x_TC,
    weight_CW,
    first_SRC,
    before_TR,
    out_TC,
    num_tokens,
    x_stride,
    C: tl.constexpr,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """SiLU of the sums over taps."""
    blocks = tl.cdiv(C, CHANNELS)
    token = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    is_token = token < num_tokens
    is_channel = channel < C
    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    for tap in tl.static_range(W):
        if tap == W - 1:
            before = tl.where(is_token, token, -1)
        else:
            place = before_TR + token * (W - 1) + (W - 2 - tap)
            before = tl.load(place, mask=is_token, other=-1)
        row = _row_before(x_TC, first_SRC, before, channel, is_channel, x_stride, C)
        weight = tl.load(weight_CW + channel * W + tap, mask=is_channel, other=0.0)
        total += row * weight.to(tl.float32)[None, :]
    out = total * tl.sigmoid(total)
    offset = token.to(tl.int64)[:, None] * C + channel[None, :]
    mask = is_token[:, None] & is_channel[None, :]
    tl.store(out_TC + offset, out.to(out_TC.dtype.element_ty), mask=mask)


@triton.jit
def begin_gradients(
    dout_TC,
    x_TC,
    weight_CW,
    first_SRC,
    before_TR,
    dsum_TC,
    dweight_PWC,
    num_tokens,
    dout_stride,
    x_stride,
    C: tl.constexpr,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Gradients of the sums, and what a part of the tokens adds to those of the taps."""
    blocks = tl.cdiv(C, CHANNELS)
    part = tl.program_id(0) // blocks
    channel = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < C
    tap_W = tl.arange(0, W)
    dweight_WC = tl.zeros([W, CHANNELS], tl.float32)
    for step in range(STEPS):
        token = (part * STEPS + step) * ROWS + tl.arange(0, ROWS)
        is_token = token < num_tokens
        mask = is_token[:, None] & is_channel[None, :]
        total = tl.zeros([ROWS, CHANNELS], tl.float32)
        for tap in tl.static_range(W):
            if tap == W - 1:
                before = tl.where(is_token, token, -1)
            else:
                place = before_TR + token * (W - 1) + (W - 2 - tap)
                before = tl.load(place, mask=is_token, other=-1)
            row = _row_before(x_TC, first_SRC, before, channel, is_channel, x_stride, C)
            weight = tl.load(weight_CW + channel * W + tap, mask=is_channel, other=0.0)
            total += row * weight.to(tl.float32)[None, :]
        sigmoid = tl.sigmoid(total)
        offset = token.to(tl.int64)[:, None] * dout_stride + channel[None, :]
        dsum = tl.load(dout_TC + offset, mask=mask, other=0.0).to(tl.float32)
        dsum *= sigmoid * (1.0 + total * (1.0 - sigmoid))
        offset = token.to(tl.int64)[:, None] * C + channel[None, :]
        tl.store(dsum_TC + offset, dsum.to(dsum_TC.dtype.element_ty), mask=mask)
        # The rows are in the cache by now.
        for tap in tl.static_range(W):
            if tap == W - 1:
                before = tl.where(is_token, token, -1)
            else:
                place = before_TR + token * (W - 1) + (W - 2 - tap)
                before = tl.load(place, mask=is_token, other=-1)
            row = _row_before(x_TC, first_SRC, before, channel, is_channel, x_stride, C)
            dtap = tl.sum(dsum * row, axis=0)
            dweight_WC += tl.where(tap_W[:, None] == tap, dtap[None, :], 0.0)
    offset = (part.to(tl.int64) * W + tap_W)[:, None] * C + channel[None, :]
    tl.store(dweight_PWC + offset, dweight_WC, mask=is_channel[None, :])


@triton.jit
def spread_gradients(
    dsum_TC,
    weight_CW,
    left_T,
    dx_TC,
    num_tokens,
    C: tl.constexpr,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Gradients of rows from tokens of their own nodes; `left_T` tokens follow in the node."""
    blocks = tl.cdiv(C, CHANNELS)
    token = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < C
    left = tl.load(left_T + token, mask=token < num_tokens, other=-1)
    offset = token.to(tl.int64)[:, None] * C + channel[None, :]
    dx = tl.zeros([ROWS, CHANNELS], tl.float32)
    for ahead in tl.static_range(W):
        mask = (left >= ahead)[:, None] & is_channel[None, :]
        dsum = tl.load(dsum_TC + offset + ahead * C, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_CW + channel * W + (W - 1 - ahead), mask=is_channel, other=0.0)
        dx += dsum * weight.to(tl.float32)[None, :]
    mask = (token < num_tokens)[:, None] & is_channel[None, :]
    tl.store(dx_TC + offset, dx.to(dx_TC.dtype.element_ty), mask=mask)


@triton.jit
def collect_gradients(
    dsum_TC,
    weight_CW,
    dlast_ERC,
    target_G,
    left_G,
    entry_G1,
    entry_row,
    entry_tap,
    dx_TC,
    dfirst_SRC,
    C: tl.constexpr,
    W: tl.constexpr,
    ENTRIES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Whole gradients of rows that other nodes read too, or other parts of the forest.

    A target is a row of x, or of the given ones as -2 - row. Its entries are rows of the gradients
    of sums with taps, or rows handed on with -1; they are added behind those of its own node.
    """
    blocks = tl.cdiv(C, CHANNELS)
    group = tl.program_id(0) // blocks
    channel = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < C
    target = tl.load(target_G + group).to(tl.int64)
    left = tl.load(left_G + group)
    total = tl.zeros([CHANNELS], tl.float32)
    for ahead in tl.static_range(W):
        is_own = is_channel & (left >= ahead)
        own = (target + ahead) * C + channel
        own_dsum = tl.load(dsum_TC + own, mask=is_own, other=0.0).to(tl.float32)
        own_weight = tl.load(weight_CW + channel * W + (W - 1 - ahead), mask=is_channel, other=0.0)
        total += own_dsum * own_weight.to(tl.float32)
    stop = tl.load(entry_G1 + group + 1)
    for start in range(tl.load(entry_G1 + group), stop, ENTRIES):
        entry = start + tl.arange(0, ENTRIES)
        row = tl.load(entry_row + entry, mask=entry < stop, other=0).to(tl.int64)
        tap = tl.load(entry_tap + entry, mask=entry < stop, other=-2)
        offset = row[:, None] * C + channel[None, :]
        mask = (tap >= 0)[:, None] & is_channel[None, :]
        dsum = tl.load(dsum_TC + offset, mask=mask, other=0.0).to(tl.float32)
        taps = weight_CW + channel[None, :] * W + tap[:, None]
        weight = tl.load(taps, mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(dsum * weight, axis=0)
        if dlast_ERC is not None:
            mask = (tap == -1)[:, None] & is_channel[None, :]
            total += tl.sum(tl.load(dlast_ERC + offset, mask=mask, other=0.0), axis=0)
    if target >= 0:
        tl.store(dx_TC + target * C + channel, total.to(dx_TC.dtype.element_ty), mask=is_channel)
    elif dfirst_SRC is not None:
        tl.store(dfirst_SRC + (-2 - target) * C + channel, total, mask=is_channel)
