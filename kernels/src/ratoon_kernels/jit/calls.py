"""Checked calls of the CUDA driver and of NVRTC, and the driver context that torch works in.

No status but success passes unnoticed; an error names what was attempted and carries CUDA's own
words for what went wrong. A driver call inside `Context.entered` runs on that GPU and leaves the
thread's current context as it was. cuda-bindings is imported here at the first call, so that
importing this package needs neither CUDA nor its bindings.
"""

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import torch

_DRIVER: Final = "cuda.bindings.driver"


class KernelCompileError(RuntimeError):
    """NVRTC refused a kernel.

    Attributes:
        kernel: Name of the spec.
        log: The compiler's messages.
    """

    def __init__(self, kernel: str, log: str) -> None:
        super().__init__(f"kernel {kernel} does not compile:\n{log}")
        self.kernel = kernel
        self.log = log


class CudaCallError(RuntimeError):
    """A call of the CUDA driver or of NVRTC failed.

    Attributes:
        call: The function's name, and what it was called for.
        code: Its status code.
        description: The status in CUDA's words.
    """

    def __init__(self, call: str, code: int, description: str) -> None:
        super().__init__(f"{call} failed with {code}: {description}")
        self.call = call
        self.code = code
        self.description = description


@functools.cache
def driver() -> ModuleType:
    """Returns `cuda.bindings.driver`, initialised.

    Raises:
        ImportError: cuda-bindings is not installed.
        CudaCallError: The driver refuses, as it does without a GPU.
        RuntimeError: There is no libcuda on this machine.
    """
    module = importlib.import_module(_DRIVER)
    check_driver("cuInit", module.cuInit(0))
    return module


def nvrtc() -> ModuleType:
    """Returns `cuda.bindings.nvrtc`, which needs no GPU; its library loads at the first call.

    Raises:
        ImportError: cuda-bindings is not installed.
    """
    return importlib.import_module("cuda.bindings.nvrtc")


def check_driver(call: str, result: tuple[Any, ...]) -> Any:
    """Returns the values of a driver call: None, the one value, or a tuple of them.

    Args:
        call: What was called, for the error.
        result: Status and values, as cuda-bindings returns them.

    Raises:
        CudaCallError: The status is not success.
    """
    status = result[0]
    if status != 0:
        words = importlib.import_module(_DRIVER)
        name, text = (
            found.decode() if error == 0 and found else "unknown"
            for error, found in (words.cuGetErrorName(status), words.cuGetErrorString(status))
        )
        raise CudaCallError(call, int(status), f"{name}: {text}")
    return _values(result)


def check_nvrtc(call: str, result: tuple[Any, ...]) -> Any:
    """Checks the result of a call of NVRTC."""
    status = result[0]
    if status != 0:
        raise CudaCallError(call, int(status), nvrtc().nvrtcGetErrorString(status)[1].decode())
    return _values(result)


def _values(result: tuple[Any, ...]) -> Any:
    if len(result) == 2:
        return result[1]
    return result[1:] or None


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
