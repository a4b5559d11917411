"""Memory of the host for the copy of the weights that is published; pinned for a GPU."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, cast

import numpy as np
import psutil
import torch
from torch import Tensor

from ratoon.errors import ErrorCode, RatoonError

_PAGE_BYTES = 4096
_NUM_THREADS = 8


def _check(num_bytes: int) -> None:
    free_bytes = psutil.virtual_memory().available
    if num_bytes > free_bytes:
        message = (
            f"the copy of the weights that is published takes {num_bytes / 2**30:.1f} GiB of the "
            f"host's memory, of which {free_bytes / 2**30:.1f} GiB are free"
        )
        raise RatoonError(ErrorCode.RESOURCE_EXHAUSTED, message)


def host_tensors(
    shapes: Mapping[str, torch.Size], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Uninitialized tensors by name, one after the other in memory that `device` copies to.

    Raises RESOURCE_EXHAUSTED if the host has not enough.
    """
    sizes = [shape.numel() for shape in shapes.values()]
    _check(sum(sizes) * dtype.itemsize)
    if device.type == "cuda":
        memory = _pinned(sum(sizes) * dtype.itemsize).view(dtype)
    else:
        memory = torch.empty(sum(sizes), dtype=dtype)
    parts = zip(shapes.items(), memory.split(sizes), strict=True)
    return {name: part.view(shape) for (name, shape), part in parts}


def _pinned(num_bytes: int) -> Tensor:
    """uint8 [num_bytes] that the GPU copies to.

    torch pins 2 GiB a second, with one thread, and rounds up to a power of two. Here threads touch
    the pages first, large ones if the system has them, and CUDA then only registers them: 8 GiB/s.
    """
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, dtype=np.uint8)
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        for part in np.array_split(memory[::_PAGE_BYTES], _NUM_THREADS):
            threads.submit(part.fill, 0)
    cuda, address = cast("Any", torch.cuda).cudart(), memory.ctypes.data
    torch.cuda.check_error(cuda.cudaHostRegister(address, num_bytes, 0))

    def unregister() -> None:
        torch.cuda.synchronize()
        cuda.cudaHostUnregister(address)

    # Unregister before the pages are freed, because a copy may still target them. At its end the
    # process loses both.
    weakref.finalize(pages, unregister).atexit = False
    return torch.from_numpy(memory)
