"""TMA descriptors: how the copy engine walks a tensor, box by box.

Elements of a box that lie outside the tensor arrive as zeros, and are not written by a store.
"""

import ctypes
import functools
from typing import Final, NewType

import torch
from torch import Tensor

from ratoon_kernels.jit.calls import check_driver, driver, primary_context

# The bytes of a CUtensorMap. It holds an address: valid while the tensor's memory is the tensor's.
TensorMap = NewType("TensorMap", bytes)

_SIZE_BYTES: Final = 128
_TYPE_NAMES: Final = {
    torch.bfloat16: "BFLOAT16",
    torch.float16: "FLOAT16",
    torch.float32: "FLOAT32",
    torch.int32: "INT32",
}
_SWIZZLE_NAMES: Final = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}
_ROW_BYTES: Final = 128
_ALIGNMENT_BYTES: Final = 16


def tensor_map(
    tensor: Tensor,
    *,
    dims: tuple[int, ...],
    strides_bytes: tuple[int, ...],
    box: tuple[int, ...],
    swizzle_bytes: int,
) -> TensorMap:
    """Returns the map of a tensor, or of any view of its memory that dims and strides describe.

    Cached by all of its inputs: a repeat costs about a microsecond.

    Args:
        tensor: Its address and dtype: bf16, fp16, fp32 or int32.
        dims: One to five sizes in elements, innermost first.
        strides_bytes: Strides of all dims but the innermost, which is contiguous.
        box: Elements per dim that one instruction copies, at most 256 each.
        swizzle_bytes: 0, 32, 64 or 128: the pattern in shared memory. A row of the box fits in it.

    Raises:
        ValueError: The address or a stride is not a multiple of 16 bytes, a dim is empty, or the
            box does not fit.
        CudaCallError: The driver refuses the map.
    """
    context = primary_context(tensor.get_device())
    arguments = (tensor.data_ptr(), tensor.dtype, dims, strides_bytes, box, swizzle_bytes)
    if context.is_current():
        return _encode(*arguments)
    # A thread of autograd may have none yet, and the driver encodes in none.
    with context.entered():
        return _encode(*arguments)


def head_tile_map(x_TNH: Tensor, rows: int) -> TensorMap:
    """Returns the map whose box is `rows` tokens of one head, swizzled by 128 bytes.

    Dims are (64, T, head_dim / 64, heads) for 16-bit dtypes and the box is (64, rows,
    head_dim / 64, 1): a tile lies in shared memory as slabs of `rows` x 128 bytes, one per 64
    channels. Coordinates of the instruction are (0, token, 0, head).

    Args:
        x_TNH: bf16 or fp16; head_dim a multiple of 64 and contiguous, any strides of tokens and
            heads that are multiples of 16 bytes.
        rows: Tokens of a box, at most 256.

    Raises:
        ValueError: Address or strides are not such, or T is 0.
        CudaCallError: The driver refuses the map.
    """
    return _head_map(x_TNH, rows, x_TNH.shape[2] * x_TNH.element_size() // _ROW_BYTES)


def head_slab_map(x_TNH: Tensor, rows: int) -> TensorMap:
    """Returns the map of the same dims whose box is one slab: `rows` x 128 bytes of one head.

    Coordinates of the instruction are (0, token, slab, head). Arguments and errors are those of
    `head_tile_map`.
    """
    return _head_map(x_TNH, rows, 1)


def _head_map(x_TNH: Tensor, rows: int, slabs: int) -> TensorMap:
    tokens, heads, head_dim = x_TNH.shape
    token_stride, head_stride, channel_stride = x_TNH.stride()
    item_bytes = x_TNH.element_size()
    columns = _ROW_BYTES // item_bytes
    if channel_stride != 1 or head_dim % columns:
        raise ValueError(f"head_dim {head_dim} of stride {channel_stride} is not rows of {columns}")
    # torch gives a size of 1 any stride; the driver wants a legal one.
    token_bytes = token_stride * item_bytes if tokens > 1 else head_dim * item_bytes
    head_bytes = head_stride * item_bytes if heads > 1 else head_dim * item_bytes
    return tensor_map(
        x_TNH,
        dims=(columns, tokens, head_dim // columns, heads),
        strides_bytes=(token_bytes, _ROW_BYTES, head_bytes),
        box=(columns, rows, slabs, 1),
        swizzle_bytes=_ROW_BYTES,
    )


@functools.lru_cache(maxsize=4096)
def _encode(
    address: int,
    dtype: torch.dtype,
    dims: tuple[int, ...],
    strides_bytes: tuple[int, ...],
    box: tuple[int, ...],
    swizzle_bytes: int,
) -> TensorMap:
    _check(address, dtype, dims, strides_bytes, box, swizzle_bytes)
    cuda = driver()
    data_type = f"CU_TENSOR_MAP_DATA_TYPE_{_TYPE_NAMES[dtype]}"
    swizzle = f"CU_TENSOR_MAP_SWIZZLE_{_SWIZZLE_NAMES[swizzle_bytes]}"
    encoded = check_driver(
        f"cuTensorMapEncodeTiled ({dims=} {strides_bytes=} {box=} {swizzle_bytes=})",
        cuda.cuTensorMapEncodeTiled(
            getattr(cuda.CUtensorMapDataType, data_type),
            len(dims),
            address,
            [cuda.cuuint64_t(size) for size in dims],
            [cuda.cuuint64_t(stride) for stride in strides_bytes],
            [cuda.cuuint32_t(size) for size in box],
            [cuda.cuuint32_t(1) for _ in box],
            cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(cuda.CUtensorMapSwizzle, swizzle),
            cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
    )
    return TensorMap(ctypes.string_at(encoded.getPtr(), _SIZE_BYTES))


def _check(
    address: int,
    dtype: torch.dtype,
    dims: tuple[int, ...],
    strides_bytes: tuple[int, ...],
    box: tuple[int, ...],
    swizzle_bytes: int,
) -> None:
    """Names the fault, for which the driver would only say "invalid argument"."""
    if dtype not in _TYPE_NAMES:
        raise ValueError(f"dtype {dtype} is none of {[str(known) for known in _TYPE_NAMES]}")
    if swizzle_bytes not in _SWIZZLE_NAMES:
        raise ValueError(f"swizzle_bytes {swizzle_bytes} is none of {list(_SWIZZLE_NAMES)}")
    if not (1 <= len(dims) <= 5 and len(box) == len(dims) == len(strides_bytes) + 1):
        raise ValueError(f"dims {dims}, strides {strides_bytes} and box {box} do not match")
    if address % _ALIGNMENT_BYTES or any(stride % _ALIGNMENT_BYTES for stride in strides_bytes):
        raise ValueError(
            f"address {address:#x} and strides {strides_bytes} are not multiples of 16 bytes"
        )
    if min(dims) < 1 or min(box) < 1 or max(box) > 256:
        raise ValueError(f"dims {dims} are empty, or a side of box {box} is not in [1, 256]")
    row_bytes = box[0] * dtype.itemsize
    if row_bytes % _ALIGNMENT_BYTES or (swizzle_bytes and row_bytes > swizzle_bytes):
        raise ValueError(f"box {box} has rows of {row_bytes} bytes for swizzle {swizzle_bytes}")
