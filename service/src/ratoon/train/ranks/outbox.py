"""Memory from which the other ranks of a node copy their parts of a layer's gradients.

The devices' copy engines do so. NCCL's kernel would take 24 of an H200's 132 multiprocessors, and a
matrix product beside it, which wants all of them, would take twice as long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ratoon.shards.parts import Part, Places
from ratoon.shards.shared_memory import Handle, SharedMemory, open_memory
from ratoon.train.clock import Moment


class Outbox:
    """Owns room for one layer's gradients, and maps that of the other ranks.

    Not thread-safe. A rank tells the others once it has put a layer there, and puts the next layer
    there once they have told it that they have taken their parts.
    """

    def __init__(
        self,
        layers: Sequence[Mapping[str, Tensor]],
        parts: Sequence[Sequence[Sequence[Part]]],
        rank: int,
    ) -> None:
        """`layers`: tensors of the gradients' shape and dtype. `parts`: by layer, then by rank."""
        self._parts, self._rank = parts, rank
        self._places = [Places.of([part for own in each for part in own]) for each in parts]
        like = next(p for layer in layers for p in layer.values())
        self._device = like.device
        size = max(places.size for places in self._places)
        self._memory = SharedMemory(size, like.dtype, like.device)
        # Views of the parts: by rank, then by layer, then by part.
        self._rooms: list[list[dict[str, Tensor]]] = []

    def handle(self) -> Handle:
        """The handle of this rank's room, which the others need for `open`."""
        return self._memory.handle()

    def open(self, handles: Sequence[Handle]) -> None:
        """Map the rooms of all ranks."""
        memories = [
            self._memory.tensor if rank == self._rank else open_memory(handle, self._device)
            for rank, handle in enumerate(handles)
        ]
        self._rooms = [[places.views(each) for places in self._places] for each in memories]

    def put(self, layer: int, gradients: Mapping[str, Tensor]) -> None:
        """Copy the other ranks' parts of a layer's gradients there, and wait for the device."""
        room = self._rooms[self._rank][layer]
        for rank, parts in enumerate(self._parts[layer]):
            for part in parts if rank != self._rank else ():
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
