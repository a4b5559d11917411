"""Calls of the CUDA driver and of NVRTC, checked.

No status but success passes unnoticed. cuda-bindings is imported here at the first call, so that
importing this package needs neither CUDA nor its bindings.
"""

import functools
import importlib
from types import ModuleType
from typing import Any, Final

from ratoon_kernels.jit.errors import CudaCallError

_DRIVER: Final = "cuda.bindings.driver"


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
