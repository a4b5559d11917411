"""Moves activations to pinned host memory between forward and backward.

Any number of forwards may be open, such as the stages of a stream: a held tensor lives as long as
the graph that saved it, whether that ran backward or was dropped. The bits do not change. The host
waits for no copy, and compute only for copies that it needs. A running forward or backward has at
most two layers on the device.

Device memory is allocated and freed in the order of the compute stream: if a copy is the last user,
compute waits for it. (If the copies' stream owned the memory, it would be free again only once the
host saw the copies done, and the host is a whole forward ahead.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

# Smaller tensors are not worth a copy.
MIN_BYTES = 2**20
# Chunks of host memory; a layer's last one may be partly empty. Each costs the launching thread
# some 40 us: with chunks of 4 MiB it took longer over the first layer of 30B than the GPU did.
CHUNK_BYTES = 16 * 2**20
# Chunks allocated at a time: a power of two, because torch would round other sizes up.
_SLAB_CHUNKS = 4


@dataclass(slots=True, kw_only=True)
class _Saved:
    """Bytes of one tensor, which are on the device until they have left, and again once they are
    fetched."""

    # Pieces of the host's chunks, in order.
    pieces: list[Tensor]
    on_device: Tensor | None
    # Event after the last copy, to or from the host.
    copied: torch.cuda.Event | None


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class _Layer:
    """Host copies of one layer of one forward. `below`: the layer that runs backward next."""

    below: _Layer | None
    saved: list[_Saved] = field(default_factory=list[_Saved])
    chunks: list[Tensor] = field(default_factory=list[Tensor])
    # Rest of the last chunk.
    rest: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packed:
    """A saved tensor, as a view of bytes. Only autograd owns it: nothing else keeps a layer
    alive."""

    layer: _Layer
    saved: _Saved
    dtype: torch.dtype
    shape: torch.Size


class HostOffload:
    """Owns the copies of one decoder's activations and the host memory for them.

    The memory is as large as the most that was held at one time, up to a chunk per layer and a
    slab; fetched tensors leave their room to the next ones. On a CPU the copies are plain ones, for
    tests.
    """

    def __init__(
        self, device: torch.device, min_bytes: int = MIN_BYTES, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        # Bytes held on the host for later backwards, and all bytes ever allocated there.
        self.held_bytes = 0
        self.room_bytes = 0
        # The device is named as tensors name it: `cuda` without a number equals none of their
        # devices.
        self._device = torch.empty(0, device=device).device
        self._min_bytes = min_bytes
        self._chunk_bytes = chunk_bytes
        # One stream serves both directions: a chunk is refilled after its content has left.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._spare: list[Tensor] = []
        self._last: weakref.ref[_Layer] | None = None
        # Tensors of the previous layer, which has had the time of one layer to leave.
        self._leaving: list[_Saved] = []

    @contextmanager
    def layer(self, index: int, resident: Iterable[Tensor], *, is_last: bool) -> Iterator[None]:
        """Within the context, saved tensors go to the host, except `resident` ones, which stay
        anyway.

        Layers of a forward come one after the other, from 0 on. `is_last`: no other layer follows;
        if one does, call `end` behind it.
        """
        stays = {tensor.untyped_storage().data_ptr() for tensor in resident}
        known: dict[tuple[int, int], _Saved] = {}
        layer = _Layer(below=self._last() if self._last is not None and index > 0 else None)
        weakref.finalize(layer, self._let_go, layer.saved, layer.chunks).atexit = False
        self._last = weakref.ref(layer)

        def pack(tensor: Tensor) -> Tensor | _Packed:
            size = tensor.numel() * tensor.element_size()
            is_other = tensor.device != self._device
            is_other = is_other or tensor.untyped_storage().data_ptr() in stays
            if is_other or size < self._min_bytes or not tensor.is_contiguous():
                return tensor
            # The key is unique: each tensor stays on the device for longer than this layer.
            key = (tensor.data_ptr(), size)
            if key not in known:
                known[key] = self._send(tensor, layer)
            return _Packed(layer=layer, saved=known[key], dtype=tensor.dtype, shape=tensor.shape)

        def unpack(packed: Tensor | _Packed) -> Tensor:
            return packed if isinstance(packed, Tensor) else self._receive(packed)

        with saved_tensors_hooks(pack, unpack):
            yield
        self._leave(self._leaving)
        self._leaving = layer.saved
        if is_last:
            self.end()

    def end(self) -> None:
        """Ends a forward: none of its held tensors is on the device any more."""
        self._leave(self._leaving)
        self._leaving, self._last = [], None

    def fetcher(self) -> Callable[[object], None]:
        """Returns a hook that fetches the newest layer, if its forward still lives."""
        newest = self._last

        def fetch(_: object) -> None:
            layer = None if newest is None else newest()
            for saved in () if layer is None else layer.saved:
                self._fetch(saved)

        return fetch

    def _send(self, tensor: Tensor, layer: _Layer) -> _Saved:
        whole = tensor.detach().view(-1).view(torch.uint8)
        pieces = self._take(layer, len(whole))
        parts = whole.split([len(piece) for piece in pieces])
        copied = self._copy(pieces, parts)
        saved = _Saved(pieces=pieces, on_device=whole, copied=copied)
        layer.saved.append(saved)
        self.held_bytes += len(whole)
        return saved

    def _receive(self, packed: _Packed) -> Tensor:
        """Returns the tensor on the device; the layer below starts to come."""
        for layer in (packed.layer, packed.layer.below):
            for saved in () if layer is None else layer.saved:
                self._fetch(saved)
        self._wait(packed.saved)
        on_device = packed.saved.on_device
        assert on_device is not None
        return on_device.view(packed.dtype).view(packed.shape)

    def _fetch(self, saved: _Saved) -> None:
        if saved.on_device is not None:
            return
        sizes = [len(piece) for piece in saved.pieces]
        whole = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        saved.copied = self._copy(whole.split(sizes), saved.pieces)
        saved.on_device = whole

    def _leave(self, layer: list[_Saved]) -> None:
        """Free the tensors' device memory, which later compute may overwrite."""
        for saved in layer:
            if saved.on_device is not None:
                self._wait(saved)
                saved.on_device = None

    def _let_go(self, layer: list[_Saved], chunks: list[Tensor]) -> None:
        """Frees a layer's chunks once its graph is gone."""
        self._leave(layer)
        self.held_bytes -= sum(len(piece) for saved in layer for piece in saved.pieces)
        self._spare += chunks

    def _copy(
        self, targets: Iterable[Tensor], sources: Iterable[Tensor]
    ) -> torch.cuda.Event | None:
        """Copies data that compute has produced, or to memory that it has freed by now."""
        pairs = zip(targets, sources, strict=True)
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._stream)
            return copied

    def _wait(self, saved: _Saved) -> None:
        if saved.copied is not None:
            torch.cuda.current_stream(self._device).wait_event(saved.copied)

    def _take(self, layer: _Layer, size: int) -> list[Tensor]:
        """Takes room for `size` bytes, starting where the layer's last ones end."""
        pieces: list[Tensor] = []
        while size > 0:
            if not len(layer.rest):
                layer.rest = self._chunk()
                layer.chunks.append(layer.rest)
            pieces.append(layer.rest[:size])
            layer.rest = layer.rest[size:]
            size -= len(pieces[-1])
        return pieces

    def _chunk(self) -> Tensor:
        if not self._spare:
            size = _SLAB_CHUNKS * self._chunk_bytes
            slab = torch.empty(size, dtype=torch.uint8, pin_memory=self._stream is not None)
            self._spare += slab.split(self._chunk_bytes)
            self.room_bytes += size
        return self._spare.pop()
