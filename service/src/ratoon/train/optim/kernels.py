"""Triton kernels of gradient sums, of a state's digest and of a bfloat16 step.

Imported where there is a GPU: triton comes with torch's CUDA wheels alone.

Gradient sums: terms are added one after the other, and the sum is read once. torch's own reads and
writes the sum for each term, and mixed dtypes one element at a time: 1.8 TB/s of an H200's 4.8.

A step: what `bf16_adamw._step_views` is for a CPU, each element once. A compiler makes such a
kernel of that function too, but calling it takes the host longer, for each of some 500 parts of an
8B model's weights, than the GPU takes to run it. No product and sum are merged into one
instruction: which are merged depends on the rest of a kernel, so that two of one formula would
differ in their last bits.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from ratoon.train.optim import rounding
from ratoon.train.optim.bf16_state import Tensors, is_master, is_rounded

_SUM_BLOCK = 4096
_SUM_WARPS = 8


def add_each(total: Tensor, terms: Sequence[Tensor]) -> None:
    """`total` += each of the terms, in order, in the dtype of `total`; all contiguous, one size."""
    num_elements = total.numel()
    kernel: Any = _add_each
    kernel[(triton.cdiv(num_elements, _SUM_BLOCK),)](
        total, tuple(terms), num_elements, NUM=len(terms), BLOCK=_SUM_BLOCK, num_warps=_SUM_WARPS
    )


@triton.jit
def _add_each(total, terms, num_elements, NUM: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = index < num_elements
    value = tl.load(total + index, mask=is_there)
    for number in tl.static_range(NUM):
        value += tl.load(terms[number] + index, mask=is_there).to(value.dtype)
    tl.store(total + index, value, mask=is_there)


_DIGEST_LANES = 1024
_DIGEST_WARPS = 4


def block_sums(words: Tensor, places: Tensor, blocks: Tensor) -> Tensor:
    """What each block of `words` adds to both sums, int64 [r, 2].

    `words`: integers [n], blocks of as many as there are `places`, int64 [2, w], and what is left;
    `blocks`: the multipliers of blocks, int64 [2, r].
    """
    num_blocks = blocks.shape[1]
    sums = torch.empty(num_blocks, 2, dtype=torch.int64, device=words.device)
    kernel: Any = _sum_blocks
    with torch.cuda.device_of(words):
        kernel[(num_blocks,)](
            words,
            places,
            blocks,
            sums,
            len(words),
            num_blocks,
            WIDTH=places.shape[1],
            LANES=_DIGEST_LANES,
            num_warps=_DIGEST_WARPS,
        )
    return sums


@triton.jit
def _sum_blocks(
    words, places, blocks, sums, num_words, num_blocks, WIDTH: tl.constexpr, LANES: tl.constexpr
):
    block = tl.program_id(0)
    start = block.to(tl.int64) * WIDTH
    one = tl.zeros([LANES], tl.int64)
    two = tl.zeros([LANES], tl.int64)
    for first in range(0, WIDTH, LANES):
        place = first + tl.arange(0, LANES)
        word = tl.load(words + start + place, mask=start + place < num_words, other=0).to(tl.int64)
        one += word * tl.load(places + place)
        two += word * tl.load(places + WIDTH + place)
    tl.store(sums + 2 * block, tl.sum(one) * tl.load(blocks + block))
    tl.store(sums + 2 * block + 1, tl.sum(two) * tl.load(blocks + num_blocks + block))


# Blocks of a program, eight elements a thread.
_ROWS = 4
_WARPS = 4
# None is spilled by any kind of states; half of the threads that an SM can have fit.
_REGISTERS = 64
_BLOCK = tl.constexpr(rounding.BLOCK)
_FRACTION_BITS = tl.constexpr(rounding.FRACTION_BITS)
_FRACTION = tl.constexpr(rounding.FRACTION)
_SIGNED_BOTTOM = tl.constexpr(rounding.SIGNED_BOTTOM)
_POSITIVE_BOTTOM = tl.constexpr(rounding.POSITIVE_BOTTOM)
_SIGNED_FLOOR = tl.constexpr(rounding.SIGNED_FLOOR)
_UP = tl.constexpr((1 << rounding.FRACTION_BITS) / rounding.SIGNED_FLOOR)
_HIGH = tl.constexpr(32 - rounding.FRACTION_BITS)
_POSITIVE_FLOOR = tl.constexpr(rounding.POSITIVE_FLOOR)
_TINY = tl.constexpr(rounding.TINY)
_MAX_SQUARE = tl.constexpr(rounding.MAX_SQUARE)
_GAMMA = tl.constexpr(rounding.GAMMA)
_MIX_1 = tl.constexpr(rounding.MIX[0])
_MIX_2 = tl.constexpr(rounding.MIX[1])


def step_weight(
    gradient: Tensor,
    weights: Tensors,
    moments: Tensors,
    scalars: tuple[Tensor, Tensor],
    origin: Tensor,
    is_counted: bool,
) -> Tensor | None:
    """As `bf16_adamw._step_views`; counts are those of each program, int32."""
    num_elements = gradient.numel()
    grid = (triton.cdiv(num_elements, _ROWS * rounding.BLOCK),)
    counts = None
    if is_counted:
        counts = torch.empty(grid, dtype=torch.int32, device=gradient.device)
    first, second, *scales = moments
    kernel: Any = _step
    kernel[grid](
        _bits(gradient),
        _bits(weights[0]),
        weights[1] if len(weights) > 1 else None,
        _bits(first),
        _bits(second),
        *(scales or (None, None)),
        *scalars,
        origin,
        counts,
        num_elements,
        HAS_MASTERS=is_master(weights),
        IS_ROUNDED=is_rounded(weights, moments),
        ROWS=_ROWS,
        num_warps=_WARPS,
        maxnreg=_REGISTERS,
        enable_fp_fusion=False,
    )
    return counts


def _bits(tensor: Tensor) -> Tensor:
    """bfloat16 as int16: its bits are the upper half of a float32's."""
    return tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _int(value):
    return value.to(tl.int32, bitcast=True)


