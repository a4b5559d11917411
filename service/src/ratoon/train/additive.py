"""Figures that add up over micro-batches, calls and ranks, so that no cut of a batch changes them.

A field of a dataclass says with `total`, `largest` or `smallest` how two of its values become one;
the default of a field is what changes nothing.

Quantiles of log-ratios are those of a histogram whose bins are the same everywhere. A bin is what
float32 numbers of one sign have in common in exponent and first three bits of the fraction, for
magnitudes from 2^-20 to 2^5; one bin holds all that is nearer to zero, one at either end all that
is farther (and NaN). So an edge is exact on every device, and the middle of a bin is within a
sixteenth of every log-ratio in it.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MERGE = "merge"


def total() -> float:
    """A field that adds up."""
    return field(default=0.0, metadata={_MERGE: np.add})


def largest(least: float = 0.0) -> float:
    """A field of which the largest stays, or NaN; none is below `least`."""
    return field(default=least, metadata={_MERGE: np.maximum})


def smallest() -> float:
    """A field of which the smallest stays, or NaN; infinite where there is none."""
    return field(default=math.inf, metadata={_MERGE: np.minimum})


class Merged:
    """Base of dataclasses whose fields are of the functions above, or add up by their own `+`."""

    __slots__ = ()

    def __add__(self, other: Self) -> Self:
        merges = merges_of(type(self))
        values: dict[str, Any] = {}
        for each in fields(self):  # pyright: ignore[reportArgumentType] - subclasses are dataclasses
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            merge = merges.get(each.name)
            values[each.name] = mine + theirs if merge is None else float(merge(mine, theirs))
        return type(self)(**values)


def merges_of(cls: type[Merged]) -> dict[str, np.ufunc]:
    """How the fields of the functions above merge, in order; the others are not in it."""
    return {
        each.name: each.metadata[_MERGE]
        for each in fields(cls)  # pyright: ignore[reportArgumentType] - subclasses are dataclasses
        if _MERGE in each.metadata
    }


def mean(total: float, count: float) -> float | None:
    """The mean of `count` values; None: there are none."""
    return total / count if count else None


def scaled(total: float, weight: float) -> float | None:
    """A weighted mean, rounded as a step's guard rounds it; None: there is no weight."""
    return total * (1.0 / weight) if weight else None


@dataclass(frozen=True, slots=True)
class Counts:
    """How many values fell into each bin of a fixed histogram; `()`: none was looked at."""

    bins: tuple[int, ...] = ()

    def __add__(self, other: Counts) -> Counts:
        if not (self.bins and other.bins):
            return self if self.bins else other
        return Counts(tuple(map(operator.add, self.bins, other.bins)))


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths in tokens, all of them."""

    values: tuple[int, ...] = ()

    def __add__(self, other: Lengths) -> Lengths:
        return Lengths(self.values + other.values)

    @property
    def mean(self) -> float:
        """0 where there is none, as are the quantiles."""
        return sum(self.values) / len(self.values) if self.values else 0.0

    def quantiles(self, *percents: int) -> list[int]:
        """For each percentage, the least length that at least so many do not exceed."""
        count = len(self.values)
        if not count:
            return [0] * len(percents)
        ordered = sorted(self.values)
        return [ordered[-(-percent * count // 100) - 1] for percent in percents]


@dataclass(frozen=True, slots=True)
class Moments:
    """Number, mean and sum of squared deviations of some values.

    Merged as by Chan, Golub and LeVeque (1979): no mean, however large, takes the deviations away.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: NDArray[np.floating]) -> Moments:
        if not len(values):
            return cls()
        wide = values.astype(np.float64)
        mean = float(wide.mean())
        return cls(len(wide), mean, float(np.square(wide - mean).sum()))

    @property
    def std(self) -> float:
        """Standard deviation of the values themselves: divided by their number."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    def __add__(self, other: Moments) -> Moments:
        if not (self.count and other.count):
            return self if self.count else other
        count = self.count + other.count
        gap, share = other.mean - self.mean, other.count / count
        return Moments(
            count,
            self.mean + gap * share,
            self.squares + other.squares + gap * gap * share * self.count,
        )


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
