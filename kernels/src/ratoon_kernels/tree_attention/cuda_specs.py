"""The CUDA kernels of tree attention: their sources, variants and parameters.

Every kernel that a launcher loads is listed in `SPECS`, so that all of them are compiled ahead and
checked without a GPU.
"""

from itertools import product
from typing import Final

import torch

from ratoon_kernels.jit import KernelSpec, Param

# Sizes of queries and keys, and of values and outputs, that there are kernels for.
HEAD_DIMS: Final = ((64, 64), (128, 128), (256, 256), (192, 128))
DTYPES: Final = (torch.bfloat16, torch.float16)

# Shared memory that a block of these kernels may use: all of an SM's, less the driver's part.
SHARED_BYTES: Final = 227 * 1024
NUM_THREADS: Final = 384
SMALL_THREADS: Final = 256
# Rows of a query tile that one warpgroup writes.
STORE_ROWS: Final = 64
# Rows of keys and values in one buffer of a kernel, by the size of queries and keys: a tile, or
# half of one where shared memory or registers have no room for a whole one.
FORWARD_KEYS: Final = {64: 128, 128: 128, 192: 128, 256: 64}
BACKWARD_KEYS: Final = {64: 128, 128: 128, 192: 128, 256: 64}
QUERY_KEYS: Final = {64: 128, 128: 128, 192: 64, 256: 64}
# Queries of a step of the backward: of a whole key tile, dK and dV of 192 and 128 dimensions leave
# registers for logits of 48.
BACKWARD_QUERIES: Final = {64: 80, 128: 80, 192: 48, 256: 80}
# Queries that a block prepares or finishes, and dimensions that it finishes.
ROW_BLOCK: Final = 64
SLAB: Final = 64
# Keys of a cut tile that a block finishes.
FINISH_KEYS: Final = 16

_MAP, _POINTER = Param.TENSOR_MAP, Param.POINTER
_INT, _LONG, _FLOAT = Param.INT32, Param.INT64, Param.FLOAT32

_ROWS: Final = (_POINTER, _LONG, _LONG)
_PARAMS: Final = {
    "forward": (_MAP,) * 4 + (_POINTER,) * 8 + (_INT,) * 5 + (_FLOAT,),
    "backward_prepare": (_ROWS, _ROWS, _POINTER, _LONG, _POINTER, _LONG)
    + (_POINTER,) * 3
    + (_LONG, _POINTER, _INT, _FLOAT),
    "backward": (_MAP,) * 4 + ((_POINTER,) * 9 + (_LONG,) * 4 + (_INT,) * 9 + (_FLOAT,) * 2,),
    "backward_queries": (_MAP,) * 5 + ((_POINTER,) * 7 + (_INT,) * 6 + (_FLOAT,) * 2,),
    "backward_finish_queries": (_POINTER, _POINTER, _INT, _INT, _FLOAT),
    "backward_finish_keys": (_POINTER,) * 4 + (_LONG,) * 4 + (_INT,) * 2,
}


_KEYS: Final = {
    "forward": FORWARD_KEYS,
    "backward": BACKWARD_KEYS,
    "backward_queries": QUERY_KEYS,
}


def kernel_spec(
    name: str,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    *,
    is_partial: bool,
    is_windowed: bool = False,
    with_dq: bool = True,
) -> KernelSpec:
    """Returns one variant of a kernel.

    Args:
        name: Its entry without the prefix "tree_attention_".
        head_dim: Size of queries and keys.
        value_dim: Size of values and outputs; the two are one of `HEAD_DIMS`.
        dtype: bf16 or fp16.
        is_partial: Results in fp32, dK and dV added to buffers.
        is_windowed: Queries do not see keys that far back; kernels without a mask ignore it.
        with_dq: Whether "backward" computes dQ; the others ignore it.
    """
    defines = {
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "IS_FP16": int(dtype == torch.float16),
    }
    if name != "backward_prepare":
        defines["PARTIAL"] = int(is_partial)
    if name in _KEYS:
        defines["KEYS"] = _KEYS[name][head_dim]
        defines["WINDOW"] = int(is_windowed)
    if name == "backward":
        defines["QUERY_STEP"] = BACKWARD_QUERIES[head_dim]
        defines["WITH_DQ"] = int(with_dq)
    file = "backward_finish" if name.startswith("backward_finish") else name
    return KernelSpec(
        source=f"tree_attention/csrc/{file}.cu",
        entry=f"tree_attention_{name}",
        defines=tuple(sorted(defines.items())),
        params=_PARAMS[name],
    )


def _all_specs() -> tuple[KernelSpec, ...]:
    variants = product(_PARAMS, HEAD_DIMS, DTYPES, (False, True), (False, True), (True, False))
    specs = {
        kernel_spec(
            *(name, *sizes, dtype), is_partial=partial, is_windowed=windowed, with_dq=with_dq
        ): None
        for name, sizes, dtype, partial, windowed, with_dq in variants
    }
    return tuple(specs)


SPECS: Final[tuple[KernelSpec, ...]] = _all_specs()