@triton.jit
def _read(values, index, is_there):
    """float32, of itself or of the bits of bfloat16."""
    value = tl.load(values + index, mask=is_there, other=0)
    return value if value.dtype == tl.float32 else _float(value.to(tl.int32) << 16)


@triton.jit
def _write(values, index, is_there, value, words):
    """Rounded by the low 16 bits of `words` where it is bfloat16."""
    if values.dtype.element_ty == tl.float32:
        tl.store(values + index, value, mask=is_there)
    else:
        tl.store(values + index, _rounded(value, words), mask=is_there)


@triton.jit
def _rounded(value, words):
    """The bits of bfloat16, int16."""
    return ((_int(value) + (words & 0xFFFF)) >> 16).to(tl.int16)


@triton.jit
def _mix(words):
    words = (words ^ ((words >> 16) & 0xFFFF)) * _MIX_1
    words = (words ^ ((words >> 13) & 0x7FFFF)) * _MIX_2
    return words ^ ((words >> 16) & 0xFFFF)


@triton.jit
def _scaled(magnitude):
    """Each over its row's largest, and what to keep of that."""
    scales = tl.max(magnitude, axis=1)
    is_zero = scales < _TINY
    factors = tl.div_rn(tl.full(scales.shape, 1.0, tl.float32), tl.where(is_zero, 1.0, scales))
    return tl.minimum(magnitude * factors[:, None], 1.0), tl.where(is_zero, 0.0, scales)


@triton.jit
def _signed_codes(value, words):
    magnitude, scales = _scaled(tl.abs(value))
    draw = words & _FRACTION
    code = ((_int(magnitude) + draw) >> _FRACTION_BITS) - _SIGNED_BOTTOM
    is_up = draw.to(tl.float32) < magnitude * _UP
    code = tl.where(magnitude < _SIGNED_FLOOR, is_up.to(tl.int32), code)
    sign = (_int(value) >> 24) & 128
    return (code | sign).to(tl.uint8), scales


