"""CUDA kernels of ours: compiled at first use, kept on disk, launched through cuda-bindings.

Importing this imports no CUDA; `availability` says why a machine cannot run them.
"""

from ratoon_kernels.jit.calls import CudaCallError, KernelCompileError
from ratoon_kernels.jit.driver import Kernel, load, memset_zero
from ratoon_kernels.jit.spec import KernelSpec, Param
from ratoon_kernels.jit.tma import TensorMap, head_slab_map, head_tile_map, tensor_map

__all__ = [
    "CudaCallError",
    "Kernel",
    "KernelCompileError",
    "KernelSpec",
    "Param",
    "TensorMap",
    "head_slab_map",
    "head_tile_map",
    "load",
    "memset_zero",
    "tensor_map",
]
