"""Kernels on a GPU: loaded once, launched often.

Arguments reach the kernel in the types that its spec declares and its cubin has, or the launch is
an error; nothing here allocates memory of the GPU or waits for it.
"""

import ctypes
import functools
import struct
import threading
from typing import Any, Final

from torch import Tensor

from ratoon_kernels.jit.cache import get_cubin
from ratoon_kernels.jit.calls import check_driver, driver, primary_context
from ratoon_kernels.jit.spec import KernelSpec, Param, Parameter, layout_params
from ratoon_kernels.jit.tma import TensorMap

Size = tuple[int, int, int]
Argument = Tensor | TensorMap | int | float

_NO_CLUSTER: Final = (1, 1, 1)
# Shared memory that a block may use without requesting more.
_DEFAULT_SHARED_BYTES: Final = 48 * 1024


@functools.cache
def load(spec: KernelSpec, device_index: int) -> "Kernel":
    """Returns a kernel on one GPU: the same object for the same spec, loaded at the first call.

    The first call may compile for seconds, and must not happen while a CUDA graph is captured.

    Raises:
        KernelCompileError: The kernel has an error.
        CudaCallError: The driver refuses the cubin, as it does on another architecture.
        ImportError: cuda-bindings is not installed.
        RuntimeError: There is no CUDA, or no NVRTC where one is needed.
    """
    return Kernel(spec, device_index, get_cubin(spec))


class Kernel:
    """One loaded kernel; it stays loaded until the process ends."""

    def __init__(self, spec: KernelSpec, device_index: int, cubin: bytes) -> None:
        self.spec = spec
        self.device_index = device_index
        self._context = primary_context(device_index)
        with self._context.entered():
            self._function = _load_function(spec, cubin)
        self._limit_lock = threading.Lock()
        self._shared_limit_bytes = _DEFAULT_SHARED_BYTES
        self._layout = layout_params(spec.params)
        self._format = struct.Struct(self._layout.format)
        # Parameter buffers that no launch is using: taken and given back one at a time, so that
        # launches from several threads never write into the same one.
        self._free_buffers: list[ctypes.Array[ctypes.c_char]] = []

    def launch(
        self,
        *,
        grid: Size,
        block: int,
        shared_bytes: int,
        stream: int,
        args: tuple[Argument, ...],
        cluster: Size = _NO_CLUSTER,
    ) -> None:
        """Queues the kernel; returns before it runs.

        Args:
            grid: Blocks in x, y, z.
            block: Threads of a block.
            shared_bytes: Dynamic shared memory of a block.
            stream: A stream of the kernel's GPU, as `torch.cuda.Stream.cuda_stream`.
            args: The values, in the order of `spec.params`; those of a struct's fields one by one,
                in their places. A tensor is passed as its address: its shape and strides are not,
                and the caller keeps it alive as for any torch operator.
            cluster: Blocks of a cluster in x, y, z; each divides the grid's.

        Raises:
            TypeError: Number or types of the arguments are not the spec's.
            CudaCallError: The driver refuses the launch, or an earlier kernel failed.
        """
        try:
            buffer = self._free_buffers.pop()
        except IndexError:
            buffer = self._new_buffer()
        values = [self._address(arg) if isinstance(arg, Tensor) else arg for arg in args]
        try:
            self._format.pack_into(buffer, 8 * len(self.spec.params), *values)
        except (struct.error, OverflowError) as error:
            got = ", ".join(type(arg).__name__ for arg in args)
            raise TypeError(
                f"{self.spec.name} takes {_names(self.spec.params)}, got ({got}): {error}"
            ) from error
        if shared_bytes > self._shared_limit_bytes:
            self._allow_shared(shared_bytes)
        if self._context.is_current():
            status = self._queue(grid, block, cluster, shared_bytes, stream, buffer)
        else:
            with self._context.entered():
                status = self._queue(grid, block, cluster, shared_bytes, stream, buffer)
        # The driver has copied the parameters.
        self._free_buffers.append(buffer)
        if status[0] != 0:
            launched = f"{grid=} {block=} {cluster=} {shared_bytes=}"
            check_driver(f"launch of {self.spec.name} ({launched})", status)

    def _allow_shared(self, size_bytes: int) -> None:
        attribute = driver().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        with self._limit_lock, self._context.entered():
            if size_bytes > self._shared_limit_bytes:
                check_driver(
                    f"{size_bytes} bytes of shared memory for {self.spec.name}",
                    driver().cuFuncSetAttribute(self._function, attribute, size_bytes),
                )
                self._shared_limit_bytes = size_bytes

    def _address(self, tensor: Tensor) -> int:
        index = tensor.get_device()
        assert index == self.device_index, f"{self.spec.name}: tensor of device {index}"
        return tensor.data_ptr()

    def _new_buffer(self) -> "ctypes.Array[ctypes.c_char]":
        """Returns what the driver reads parameters from: their addresses, then room for them."""
        num_params = len(self.spec.params)
        buffer = ctypes.create_string_buffer(8 * num_params + self._format.size)
        values = ctypes.addressof(buffer) + 8 * num_params
        addresses = [values + offset for offset in self._layout.offsets_bytes]
        struct.pack_into(f"<{num_params}Q", buffer, 0, *addresses)
        return buffer

    def _queue(
        self, grid: Size, block: int, cluster: Size, shared_bytes: int, stream: int, buffer: Any
    ) -> tuple[Any, ...]:
        params = ctypes.addressof(buffer)
        if cluster == _NO_CLUSTER:
            return driver().cuLaunchKernel(
                self._function, *grid, block, 1, 1, shared_bytes, stream, params, 0
            )
        config = _launch_config(grid, block, cluster, shared_bytes, stream)
        return driver().cuLaunchKernelEx(config, self._function, params, 0)


