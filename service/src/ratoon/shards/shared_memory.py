"""Device memory that other processes of the same node map: its owner writes, they read.

On a CPU the memory is anonymous (memfd_create(2)), and others find it among the owner's descriptors
(proc(5)): it has no name that could be left over, and is freed with the last process that maps it.
On a GPU it is shared by CUDA's IPC handles.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ratoon.config import has_expandable_segments

# Index of the device among the arguments of torch's handle.
_DEVICE_ARGUMENT = 6
_EXPANDABLE = "expandable_segments"


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
