"""Memory of a device that other processes of the same node map: its owner writes, they read.

On a CPU it is anonymous (memfd_create(2)), and others find it among the owner's descriptors
(proc(5)): it has no name that could be left over, and goes with the last process that maps it. On a
GPU it goes by CUDA's handles for other processes.
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

# Where the device is among the arguments of what torch makes of a handle.
_DEVICE_ARGUMENT = 6
_EXPANDABLE = "expandable_segments"


@dataclass(frozen=True, slots=True)
class Handle:
    """Of one process's memory, for another: `opens(*arguments)` maps it."""

    opens: Callable[..., Tensor]
    arguments: tuple[Any, ...]


class SharedMemory:
    """Owns elements of one dtype, [n], that other processes may read while this one lives."""

    def __init__(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> None:
        # At least one, as there is no mapping of nothing.
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
        """To be opened while this process lives."""
        if self._descriptor is None:
            from torch.multiprocessing.reductions import reduce_tensor

            opens, arguments = reduce_tensor(self.tensor)
            # What is there by now: readers need no event of this process.
            torch.cuda.synchronize(self.tensor.device)
            return Handle(opens, (*arguments[:-1], False))
        tensor = self.tensor
        return Handle(_map, (os.getpid(), self._descriptor, tensor.numel(), tensor.dtype))


def open_memory(handle: Handle, device: torch.device) -> Tensor:
    """Another process's memory, [n], on this process's `device`, which copies from it."""
    arguments = list(handle.arguments)
    if device.type == "cuda":
        # Mapped by the device that reads: the owner's would have to be set up here as well.
        arguments[_DEVICE_ARGUMENT] = torch.empty(0, device=device).device.index
    return handle.opens(*arguments)


def _map(process: int, descriptor: int, num_elements: int, dtype: torch.dtype) -> Tensor:
    path = f"/proc/{process}/fd/{descriptor}"
    return torch.from_file(path, shared=True, size=num_elements, dtype=dtype)


def _allocate(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """By cudaMalloc alone: what grows in place (expandable segments) has no handle that any process
    of the node may open."""
    is_expandable = has_expandable_segments()
    configure = cast("Any", torch._C)._accelerator_setAllocatorSettings
    if is_expandable:
        configure(f"{_EXPANDABLE}:False")
    try:
        return torch.empty(num_elements, dtype=dtype, device=device)
    finally:
        if is_expandable:
            configure(f"{_EXPANDABLE}:True")
