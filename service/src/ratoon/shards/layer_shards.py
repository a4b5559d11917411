"""Shards the weights of decoder layers among the ranks of a node.

Ranks are numbered within the node here. Each has its parts in memory that the others read. No rank
takes part in another's reads, so the ranks need not be in the same layer at the same time. A
layer's parameters have their values while the layer runs, forward or backward, and the next layer's
are read meanwhile. At other times a parameter has its shape and no memory. Autograd and compiled
layers keep parameters and views of them: these share the storage that is emptied and filled, and no
version counter notices.

Values change only between passes, in place at their owners.

A rank's memory is mapped by other processes of the same node: its owner writes, they read. On a CPU
it is anonymous (memfd_create(2)), and others find it among the owner's descriptors (proc(5)): it
has no name that could be left over, and is freed with the last process that maps it. On a GPU it is
shared by CUDA's IPC handles.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ratoon.config import has_expandable_segments
from ratoon.shards.parts import Part, Places

# Index of the device among the arguments of torch's handle.
_DEVICE_ARGUMENT = 6
_EXPANDABLE = "expandable_segments"
# Number of layers present at a time: the running one and the next.
RING = 2


@dataclass(frozen=True, slots=True)
class Handle:
    """Handle of one process's memory, for another: `opens(*arguments)` maps it."""

    opens: Callable[..., Tensor]
    arguments: tuple[Any, ...]


