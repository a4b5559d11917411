"""Which rank keeps the optimizer's states of which parts of the parameters, and steps these."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ratoon.model.parts import PART, Part, shared_out
from ratoon.train.copies import Copies, Copy

T = TypeVar("T")


class Shares:
    """The parts of this rank and of the others, and how tensors get from one to another."""

    def __init__(self, parts: Sequence[Part], copies: Copies) -> None:
        self._copies = copies
        self._parts = tuple(parts)
        self._by_rank = shared_out(parts, copies.size)

    def by_rank(self, parameters: Collection[str]) -> list[list[Part]]:
        """The parts of some parameters that each rank has."""
        return [[part for part in own if part.parameter in parameters] for own in self._by_rank]

    def own(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts of parameters, or of tensors like them, by the names of parts."""
        own = self.by_rank(tensors)[self._copies.rank]
        return {part.name: part.of(tensors[part.parameter]) for part in own}

    def in_order(self, found: Iterable[Mapping[str, T]]) -> list[T]:
        """What ranks found of their parts, by their names: all in the order of parameters."""
        by_name = {name: one for each in found for name, one in each.items()}
        return [by_name[part.name] for part in self._parts]

    def add_up(self, sums: Mapping[str, Tensor]) -> None:
        """Add to this rank's parts those of all others, in the order of ranks.

        Of `sums`, contiguous tensors by parameter; the other ranks' parts of them stay as they are.
        """
        for batches in self._batches(sums):
            own = [part.of(sums[part.parameter]) for part in batches[self._copies.rank]]
            terms = {peer: [torch.empty_like(part) for part in own] for peer in self._peers}
            self._copies.exchange(
                [
                    Copy(part.of(sums[part.parameter]), peer)
                    for peer in self._peers
                    for part in batches[peer]
                ],
                [Copy(part, peer) for peer in self._peers for part in terms[peer]],
            )
            terms[self._copies.rank] = own
            for index, part in enumerate(own):
                total = terms[0][index]
                for peer in range(1, self._copies.size):
                    total = total + terms[peer][index]
                part.copy_(total)

    def hand_out(self, tensors: Mapping[str, Tensor]) -> None:
        """Give every rank the parts that others have, in place; contiguous, by parameter."""
        flat = {name: tensor.detach() for name, tensor in tensors.items()}
        for batches in self._batches(flat):
            own = [part.of(flat[part.parameter]) for part in batches[self._copies.rank]]
            self._copies.exchange(
                [Copy(part, peer) for peer in self._peers for part in own],
                [
                    Copy(part.of(flat[part.parameter]), peer)
                    for peer in self._peers
                    for part in batches[peer]
                ],
            )

    def deal(self, tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """This rank's parts of what rank 0 has on the CPU, by parameter; the others give None.

        Parts that are copied are float32 and flat.
        """
        if tensors is None:
            return self._receive()
        flat = {name: tensor.contiguous() for name, tensor in tensors.items()}
        for batches in self._batches(flat):
            sends = [
                Copy(part.of(flat[part.parameter]).float().reshape(-1), peer)
                for peer in self._peers
                for part in batches[peer]
            ]
            self._copies.exchange(sends, [])
        return self.own(flat)

    def _receive(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for batches in _batches(self._by_rank):
            parts = batches[self._copies.rank]
            received = {part.name: torch.empty(part.stop - part.start) for part in parts}
            self._copies.exchange([], [Copy(tensor, 0) for tensor in received.values()])
            found |= received
        return found

    @property
    def _peers(self) -> list[int]:
        return [peer for peer in range(self._copies.size) if peer != self._copies.rank]

    def _batches(self, parameters: Collection[str]) -> Iterator[list[list[Part]]]:
        return _batches(self.by_rank(parameters))


def _batches(by_rank: Sequence[Sequence[Part]]) -> Iterator[list[list[Part]]]:
    """Parts of each of several ranks that are copied at a time, of `PART` elements or little
    more."""
    rests = [list(parts) for parts in by_rank]
    while len(rests) > 1 and any(rests):
        yield [_taken(rest) for rest in rests]


def _taken(parts: list[Part]) -> list[Part]:
    """Parts off the front, of `PART` elements together or little more."""
    taken: list[Part] = []
    while parts and sum(part.stop - part.start for part in taken) < PART:
        taken.append(parts.pop(0))
    return taken
