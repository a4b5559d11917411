"""Activations that wait in pinned host memory between forward and backward.

Enters what autograd saves of a layer, leaves it again when the backward asks. Invariant: the values
are the same bits, and compute never waits for a copy that could have been under way: a tensor
leaves as soon as it is made, and comes back while the layer above runs backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

# Smaller ones are not worth a copy.
MIN_BYTES = 2**20


@dataclass(slots=True, kw_only=True)
class _Held:
    """Bytes on the host, and once they are fetched, on the device."""

    host: Tensor
    layer: int
    fetched: Tensor | None = None
    is_there: torch.cuda.Event | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packed:
    """A saved tensor, as a view of bytes."""

    held: _Held
    dtype: torch.dtype
    shape: torch.Size


class HostOffload:
    """Owns the copies of one decoder's activations and the host memory for them.

    One forward and its backward at a time. On a CPU the copies are plain ones, for tests.
    """

    def __init__(self, device: torch.device, min_bytes: int = MIN_BYTES) -> None:
        self._device = device
        self._min_bytes = min_bytes
        # One stream for both directions: a buffer is filled anew after what was in it has left.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._held: dict[int, list[_Held]] = {}
        self._spare: dict[int, list[Tensor]] = {}

    @property
    def held_bytes(self) -> int:
        """On the host, for a backward to come."""
        return sum(one.host.numel() for held in self._held.values() for one in held)

    def begin(self) -> None:
        """A new forward: what an earlier one left, whose backward never ran, is let go."""
        self._let_go(above=-1)

    def layer(self, index: int, resident: Iterable[Tensor]) -> AbstractContextManager[Any]:
        """Inside, what is saved goes to the host, but for `resident`: it is there anyway."""
        stays = {tensor.untyped_storage().data_ptr() for tensor in resident}
        known: dict[tuple[int, int], _Held] = {}
        self._held[index] = []

        def pack(tensor: Tensor) -> Tensor | _Packed:
            size = tensor.numel() * tensor.element_size()
            is_other = tensor.device != self._device
            is_other = is_other or tensor.untyped_storage().data_ptr() in stays
            if is_other or size < self._min_bytes or not tensor.is_contiguous():
                return tensor
            key = (tensor.data_ptr(), size)
            if key not in known:
                known[key] = self._send(tensor, index, size)
            return _Packed(held=known[key], dtype=tensor.dtype, shape=tensor.shape)

        def unpack(packed: Tensor | _Packed) -> Tensor:
            return packed if isinstance(packed, Tensor) else self._receive(packed)

        return saved_tensors_hooks(pack, unpack)

    def _send(self, tensor: Tensor, index: int, size: int) -> _Held:
        spare = self._spare.get(size)
        host = spare.pop() if spare else self._allocate(size)
        num_bytes = tensor.detach().view(-1).view(torch.uint8)
        if self._stream is None:
            host.copy_(num_bytes)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                host.copy_(num_bytes, non_blocking=True)
            tensor.record_stream(self._stream)
        held = _Held(host=host, layer=index)
        self._held[index].append(held)
        return held

    def _receive(self, packed: _Packed) -> Tensor:
        """The tensor on the device; the layer below starts to come, those above are let go."""
        held = packed.held
        self._let_go(above=held.layer)
        self._fetch(held)
        below = max((index for index in self._held if index < held.layer), default=None)
        if below is not None:
            for one in self._held[below]:
                self._fetch(one)
        fetched = held.fetched
        assert fetched is not None
        if held.is_there is not None:
            compute = torch.cuda.current_stream(self._device)
            compute.wait_event(held.is_there)
            fetched.record_stream(compute)
        return fetched.view(packed.dtype).view(packed.shape)

    def _fetch(self, held: _Held) -> None:
        if held.fetched is not None:
            return
        if self._stream is None:
            held.fetched = held.host.clone()
            return
        with torch.cuda.stream(self._stream):
            held.fetched = held.host.to(self._device, non_blocking=True)
            held.is_there = torch.cuda.Event()
            held.is_there.record(self._stream)

    def _let_go(self, *, above: int) -> None:
        for index in [index for index in self._held if index > above]:
            for held in self._held.pop(index):
                held.fetched = None
                self._spare.setdefault(held.host.numel(), []).append(held.host)

    def _allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._stream is not None)
