"""The small kernels that the CUDA layer is tested with, and the tools that look into a cubin."""

from __future__ import annotations

from pathlib import Path

from ratoon_kernels.jit import KernelSpec, Param
from ratoon_kernels.jit.spec import Parameter

CSRC = Path(__file__).parent / "csrc"


def kernel(entry: str, params: tuple[Parameter, ...], **defines: int) -> KernelSpec:
    """A kernel of csrc, in the file of its own name."""
    return KernelSpec(
        source=str(CSRC / f"{entry}.cu"),
        entry=entry,
        defines=tuple(sorted(defines.items())),
        params=params,
    )


def tile_copy(*, head_dim: int, rows: int, is_bf16: bool) -> KernelSpec:
    """Boxes of a tensor map to floats: map, out, first token, first element of out, scale."""
    params = (Param.TENSOR_MAP, Param.POINTER, Param.INT32, Param.INT64, Param.FLOAT32)
    return kernel("tile_copy", params, HEAD_DIM=head_dim, IS_BF16=int(is_bf16), ROWS=rows)


TILE_COPY = tile_copy(head_dim=128, rows=64, is_bf16=True)
CLUSTER_SUM = kernel("cluster_sum", (Param.POINTER,))
FIELDS = (Param.INT32, Param.INT64, Param.FLOAT32, Param.POINTER, Param.INT32)
SCALARS = kernel("scalars", (Param.INT32, FIELDS, Param.INT64, Param.FLOAT32))
SPILLS = kernel("spills", (Param.POINTER, Param.INT32))


def warpgroup_mma(*, is_serialized: bool) -> KernelSpec:
    """Two HGMMA, which the compiler must serialize or need not."""
    params = (Param.POINTER, Param.INT64, Param.INT64)
    return kernel("warpgroup_mma", params, IS_SERIALIZED=int(is_serialized))
