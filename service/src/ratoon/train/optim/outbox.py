"""A layer's gradients where the other ranks of a node take their parts of them.

The devices' copy engines take them. NCCL's kernel has 24 of an H200's 132 multiprocessors, beside
which a product that wants all of them takes twice as long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ratoon.model.parts import Part, Places
from ratoon.model.shared_memory import Handle, SharedMemory, open_memory
from ratoon.train.report.clock import Moment


class Outbox:
    """Owns room for one layer's gradients, and maps that of the other ranks.

    Not thread-safe. A rank tells the others once it has put a layer there, and puts the next there
    once they have told it that they have taken theirs.
    """

    def __init__(
        self,
        layers: Sequence[Mapping[str, Tensor]],
        parts: Sequence[Sequence[Sequence[Part]]],
        rank: int,
    ) -> None:
        """`layers`: what gradients are like; `parts`: of each layer those of each rank."""
        self._parts, self._rank = parts, rank
        self._places = [Places.of([part for own in each for part in own]) for each in parts]
        like = next(p for layer in layers for p in layer.values())
        self._device = like.device
        size = max(places.size for places in self._places)
        self._memory = SharedMemory(size, like.dtype, like.device)
        # By rank, then layer.
        self._rooms: list[list[dict[str, Tensor]]] = []

    def handle(self) -> Handle:
        """For `open` on the others."""
        return self._memory.handle()

    def open(self, handles: Sequence[Handle]) -> None:
        """Map the rooms of all ranks."""
        memories = [
            self._memory.tensor if rank == self._rank else open_memory(handle, self._device)
            for rank, handle in enumerate(handles)
        ]
        self._rooms = [[places.views(each) for places in self._places] for each in memories]

    def put(self, layer: int, gradients: Mapping[str, Tensor]) -> None:
        """Have the other ranks' parts of a layer's gradients there; waits until they are."""
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
    """About what the room takes."""
    return max((sum(p.nbytes for p in layer.values()) for layer in layers), default=0)
