"""Dataclasses of figures that add up over micro-batches, calls and ranks, field by field.

A field says with `total`, `largest` or `smallest` how two of its values become one; the default of
a field is what changes nothing. So that no figure depends on how a batch is cut.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

_MERGE = "merge"


def total() -> float:
    """A field that adds up."""
    return field(default=0.0, metadata={_MERGE: np.add})


def largest() -> float:
    """A field of which the largest stays, or NaN; none is below 0."""
    return field(default=0.0, metadata={_MERGE: np.maximum})


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