def memset_zero(tensor: Tensor, stream: int) -> None:
    """Queues the zeroing of a contiguous tensor on a GPU.

    Args:
        tensor: Any dtype and shape.
        stream: A stream of the tensor's GPU.

    Raises:
        CudaCallError: The driver refuses, or an earlier kernel failed.
    """
    assert tensor.is_cuda, f"tensor of device {tensor.device}"
    assert tensor.is_contiguous(), f"strides {tensor.stride()} of shape {tuple(tensor.shape)}"
    context = primary_context(tensor.get_device())
    size_bytes = tensor.numel() * tensor.element_size()
    if size_bytes == 0:
        return
    address = tensor.data_ptr()
    if context.is_current():
        status = _queue_zeros(address, size_bytes, stream)
    else:
        with context.entered():
            status = _queue_zeros(address, size_bytes, stream)
    check_driver(f"memset of {size_bytes} bytes", status)


def _queue_zeros(address: int, size_bytes: int, stream: int) -> tuple[Any, ...]:
    if address % 4 == 0 and size_bytes % 4 == 0:
        return driver().cuMemsetD32Async(address, 0, size_bytes // 4, stream)
    return driver().cuMemsetD8Async(address, 0, size_bytes, stream)


def _load_function(spec: KernelSpec, cubin: bytes) -> Any:
    cuda = driver()
    module = check_driver(f"cuModuleLoadData of {spec.name}", cuda.cuModuleLoadData(cubin))
    function = check_driver(
        f"cuModuleGetFunction of {spec.name}", cuda.cuModuleGetFunction(module, spec.entry.encode())
    )
    _check_params(spec, function)
    # Else a lazy driver loads it at the first launch, which may be inside a graph's capture.
    check_driver(f"cuFuncLoad of {spec.name}", cuda.cuFuncLoad(function))
    return function


def _check_params(spec: KernelSpec, function: Any) -> None:
    """Compares the sizes of the spec's parameters with those of the cubin.

    That the cubin has no more of them is checked where kernels are built: to ask for one past the
    last is an error of the driver, which checkers of memory report.
    """
    for index, size_bytes in enumerate(layout_params(spec.params).sizes_bytes):
        call = f"parameter {index} of {spec.name}"
        _, found = check_driver(call, driver().cuFuncGetParamInfo(function, index))
        assert found == size_bytes, f"{call} has {found} bytes, its spec {size_bytes}"


def _names(params: tuple[Parameter, ...]) -> str:
    names = (param.name if isinstance(param, Param) else _names(param) for param in params)
    return f"({', '.join(names)})"


@functools.lru_cache(maxsize=1024)
def _launch_config(grid: Size, block: int, cluster: Size, shared_bytes: int, stream: int) -> Any:
    cuda = driver()
    attribute = cuda.CUlaunchAttribute()
    attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    value = cuda.CUlaunchAttributeValue()
    value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = cluster
    attribute.value = value
    config = cuda.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = cuda.CUstream(stream)
    config.attrs = [attribute]
    config.numAttrs = 1
    return config