@triton.jit
def _positive_codes(value, words):
    magnitude, scales = _scaled(value)
    bits = _int(tl.maximum(magnitude, _POSITIVE_FLOOR)) + (words & _FRACTION)
    return ((bits >> _FRACTION_BITS) - _POSITIVE_BOTTOM).to(tl.uint8), scales


@triton.jit
def _signed(codes):
    code = codes.to(tl.int32)
    size = code & 127
    value = _float(((size + _SIGNED_BOTTOM) << _FRACTION_BITS) | ((code & 128) << 24))
    return tl.where(size == 0, 0.0, value)


@triton.jit
def _positive(codes):
    return _float((codes.to(tl.int32) + _POSITIVE_BOTTOM) << _FRACTION_BITS)


@triton.jit
def _words(index, origin, keys):
    """Of weights, and of their moments."""
    key = _mix(tl.load(keys) ^ tl.load(origin + 1)) + tl.load(origin)
    moment_words = _mix((index + tl.load(origin + 2)) * _GAMMA + key)
    return _mix(moment_words + tl.load(keys + 1)), moment_words


@triton.jit
def _step(
    gradients,
    weights,
    beside,
    first,
    second,
    first_scales,
    second_scales,
    numbers,
    keys,
    origin,
    counts,
    num_elements,
    HAS_MASTERS: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    tile = tl.program_id(0)
    row = tile * ROWS + tl.arange(0, ROWS)
    index = row[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    is_there = index < num_elements
    is_row = row * _BLOCK < num_elements

    bits = tl.load(weights + index, mask=is_there, other=0)
    if HAS_MASTERS:
        weight = tl.load(beside + index, mask=is_there, other=0.0)
    elif beside is not None:
        remainder = tl.load(beside + index, mask=is_there, other=0).to(tl.int32)
        weight = _float((bits.to(tl.int32) << 16) + remainder)
    else:
        weight = _float(bits.to(tl.int32) << 16)
    if first_scales is not None:
        m = _signed(tl.load(first + index, mask=is_there, other=0))
        m = m * tl.load(first_scales + row, mask=is_row, other=0.0)[:, None]
        v = _positive(tl.load(second + index, mask=is_there, other=0))
        v = v * tl.load(second_scales + row, mask=is_row, other=0.0)[:, None]
    else:
        m = _read(first, index, is_there)
        v = _read(second, index, is_there)

    g = _read(gradients, index, is_there) * tl.load(numbers)
    m = m + tl.load(numbers + 4) * (g - m)
    v = tl.minimum(v * tl.load(numbers + 5) + tl.load(numbers + 6) * g * g, _MAX_SQUARE)
    root = tl.sqrt(v) * tl.load(numbers + 3) + tl.load(numbers + 7)
    update = tl.load(numbers + 1) * weight + tl.load(numbers + 2) * m / root
    weight = weight - update

    words, moment_words = _words(index, origin, keys) if IS_ROUNDED else (index, index)
    if beside is None:
        new_bits = _rounded(weight, words)
    else:
        is_number = weight == weight  # noqa: PLR0124
        whole = _int(tl.where(is_number, weight, float("nan")))
        top = (whole + 0x8000) & -0x10000
        new_bits = (top >> 16).to(tl.int16)
        if HAS_MASTERS:
            tl.store(beside + index, weight, mask=is_there)
        else:
            tl.store(beside + index, (whole - top).to(tl.int16), mask=is_there)
    tl.store(weights + index, new_bits, mask=is_there)
    if first_scales is not None:
        code, scale = _signed_codes(m, moment_words)
        tl.store(first + index, code, mask=is_there)
        tl.store(first_scales + row, scale, mask=is_row)
        code, scale = _positive_codes(v, moment_words >> _HIGH)
        tl.store(second + index, code, mask=is_there)
        tl.store(second_scales + row, scale, mask=is_row)
    else:
        _write(first, index, is_there, m, moment_words)
        _write(second, index, is_there, v, moment_words >> _HIGH)
    if counts is not None:
        is_changed = ((new_bits != bits) & is_there).to(tl.int32)
        tl.store(counts + tile, tl.sum(tl.sum(is_changed, axis=1), axis=0))
