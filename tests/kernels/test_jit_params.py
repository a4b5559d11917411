import ctypes
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratoon_kernels.jit import Param
from ratoon_kernels.jit.spec import layout_params

C_TYPES = {
    Param.POINTER: ctypes.c_uint64,
    Param.INT32: ctypes.c_int32,
    Param.INT64: ctypes.c_int64,
    Param.FLOAT32: ctypes.c_float,
}
SCALARS = st.sampled_from(list(C_TYPES))


@given(fields=st.lists(SCALARS, min_size=1, max_size=9), data=st.data())
def test_a_struct_lies_as_the_c_compiler_lays_it(fields: list[Param], data: st.DataObject) -> None:
    class Fields(ctypes.Structure):
        _fields_ = [(f"f{index}", C_TYPES[field]) for index, field in enumerate(fields)]

    values = data.draw(st.tuples(*(st.integers(0, 2**20) for _ in fields)))
    layout = layout_params((tuple(fields),))
    packed = struct.pack(layout.format, *values)
    assert layout.sizes_bytes == (ctypes.sizeof(Fields),)
    assert packed[: ctypes.sizeof(Fields)] == bytes(Fields(*values))


@given(params=st.lists(st.one_of(SCALARS, st.just(Param.TENSOR_MAP)), max_size=9))
def test_parameters_begin_where_their_values_are_packed(params: list[Param]) -> None:
    layout = layout_params(tuple(params))
    values = [
        bytes([index]) * 128 if param is Param.TENSOR_MAP else index + 1
        for index, param in enumerate(params)
    ]
    packed = struct.pack(layout.format, *values)
    assert all(offset % 8 == 0 for offset in layout.offsets_bytes)
    for param, offset, value in zip(params, layout.offsets_bytes, values, strict=True):
        assert struct.unpack_from("<" + param.value, packed, offset) == (value,)


def test_a_struct_of_nothing_or_with_a_tensor_map_is_refused() -> None:
    with pytest.raises(AssertionError, match="no field"):
        layout_params(((),))
    with pytest.raises(AssertionError, match="tensor map"):
        layout_params(((Param.INT32, Param.TENSOR_MAP),))
