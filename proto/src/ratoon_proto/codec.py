"""numpy arrays to wire tensors and back: (dtype name, shape, little-endian bytes in C order).

An array leaves the decoder only if its bytes are exactly what its dtype and shape say, within the
caller's bounds; every check comes before any allocation, and nothing that a peer sends raises other
than CodecError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from ratoon_proto.v1.tensor_pb2 import Tensor

MAX_RANK = 8
_MAX_SIZE_BYTES = 2**63 - 1

DTYPES: Mapping[str, np.dtype[np.generic]] = MappingProxyType(
    {
        "bool": np.dtype("?"),
        "uint8": np.dtype("u1"),
        "uint16": np.dtype("<u2"),
        "uint32": np.dtype("<u4"),
        "int32": np.dtype("<i4"),
        "int64": np.dtype("<i8"),
        "float16": np.dtype("<f2"),
        "float32": np.dtype("<f4"),
        "float64": np.dtype("<f8"),
    }
)
_NAMES = {(dtype.kind, dtype.itemsize): name for name, dtype in DTYPES.items()}


class CodecError(ValueError):
    """A tensor that is not what it says, or more than the caller takes.

    `part` is the field of Tensor at fault (`dtype`, `shape` or `data`).
    """

    def __init__(self, part: str, got: str, expected: str) -> None:
        super().__init__(part, got, expected)
        self.part = part
        self.got = got
        self.expected = expected

    def __str__(self) -> str:
        return f"tensor {self.part}: got {self.got}, expected {self.expected}"


def encode_array(array: NDArray[np.generic]) -> Tensor:
    """The wire form of `array`, which may have any byte order and strides.

    Raises CodecError for a dtype outside DTYPES or more than MAX_RANK dimensions.
    """
    name = _NAMES.get((array.dtype.kind, array.dtype.itemsize))
    if name is None:
        raise CodecError("dtype", str(array.dtype), _one_of_dtypes())
    _check_rank(array.shape)
    data = array.astype(DTYPES[name], copy=False).tobytes(order="C")
    return Tensor(dtype=name, shape=array.shape, data=data)


def decode_tensor(tensor: Tensor, *, max_bytes: int) -> NDArray[np.generic]:
    """The array of a message; see `decode_bytes`."""
    # The message makes another object at each look at the field.
    return decode_bytes(tensor.dtype, tuple(tensor.shape), tensor.data, max_bytes=max_bytes)


def decode_bytes(
    dtype: str, shape: Sequence[int], data: bytes, *, max_bytes: int
) -> NDArray[np.generic]:
    """A read-only view of `data` as an array of `shape`, at most `max_bytes` large.

    Raises CodecError for an unknown dtype, too many or negative dimensions, a size over `max_bytes`
    or other than that of `data`, and for bool bytes that are neither 0 nor 1.
    """
    element = DTYPES.get(dtype)
    if element is None:
        raise CodecError("dtype", repr(dtype[:64]), _one_of_dtypes())
    size_bytes = _declared_bytes(shape, element.itemsize)
    if size_bytes > max_bytes:
        raise CodecError("shape", f"{size_bytes} bytes", f"at most {max_bytes} bytes")
    if size_bytes != len(data):
        raise CodecError(
            "data", f"{len(data)} bytes", f"{size_bytes} bytes for {dtype} {list(shape)}"
        )
    if element.kind == "b":
        _check_bools(data)
    return np.ndarray(tuple(shape), dtype=element, buffer=data)


def _one_of_dtypes() -> str:
    return "one of " + ", ".join(DTYPES)


def _check_rank(shape: Sequence[int]) -> None:
    if len(shape) > MAX_RANK:
        raise CodecError("shape", f"{len(shape)} dimensions", f"at most {MAX_RANK} dimensions")


def _declared_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Bytes of an array of `shape`, in exact integers."""
    _check_rank(shape)
    size_bytes = spanned_bytes = itemsize
    for axis, extent in enumerate(shape):
        if extent < 0:
            raise CodecError("shape", f"{extent} in dimension {axis}", "no negative extent")
        size_bytes *= extent
        # numpy refuses an overflow of the other extents even where one of them is 0.
        spanned_bytes *= extent or 1
    if spanned_bytes > _MAX_SIZE_BYTES:
        raise CodecError("shape", str(list(shape)), f"at most {_MAX_SIZE_BYTES} bytes")
    return size_bytes


def _check_bools(data: bytes) -> None:
    values = np.frombuffer(data, dtype=np.uint8) if data else np.empty(0, np.uint8)
    if values.max(initial=0) > 1:
        index = int(np.argmax(values > 1))
        raise CodecError("data", f"bool byte {values[index]} at {index}", "0 or 1")
