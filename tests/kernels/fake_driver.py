"""A CUDA driver that records what it is asked: the layer above it, tested without a GPU."""

from __future__ import annotations

import ctypes
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from ratoon_kernels.jit.calls import driver, primary_context

CONTEXT, OTHER_CONTEXT, FUNCTION = 11, 12, 21
OK = (0,)
INVALID = 1


class _Names:
    """An enum whose members are their own names."""

    def __getattr__(self, name: str) -> str:
        return name


@dataclass
class FakeDriver:
    """The module `cuda.bindings.driver`, with one GPU whose kernels have the given parameters.

    Attributes:
        param_sizes_bytes: Sizes of a kernel's parameters.
        launch_status: What a launch returns.
        contexts: The thread's stack of contexts.
        asked: The calls that queue or set something: name, current context, arguments.
        launched_values: The bytes of each parameter of the last launch.
    """

    param_sizes_bytes: tuple[int, ...] = ()
    launch_status: int = 0
    contexts: list[int] = field(default_factory=lambda: [CONTEXT])
    asked: list[tuple[Any, ...]] = field(default_factory=list)
    launched_values: list[bytes] = field(default_factory=list)

    CUfunction_attribute = _Names()
    CUtensorMapDataType = CUtensorMapInterleave = CUtensorMapSwizzle = _Names()
    CUtensorMapL2promotion = CUtensorMapFloatOOBfill = _Names()
    cuuint64_t = cuuint32_t = int

    def cuInit(self, flags: int) -> tuple[int]:
        return OK

    def cuDeviceGet(self, index: int) -> tuple[int, int]:
        return 0, index

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, int]:
        return 0, CONTEXT

    def cuGetErrorName(self, status: int) -> tuple[int, bytes]:
        return 0, f"CUDA_ERROR_{status}".encode()

    def cuGetErrorString(self, status: int) -> tuple[int, bytes]:
        return 0, b"words"

    def cuCtxGetCurrent(self) -> tuple[int, int]:
        return 0, self.contexts[-1]

    def cuCtxPushCurrent(self, handle: int) -> tuple[int]:
        self.contexts.append(handle)
        return OK

    def cuCtxPopCurrent(self) -> tuple[int, int]:
        return 0, self.contexts.pop()

    def cuModuleLoadData(self, cubin: bytes) -> tuple[int, bytes]:
        return 0, cubin

    def cuModuleGetFunction(self, module: bytes, entry: bytes) -> tuple[int, int]:
        return 0, FUNCTION

    def cuFuncLoad(self, function: int) -> tuple[int]:
        return OK

    def cuFuncGetParamInfo(self, function: int, index: int) -> tuple[int, int, int]:
        if index < len(self.param_sizes_bytes):
            return 0, 0, self.param_sizes_bytes[index]
        return INVALID, 0, 0

    def cuFuncSetAttribute(self, *asked: Any) -> tuple[int]:
        self.asked.append(("cuFuncSetAttribute", self.contexts[-1], *asked))
        return OK

    def cuLaunchKernel(self, *asked: Any) -> tuple[int]:
        *rest, params, extra = asked
        self.asked.append(("cuLaunchKernel", self.contexts[-1], *rest, extra))
        num_params = len(self.param_sizes_bytes)
        addresses = (ctypes.c_void_p * num_params).from_address(params)
        self.launched_values = [
            ctypes.string_at(address, size)
            for address, size in zip(addresses, self.param_sizes_bytes, strict=True)
        ]
        return (self.launch_status,)

    def cuTensorMapEncodeTiled(self, *asked: Any) -> tuple[int, Any]:
        """The map's bytes are the count of calls."""
        self.asked.append(asked)
        kept = ctypes.create_string_buffer(bytes([len(self.asked)]) * 128)
        return 0, types.SimpleNamespace(kept=kept, getPtr=lambda: ctypes.addressof(kept))


@contextmanager
def installed() -> Iterator[FakeDriver]:
    """Has the fake in the place of the module meanwhile."""
    fake = FakeDriver()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cuda.bindings.driver", fake)
        patch.setattr(torch.cuda, "init", lambda: None)
        _forget()
        yield fake
    _forget()


def _forget() -> None:
    driver.cache_clear()
    primary_context.cache_clear()
