"""The driver context that torch works in on one GPU.

A driver call inside `entered` runs on that GPU and leaves the thread's current context as it was.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ratoon_kernels.jit.calls import check_driver, driver


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The primary context of one GPU: torch's own, kept for the life of the process.

    Attributes:
        handle: Its CUcontext.
        address: The context as a number, to compare with the thread's current one.
    """

    handle: Any
    address: int

    def is_current(self) -> bool:
        """Returns whether this thread's driver calls go to this context."""
        status, current = driver().cuCtxGetCurrent()
        return status == 0 and int(current) == self.address

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Makes this the thread's current context meanwhile."""
        check_driver("cuCtxPushCurrent", driver().cuCtxPushCurrent(self.handle))
        try:
            yield
        finally:
            check_driver("cuCtxPopCurrent", driver().cuCtxPopCurrent())


@functools.cache
def primary_context(device_index: int) -> Context:
    """Returns the context of a GPU, by torch's index of it.

    Raises:
        CudaCallError: There is no such device.
        RuntimeError: torch has no CUDA.
    """
    torch.cuda.init()
    device = check_driver("cuDeviceGet", driver().cuDeviceGet(device_index))
    handle = check_driver("cuDevicePrimaryCtxRetain", driver().cuDevicePrimaryCtxRetain(device))
    return Context(handle=handle, address=int(handle))
