"""Float32 in fewer bits: an exact split into bfloat16 and a remainder, and stochastic rounding.

Stochastic rounding, to bfloat16 and to 8-bit codes, gives one of the two representable neighbours
of a value, by random words. Their mean is the value; the words depend on keys and the element's
index alone, not on device, chunk or the state of any generator.

An 8-bit code is the top of a float32: the exponent's low bits and three bits of the fraction, of a
value divided by its block's largest magnitude. Signed: a sign, and zero or 1.25 * 2**-16 ... 1.
Positive: 1.125 * 2**-32 ... 1; what is smaller counts as the smallest, so that no root of a second
moment is zero under a first moment that is not.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Elements that share one scale in an 8-bit tensor.
BLOCK = 256

FRACTION_BITS = 20
FRACTION = (1 << FRACTION_BITS) - 1
# 1.0 has the largest code: its exponent is 127, of 8 codes each, less the top of the code 0.
SIGNED_BOTTOM = (127 << 3) - 127
POSITIVE_BOTTOM = (127 << 3) - 255
# The floats of the smallest codes; of the signed ones that is 1, for 0 is zero.
SIGNED_FLOOR = 1.25 * 2.0**-16
POSITIVE_FLOOR = 1.125 * 2.0**-32
# Smallest normal float32: devices differ in how they divide by what is below.
TINY = 2.0**-126
# The odd number next to 2**32 over the golden ratio, as int32.
GAMMA = -0x61C88647
# Of the finaliser of MurmurHash3, as int32.
MIX = (-0x7A143595, -0x3D4D51CB)
# Second moments end here, where rounding them up is still finite.
MAX_SQUARE = 1e38


def random_words(index: Tensor, origin: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For a weight, its first and its second moment: functions of an element and a step.

    `index`: int32, of elements in their parameter; `origin`, `keys`: int32 [2], of the parameter
    and of the step. The moments share a word: one reads its low bits, the other its high ones; of
    two 8-bit codes these overlap, the first's highest 8 and the second's lowest.

    Source: SplitMix (Steele, Lea and Flood, OOPSLA 2014) of 32 bits, a stream for each seed.
    """
    moments = mix(index * GAMMA + mix(keys[0] ^ origin[1]) + origin[0])
    return mix(moments + keys[1]), moments, moments >> (32 - FRACTION_BITS)


def mix(words: Tensor) -> Tensor:
    """A bijection of int32 in which every bit of the input moves half of those of the output.

    The finaliser of MurmurHash3 (Appleby); int32 products wrap, and its shifts are logical ones.
    """
    words = (words ^ ((words >> 16) & 0xFFFF)) * MIX[0]
    words = (words ^ ((words >> 13) & 0x7FFFF)) * MIX[1]
    return words ^ ((words >> 16) & 0xFFFF)


def round_bf16(x: Tensor, words: Tensor) -> Tensor:
    """`x` (float32, finite, below 2**127 in magnitude) as bfloat16, by the low 16 bits of `words`.

    Away from zero with the probability of the fraction that is cut off; int32 words of x's shape.
    """
    bits = x.view(torch.int32) + (words & 0xFFFF)
    return (bits & -0x10000).view(torch.float32).to(torch.bfloat16)


def split_float32(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` as the bits of the nearest bfloat16 and what these are off by; both int16, x's shape.

    A tie goes away from zero: to even, as IEEE 754 has it, 65,537 floats would share an even
    bfloat16, one more than 16 bits tell apart. So the bits of `x`, as an integer, are
    `(bfloat16 << 16) + remainder` for every value, subnormal and infinite ones too; one that
    rounds beyond the largest bfloat16 is infinite there alone. A NaN stays some NaN.
    """
    bits = torch.where(x.isnan(), torch.nan, x).view(torch.int32)
    top = (bits + 0x8000) & -0x10000
    return (top >> 16).to(torch.int16), (bits - top).to(torch.int16)


def join_float32(bits: Tensor, remainder: Tensor) -> Tensor:
    """The float32 values of `split_float32`."""
    return ((bits.to(torch.int32) << 16) + remainder.to(torch.int32)).view(torch.float32)


def encode_signed(x: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (uint8, shape of `x`) and block maxima (float32, [n / BLOCK]) of `x`.

    `x`: float32 [n] or [n / BLOCK, BLOCK].
    """
    magnitude, scales = _scaled(x.abs())
    draw = words & FRACTION
    code = ((magnitude.view(torch.int32) + draw) >> FRACTION_BITS) - SIGNED_BOTTOM
    # Below the smallest code but zero the grid is zero and that one.
    is_up = draw.to(torch.float32) < magnitude * ((1 << FRACTION_BITS) / SIGNED_FLOOR)
    code = torch.where(magnitude < SIGNED_FLOOR, is_up.to(torch.int32), code)
    sign = (x.view(torch.int32) >> 24) & 128
    return (code | sign).to(torch.uint8), scales


def decode_signed(codes: Tensor, scales: Tensor) -> Tensor:
    """The float32 values of `encode_signed`."""
    code = codes.to(torch.int32)
    magnitude = code & 127
    bits = ((magnitude + SIGNED_BOTTOM) << FRACTION_BITS) | ((code & 128) << 24)
    return _unscaled(torch.where(magnitude == 0, 0.0, bits.view(torch.float32)), scales)


def encode_positive(x: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """As `encode_signed`, of values >= 0."""
    y, scales = _scaled(x)
    bits = y.clamp(min=POSITIVE_FLOOR).view(torch.int32) + (words & FRACTION)
    code = (bits >> FRACTION_BITS) - POSITIVE_BOTTOM
    return code.to(torch.uint8), scales


def decode_positive(codes: Tensor, scales: Tensor) -> Tensor:
    """The float32 values of `encode_positive`."""
    bits = (codes.to(torch.int32) + POSITIVE_BOTTOM) << FRACTION_BITS
    return _unscaled(bits.view(torch.float32), scales)


def _scaled(magnitude: Tensor) -> tuple[Tensor, Tensor]:
    """Each over its block's largest, in [0, 1]; a block below `TINY` is zero."""
    blocks = magnitude.view(-1, BLOCK)
    scales = blocks.amax(dim=1)
    is_zero = scales < TINY
    # One division a block; a product that is off by an ulp must not pass the largest code.
    factors = 1.0 / torch.where(is_zero, 1.0, scales)
    y = (blocks * factors[:, None]).clamp(max=1.0)
    return y.view(magnitude.shape), torch.where(is_zero, 0.0, scales)


def _unscaled(y: Tensor, scales: Tensor) -> Tensor:
    return (y.view(-1, BLOCK) * scales[:, None]).view(y.shape)
