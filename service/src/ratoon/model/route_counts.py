"""Counts how often the routers of a decoder choose each expert, and how sure they are of it.

A packed token counts once for each rollout that it is part of, so sums do not depend on how
rollouts are packed, cut or spread over ranks.

T tokens, E experts, L layers with experts.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ratoon.model.router import Balance, Router


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSums:
    """`layers`: layers with experts that ran, ascending; () for a dense model."""

    layers: tuple[int, ...] = ()
    # Sums of each layer, E + 4 numbers, as in `RouteCount.sums_F`.
    sums: tuple[tuple[float, ...], ...] = ()

    def __add__(self, other: RouteSums) -> RouteSums:
        if not (self.layers and other.layers):
            return self if self.layers else other
        assert self.layers == other.layers, "of one model"
        pairs = zip(self.sums, other.sums, strict=True)
        sums = tuple(tuple(map(operator.add, mine, theirs)) for mine, theirs in pairs)
        return RouteSums(layers=self.layers, sums=sums)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedTokens:
    """Tokens of one forward: how often each counts, int32 [T], and the loss of their choices."""

    copies_T: Tensor
    balance: Balance | None = None
    # Recorded experts by layer with experts, as in `RouteCount.recorded_TC`. None: no token has
    # any.
    recorded_LTC: Tensor | None = None


class RouteCounts:
    """Owns the counts of one decoder's routers, on its device."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._counts = {
            index: module.count
            for index, layer in enumerate(layers)
            for module in layer.modules()
            if isinstance(module, Router)
        }
        for row, count in enumerate(self._counts.values()):
            count.row = row

    @property
    def num_layers(self) -> int:
        """Number of layers with experts."""
        return len(self._counts)

    @contextmanager
    def routing(self, tokens: RoutedTokens | None, *, is_counted: bool) -> Iterator[None]:
        """Within the context, a forward is of these tokens: it uses their recorded experts, and is
        counted if it `is_counted`. None: a forward of other tokens."""
        counted = tokens if is_counted else None
        for count in self._counts.values():
            if tokens is not None and tokens.recorded_LTC is not None:
                count.recorded_TC = tokens.recorded_LTC[count.row]
            if counted is not None:
                count.copies_T, count.balance = counted.copies_T, counted.balance
        try:
            yield
        finally:
            for count in self._counts.values():
                count.recorded_TC = count.copies_T = count.balance = None
        if counted is not None and counted.balance is not None:
            counted.balance.settle()

    @contextmanager
    def balancing(self, tokens: RoutedTokens) -> Iterator[None]:
        """Within the context, the backward of these tokens' forward includes the gradient of their
        balance."""
        for count in self._counts.values():
            count.balance_behind = tokens.balance
        try:
            yield
        finally:
            for count in self._counts.values():
                count.balance_behind = None

    def clear(self) -> None:
        """Reset the counts."""
        for count in self._counts.values():
            count.sums_F = count.balance_loss = None

    def balance_loss(self) -> float:
        """Balance loss of all backwards since the last reset, without coefficients. Waits for the
        device."""
        counts = self._counts.values()
        losses = [count.balance_loss for count in counts if count.balance_loss is not None]
        return float(torch.stack(losses).sum()) if losses else 0.0

    def take(self) -> RouteSums:
        """Returns the counts since the last reset, and resets them. Waits for the device."""
        found = {
            index: count.sums_F for index, count in self._counts.items() if count.sums_F is not None
        }
        self.clear()
        if not found:
            return RouteSums()
        rows: list[list[float]] = torch.stack([*found.values()]).tolist()
        return RouteSums(layers=tuple(found), sums=tuple(map(tuple, rows)))
