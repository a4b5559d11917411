"""Which rank owns which parts of the parameters, and how parts get from one rank to another.

An owner keeps the optimizer's states of its parts, and steps these. Ranks of one node copy parts of
a layer's gradients from each other's memory, an `Outbox`, by the devices' copy engines. NCCL's
kernel would take 24 of an H200's 132 multiprocessors, and a matrix product beside it, which wants
all of them, would take twice as long.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ratoon.shards.copies import Copies, Copy
from ratoon.shards.layer_shards import Handle, SharedMemory, open_memory
from ratoon.shards.parts import PART, Part, Places, shared_out
from ratoon.train.clock import Moment

T = TypeVar("T")


class Shares:
    """Assigns parts of the parameters to ranks, and copies tensors between their owners."""

    def __init__(self, parts: Sequence[Part], copies: Copies) -> None:
        self._copies = copies
        self._parts = tuple(parts)
        self._by_rank = shared_out(parts, copies.size)

    def by_rank(self, parameters: Collection[str]) -> list[list[Part]]:
        """The parts of some parameters, by the rank that owns them."""
        return [[part for part in own if part.parameter in parameters] for own in self._by_rank]

    def own(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts of parameters, or of tensors like them, by the names of parts."""
        own = self.by_rank(tensors)[self._copies.rank]
        return {part.name: part.of(tensors[part.parameter]) for part in own}

    def in_order(self, found: Iterable[Mapping[str, T]]) -> list[T]:
        """Values that ranks found for their parts, in the order of parameters.

        `found`: of each rank, by the names of its parts.
        """
        by_name = {name: one for each in found for name, one in each.items()}
        return [by_name[part.name] for part in self._parts]

    def reduce_sums(self, sums: Mapping[str, Tensor]) -> None:
        """Add the other ranks' sums to this rank's parts, in the order of ranks.

        `sums`: contiguous tensors by parameter, changed in place. Parts that other ranks own stay
        as they are.
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

    def broadcast_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Send every rank the parts that this one owns, and receive theirs.

        `tensors`: contiguous weights by parameter, changed in place.
        """
        parts = [part for part in self._parts if part.parameter in tensors]
        whole = {part.name: part.of(tensors[part.parameter].detach()) for part in parts}
        self.broadcast_parts(whole, range(self._copies.size))

    def broadcast_parts(self, tensors: Mapping[str, Tensor], ranks: Sequence[int]) -> None:
        """Send some ranks, of which this is one, the parts that it owns, and receive theirs.

        `tensors`: contiguous weights by the names of parts, changed in place. All of `ranks` have
        the parts that any of them owns.
        """
        owned = [[part for part in self._by_rank[rank] if part.name in tensors] for rank in ranks]
        for batches in _batches(owned):
            batch = dict(zip(ranks, batches, strict=True))
            own = batch.pop(self._copies.rank)
            self._copies.exchange(
                [Copy(tensors[part.name], peer) for peer in batch for part in own],
                [Copy(tensors[part.name], peer) for peer in batch for part in batch[peer]],
            )

    def deal(self, tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """This rank's parts of the tensors that rank 0 has on the CPU; the others give None.

        `tensors`: by parameter. Parts that are copied arrive as flat float32 tensors.
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
    """Cut the parts of several ranks into batches of about `PART` elements a rank, each copied at
    a time."""
    rests = [list(parts) for parts in by_rank]
    while len(rests) > 1 and any(rests):
        yield [_taken(rest) for rest in rests]


def _taken(parts: list[Part]) -> list[Part]:
    """Take parts off the front, `PART` elements together or slightly more."""
    taken: list[Part] = []
    while parts and sum(part.stop - part.start for part in taken) < PART:
        taken.append(parts.pop(0))
    return taken


class Outbox:
    """Owns room for one layer's gradients, and maps that of the other ranks of the node.

    Not thread-safe. A rank tells the others once it has put a layer there, and puts the next layer
    there once they have told it that they have taken their parts.
    """

    def __init__(
        self,
        layers: Sequence[Mapping[str, Tensor]],
        parts: Sequence[Sequence[Sequence[Part]]],
        rank: int,
        neighbours: Sequence[int],
    ) -> None:
        """`layers`: tensors of the gradients' shape and dtype. `parts`: by layer, then by rank.
        `neighbours`: the ranks of the node, `rank` among them."""
        self._parts, self._rank, self.neighbours = parts, rank, neighbours
        self._places = [
            Places.of([part for peer in neighbours for part in each[peer]]) for each in parts
        ]
        like = next(p for layer in layers for p in layer.values())
        self._device = like.device
        size = max(places.size for places in self._places)
        self._memory = SharedMemory(size, like.dtype, like.device)
        # Views of the parts: by rank, then by layer, then by part.
        self._rooms: dict[int, list[dict[str, Tensor]]] = {}

    def handle(self) -> Handle:
        """The handle of this rank's room, which the others need for `open`."""
        return self._memory.handle()

    def open(self, handles: Sequence[Handle]) -> None:
        """Map the rooms of the node's ranks, whose handles are in their order."""
        memories = {
            rank: self._memory.tensor if rank == self._rank else open_memory(handle, self._device)
            for rank, handle in zip(self.neighbours, handles, strict=True)
        }
        self._rooms = {
            rank: [places.views(memory) for places in self._places]
            for rank, memory in memories.items()
        }

    def put(self, layer: int, gradients: Mapping[str, Tensor]) -> None:
        """Copy the neighbours' parts of a layer's gradients there, and wait for the device."""
        room = self._rooms[self._rank][layer]
        for rank in self.neighbours:
            for part in self._parts[layer][rank] if rank != self._rank else ():
                room[part.name].copy_(part.of(gradients[part.parameter]).reshape(-1))
        Moment(self._device).wait()

    def take(self, layer: int, rank: int, into: Sequence[Tensor]) -> None:
        """Copy this rank's parts of what another has put there, in order."""
        room = self._rooms[rank][layer]
        for part, target in zip(self._parts[layer][self._rank], into, strict=True):
            target.view(-1).copy_(room[part.name], non_blocking=True)


def outbox_bytes(layers: Sequence[Mapping[str, Tensor]]) -> int:
    """Bytes of the room, approximately."""
    return max((sum(p.nbytes for p in layer.values()) for layer in layers), default=0)