class SharedMemory:
    """Owns elements of one dtype, [n], that other processes may read while this one lives."""

    def __init__(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> None:
        # There is at least one element, because an empty mapping is not possible.
        num_elements = max(1, num_elements)
        if device.type == "cuda":
            self.tensor = _allocate(num_elements, dtype, device)
            self._descriptor = None
            return
        self._descriptor = os.memfd_create("ratoon-weights", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        os.ftruncate(self._descriptor, num_elements * dtype.itemsize)
        self.tensor = _map(os.getpid(), self._descriptor, num_elements, dtype)

    def handle(self) -> Handle:
        """Returns a handle to open while this process lives."""
        if self._descriptor is None:
            from torch.multiprocessing.reductions import reduce_tensor

            opens, arguments = reduce_tensor(self.tensor)
            # Earlier writes are complete then: readers need no event of this process.
            torch.cuda.synchronize(self.tensor.device)
            return Handle(opens, (*arguments[:-1], False))
        tensor = self.tensor
        return Handle(_map, (os.getpid(), self._descriptor, tensor.numel(), tensor.dtype))


def open_memory(handle: Handle, device: torch.device) -> Tensor:
    """Maps another process's memory, [n], on this process's `device`, which copies from it."""
    arguments = list(handle.arguments)
    if device.type == "cuda":
        # The reading device maps the memory: the owner's would have to be set up here as well.
        arguments[_DEVICE_ARGUMENT] = torch.empty(0, device=device).device.index
    return handle.opens(*arguments)


def _map(process: int, descriptor: int, num_elements: int, dtype: torch.dtype) -> Tensor:
    path = f"/proc/{process}/fd/{descriptor}"
    return torch.from_file(path, shared=True, size=num_elements, dtype=dtype)


def _allocate(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocates by cudaMalloc only: expandable segments have no handle that any process of the node
    may open."""
    is_expandable = has_expandable_segments()
    configure = cast("Any", torch._C)._accelerator_setAllocatorSettings
    if is_expandable:
        configure(f"{_EXPANDABLE}:False")
    try:
        return torch.empty(num_elements, dtype=dtype, device=device)
    finally:
        if is_expandable:
            configure(f"{_EXPANDABLE}:True")


@dataclass(slots=True, kw_only=True)
class _Parameter:
    """A parameter's storage, which may be empty, and the source and target of its values, part by
    part."""

    storage: torch.UntypedStorage
    num_bytes: int
    targets: list[Tensor]
    parts: list[tuple[int, str]]


class LayerShards:
    """Owns this rank's parts of layers, and the present copies of the others' parts.

    States: closed; open, once it knows the other ranks' memory. Not thread-safe.
    """

    def __init__(
        self,
        layers: Sequence[Mapping[str, nn.Parameter]],
        by_rank: Sequence[Sequence[Part]],
        rank: int,
        device: torch.device,
    ) -> None:
        """Removes the values from the parameters of `layers`, which are then on `device`, and keeps
        this rank's parts of them. `by_rank`: the parts of each rank, for these parameters."""
        self._rank, self._by_rank = rank, [list(parts) for parts in by_rank]
        self._device = device
        named = {name: p for layer in layers for name, p in layer.items()}
        (self._dtype,) = {p.dtype for p in named.values()}
        self._places = [Places.of(parts) for parts in self._by_rank]
        self._owned = [self._keep(named)]
        self._shapes = {name: p.shape for name, p in named.items()}
        self._layers = [self._emptied(layer) for layer in layers]
        self.num_layers = len(layers)
        # Sources by number of the memory (the policy's, its reference's) and rank; empty if closed.
        self._sources: list[list[dict[str, Tensor]]] = []
        self._present: dict[int, torch.cuda.Event | None] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def ring_bytes(self) -> int:
        """Most bytes that present layers take beside this rank's parts."""
        sizes = [sum(p.num_bytes for p in layer.values()) for layer in self._layers]
        return RING * max(sizes, default=0)

    @property
    def owned_bytes(self) -> int:
        """Bytes of this rank's parts."""
        return sum(memory.tensor.nbytes for memory in self._owned)

    @property
    def present_bytes(self) -> int:
        """Bytes that present layers take now beside this rank's parts."""
        return sum(p.storage.nbytes() for layer in self._layers for p in layer.values())

    def add_reference(self, layers: Sequence[Mapping[str, nn.Parameter]]) -> None:
        """Shard another model's layers in the same way: its numbers follow those of the first.

        Its parameters have the same names and no values; they take the current ones.
        """
        memory = SharedMemory(self._owned[0].tensor.numel(), self._dtype, self._device)
        memory.tensor.copy_(self._owned[0].tensor)
        self._owned.append(memory)
        self._layers += [self._emptied(layer) for layer in layers]

    def own(self) -> dict[str, Tensor]:
        """This rank's live parts by name, shaped as `Part.of` would shape them."""
        views = self._places[self._rank].views(self._owned[0].tensor)
        return {
            name: view.view(self._shapes[name]) if name in self._shapes else view
            for name, view in views.items()
        }

    def handles(self) -> list[Handle]:
        """Handles of this rank's memory, for `open` on the others."""
        return [memory.handle() for memory in self._owned]

    def open(self, by_rank: Sequence[Sequence[Handle]]) -> None:
        """Map the memory of all ranks; all of them must have their parts by now."""
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
        """Make a layer's values present for later launches, and read those of `ahead` meanwhile;
        other layers' are dropped. Beyond the ends there is no layer ahead."""
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
        """Drop all layers, and wait until nothing is read any more: owners may write then."""
        for number in [*self._present]:
            self._let_go(number)
        self.wait()

    def wait(self) -> None:
        """Wait until all launched work is done, such as writes that other ranks will read."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def read(self, name: str, into: Tensor, start: int = 0) -> None:
        """Copy a parameter's values, of all ranks' parts, to a contiguous tensor: as many as it
        has, from element `start` of the flattened parameter on."""
        flat = into.view(-1)
        for parts, source in zip(self._by_rank, self._sources[0], strict=True):
            for part in parts:
                first = max(part.start, start)
                size = min(part.stop, start + len(flat)) - first
                if part.parameter == name and size > 0:
                    own = source[part.name][first - part.start :][:size]
                    flat[first - start :][:size].copy_(own, non_blocking=True)

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
        """Returns the layer's parameters, now without values or memory."""
        found: dict[str, _Parameter] = {}
        for name, parameter in layer.items():
            parameter.data = torch.empty(parameter.shape, dtype=self._dtype, device=self._device)
            storage = parameter.untyped_storage()
            # The tensor has its own version counter, so that autograd does not see writes through
            # it.
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
        """Allocates in the order of compute, and copies once compute is that far."""
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
        """Copies own parts first, then the next rank's, and so on: otherwise all ranks would read
        from one at once."""
        for distance in range(len(sources)):
            rank = (self._rank + distance) % len(sources)
            for parameter in layer.values():
                for target, (owner, name) in zip(parameter.targets, parameter.parts, strict=True):
                    if owner == rank:
                        target.copy_(sources[rank][name], non_blocking=True)

    def _let_go(self, number: int) -> None:
        """Free the layer's memory, which later compute may overwrite."""
        event = self._present.pop(number)
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        for parameter in self._layers[number].values():
            parameter.storage.resize_(0)
