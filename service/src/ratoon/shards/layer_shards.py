"""Weights of decoder layers that the ranks of a node share out.

Each rank has its parts, in memory that the others read: no rank takes part in what another reads,
so they need not be in the same layer at the same time. What a layer's parameters hold is there
while the layer runs, forward or backward, and the next one's is read meanwhile; a parameter that is
not there has its shape and no memory. Autograd and compiled layers keep parameters and views of
them: those share the storage that is emptied and filled, and no version counter sees it.

Values change between passes alone, in place at their owners.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ratoon.shards.parts import Part, Places
from ratoon.shards.shared_memory import Handle, SharedMemory, open_memory

# Layers that are there at a time: the one that runs, and the next one.
RING = 2


@dataclass(slots=True, kw_only=True)
class _Parameter:
    """A parameter's storage, which may be empty, and where its values go and are, part by part."""

    storage: torch.UntypedStorage
    num_bytes: int
    targets: list[Tensor]
    parts: list[tuple[int, str]]


class LayerShards:
    """Owns this rank's parts of layers, and what is there of the others' while they run.

    States: closed; open, once it knows the other ranks' memory. Not thread-safe.
    """

    def __init__(
        self,
        layers: Sequence[Mapping[str, nn.Parameter]],
        by_rank: Sequence[Sequence[Part]],
        rank: int,
        device: torch.device,
    ) -> None:
        """Takes the values off the parameters of `layers`, which are then of `device`, and keeps
        this rank's parts of them. `by_rank`: the parts of each rank, of these parameters."""
        self._rank, self._by_rank = rank, [list(parts) for parts in by_rank]
        self._device = device
        named = {name: p for layer in layers for name, p in layer.items()}
        (self._dtype,) = {p.dtype for p in named.values()}
        self._places = [Places.of(parts) for parts in self._by_rank]
        self._owned = [self._keep(named)]
        self._shapes = {name: p.shape for name, p in named.items()}
        self._layers = [self._emptied(layer) for layer in layers]
        self.num_layers = len(layers)
        # By number of the memory (the policy's, its reference's) and rank; none: closed.
        self._sources: list[list[dict[str, Tensor]]] = []
        self._present: dict[int, torch.cuda.Event | None] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def ring_bytes(self) -> int:
        """Most that layers take beside this rank's parts."""
        sizes = [sum(p.num_bytes for p in layer.values()) for layer in self._layers]
        return RING * max(sizes, default=0)

    @property
    def owned_bytes(self) -> int:
        """What this rank's parts take."""
        return sum(memory.tensor.nbytes for memory in self._owned)

    @property
    def present_bytes(self) -> int:
        """What layers take beside them now."""
        return sum(p.storage.nbytes() for layer in self._layers for p in layer.values())

    def add_reference(self, layers: Sequence[Mapping[str, nn.Parameter]]) -> None:
        """Share out another model's layers in the same way: its numbers follow those of the first.

        Its parameters are of the same names and have no values; those of now are taken for them.
        """
        memory = SharedMemory(self._owned[0].tensor.numel(), self._dtype, self._device)
        memory.tensor.copy_(self._owned[0].tensor)
        self._owned.append(memory)
        self._layers += [self._emptied(layer) for layer in layers]

    def own(self) -> dict[str, Tensor]:
        """This rank's parts by their names, live: shaped as `Part.of` would have them."""
        views = self._places[self._rank].views(self._owned[0].tensor)
        return {
            name: view.view(self._shapes[name]) if name in self._shapes else view
            for name, view in views.items()
        }

    def handles(self) -> list[Handle]:
        """Of this rank's memory, for `open` on the others."""
        return [memory.handle() for memory in self._owned]

    def open(self, by_rank: Sequence[Sequence[Handle]]) -> None:
        """Map the memory of all ranks, all of which have their parts by now."""
        self._sources = [
            [
                self._places[rank].views(
                    memory.tensor if rank == self._rank else open_memory(each, self._device)
                )
                for rank, each in enumerate(handles)
            ]
            for memory, handles in zip(self._owned, zip(*by_rank, strict=True), strict=True)
        ]

    def enter(self, number: int, ahead: int | None) -> None:
        """Have a layer's values there for what is launched from now on, and read those of `ahead`
        meanwhile; other layers' go. Beyond the ends there is no layer ahead."""
        wanted = [number]
        first = number - number % self.num_layers
        if ahead is not None and first <= ahead < first + self.num_layers:
            wanted.append(ahead)
        for other in self._present.keys() - {*wanted}:
            self._let_go(other)
        for each in wanted:
            if each not in self._present:
                self._present[each] = self._fetch(each)
        event = self._present[number]
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def settle(self) -> None:
        """Let all layers go, and wait until nothing is read any more: owners may write then."""
        for number in [*self._present]:
            self._let_go(number)
        self.wait()

    def wait(self) -> None:
        """Until all that was launched is done, such as what this rank wrote for others to read."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def read(self, name: str, into: Tensor) -> None:
        """Copy a parameter's values, all ranks' parts, to a contiguous tensor of its shape."""
        flat = into.view(-1)
        for parts, source in zip(self._by_rank, self._sources[0], strict=True):
            for part in parts:
                if part.parameter == name:
                    target = flat[part.start : part.stop]
                    target.copy_(source[part.name], non_blocking=True)

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def _keep(self, named: Mapping[str, nn.Parameter]) -> SharedMemory:
        places = self._places[self._rank]
        memory = SharedMemory(places.size, self._dtype, self._device)
        views = places.views(memory.tensor)
        for part in self._by_rank[self._rank]:
            views[part.name].copy_(part.of(named[part.parameter]).detach().reshape(-1))
        return memory

    def _emptied(self, layer: Mapping[str, nn.Parameter]) -> dict[str, _Parameter]:
        """The parameters, from here on without values or memory."""
        found: dict[str, _Parameter] = {}
        for name, parameter in layer.items():
            parameter.data = torch.empty(parameter.shape, dtype=self._dtype, device=self._device)
            storage = parameter.untyped_storage()
            # With a version counter of its own: autograd is not to see what is written through it.
            flat = torch.empty(0, dtype=self._dtype, device=self._device)
            flat.set_(storage, 0, (parameter.numel(),), (1,))
            parts = [
                (rank, part)
                for rank, own in enumerate(self._by_rank)
                for part in own
                if part.parameter == name
            ]
            found[name] = _Parameter(
                storage=storage,
                num_bytes=storage.nbytes(),
                targets=[flat[part.start : part.stop] for _, part in parts],
                parts=[(rank, part.name) for rank, part in parts],
            )
            storage.resize_(0)
        return found

    def _fetch(self, number: int) -> torch.cuda.Event | None:
        """Memory is made in the order of compute, and copied to once compute is that far."""
        layer, sources = self._layers[number], self._sources[number // self.num_layers]
        for parameter in layer.values():
            parameter.storage.resize_(parameter.num_bytes)
        if self._stream is None:
            self._copy(layer, sources)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._copy(layer, sources)
            copied = torch.cuda.Event()
            copied.record(self._stream)
            return copied

    @torch.no_grad()
    def _copy(
        self, layer: Mapping[str, _Parameter], sources: Sequence[Mapping[str, Tensor]]
    ) -> None:
        """Own parts, then the next rank's, and so on: else all would read of one at once."""
        for distance in range(len(sources)):
            rank = (self._rank + distance) % len(sources)
            for parameter in layer.values():
                for target, (owner, name) in zip(parameter.targets, parameter.parts, strict=True):
                    if owner == rank:
                        target.copy_(sources[rank][name], non_blocking=True)

    def _let_go(self, number: int) -> None:
        """Give its memory back, which what compute does next may overwrite."""
        event = self._present.pop(number)
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        for parameter in self._layers[number].values():
            parameter.storage.resize_(0)
