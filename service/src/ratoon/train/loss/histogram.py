"""Quantiles of log-ratios that can be added up: a histogram whose bins are the same everywhere.

A bin is what float32 numbers of one sign have in common in exponent and first three bits of the
fraction, for magnitudes from 2^-20 to 2^5; one bin holds all that is nearer to zero, one at either
end all that is farther (and NaN). So an edge is exact on every device, and the middle of a bin is
within a sixteenth of every log-ratio in it.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ratoon.train.additive import Counts

_FRACTION_BITS, _KEPT_BITS, _BIAS = 23, 3, 127
_LOWEST, _HIGHEST = -20, 5
# Bins of one sign; one more for what is beyond.
_NUM_SIDE = (_HIGHEST - _LOWEST) * 2**_KEPT_BITS + 1
NUM_BINS = 2 * _NUM_SIDE + 1


def count_log_ratios(log_ratio_C: Tensor) -> Tensor:
    """How many fall into each bin, float64 [NUM_BINS], on their device; nothing waits for it."""
    bits_C = log_ratio_C.detach().float().view(torch.int32)
    first = (_BIAS + _LOWEST) << _KEPT_BITS
    place_C = ((bits_C & 0x7FFFFFFF) >> (_FRACTION_BITS - _KEPT_BITS)) - first + 1
    place_C = place_C.clamp(0, _NUM_SIDE)
    bin_C = torch.where(bits_C < 0, -place_C, place_C) + _NUM_SIDE
    # By sorting: adding up in place is either not deterministic or slow where one bin has most.
    edges = torch.arange(NUM_BINS, dtype=bin_C.dtype, device=bin_C.device)
    through = torch.searchsorted(bin_C.sort().values, edges, right=True)
    return torch.diff(through, prepend=through.new_zeros(1)).double()


def quantile(counts: Counts, share: float) -> float:
    """The smallest log-ratio that at least `share` of all are not above, as its bin's middle.

    Exact where it is nearer to zero than 2^-20, which is taken for 0; else within a sixteenth of
    itself, up to 2^5, which stands for all that is beyond. There is at least one.
    """
    through = np.cumsum(counts.bins)
    rank = max(1, math.ceil(share * int(through[-1])))
    place = int(np.searchsorted(through, rank)) - _NUM_SIDE
    return math.copysign(_middle(abs(place)), place)


def _middle(place: int) -> float:
    """Middle of a bin of positive numbers."""
    if place == 0:
        return 0.0
    if place == _NUM_SIDE:
        return 2.0**_HIGHEST
    octave, eighth = divmod(place - 1, 2**_KEPT_BITS)
    return 2.0 ** (_LOWEST + octave) * (1.0 + (eighth + 0.5) / 2**_KEPT_BITS)
