"""What reaches the driver: structs as C lays them, parameters, launches and statuses."""

import ctypes
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ratoon_kernels.jit import CudaCallError, Kernel, Param, TensorMap
from ratoon_kernels.jit.calls import check_driver
from ratoon_kernels.jit.spec import layout_params
from tests.kernels.cuda_kernels import SCALARS, TILE_COPY
from tests.kernels.fake_driver import CONTEXT, FUNCTION, OTHER_CONTEXT, FakeDriver, installed

C_TYPES = {
    Param.POINTER: ctypes.c_uint64,
    Param.INT32: ctypes.c_int32,
    Param.INT64: ctypes.c_int64,
    Param.FLOAT32: ctypes.c_float,
}
C_SCALARS = st.sampled_from(list(C_TYPES))
MAX_SHARED = "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
MAP = TensorMap(bytes(range(128)))


@given(fields=st.lists(C_SCALARS, min_size=1, max_size=9), data=st.data())
def test_a_struct_lies_as_the_c_compiler_lays_it(fields: list[Param], data: st.DataObject) -> None:
    class Fields(ctypes.Structure):
        _fields_ = [(f"f{index}", C_TYPES[field]) for index, field in enumerate(fields)]

    values = data.draw(st.tuples(*(st.integers(0, 2**20) for _ in fields)))
    layout = layout_params((tuple(fields),))
    packed = struct.pack(layout.format, *values)
    assert layout.sizes_bytes == (ctypes.sizeof(Fields),)
    assert packed[: ctypes.sizeof(Fields)] == bytes(Fields(*values))


@given(params=st.lists(st.one_of(C_SCALARS, st.just(Param.TENSOR_MAP)), max_size=9))
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


@pytest.fixture
def fake() -> Iterator[FakeDriver]:
    """The driver of a GPU that has the parameters of `tile_copy`."""
    with installed() as driver:
        driver.param_sizes_bytes = layout_params(TILE_COPY.params).sizes_bytes
        yield driver


@pytest.fixture
def kernel(fake: FakeDriver) -> Kernel:
    assert fake.param_sizes_bytes
    return Kernel(TILE_COPY, 0, b"cubin")


def test_values_reach_the_driver_in_the_types_of_the_spec(kernel: Kernel, fake: FakeDriver) -> None:
    kernel.launch(
        grid=(3, 2, 1), block=128, shared_bytes=1024, stream=99, args=(MAP, 2**47, -5, 2**40, 2)
    )
    assert fake.asked == [("cuLaunchKernel", CONTEXT, FUNCTION, 3, 2, 1, 128, 1, 1, 1024, 99, 0)]
    image, out, token, start, scale = fake.launched_values
    assert image == MAP
    assert struct.unpack("<Q", out) == (2**47,)
    assert struct.unpack("<i", token) == (-5,)
    assert struct.unpack("<q", start) == (2**40,)
    assert struct.unpack("<f", scale) == (2.0,)


def test_fields_of_a_struct_are_given_one_by_one(fake: FakeDriver) -> None:
    fake.param_sizes_bytes = layout_params(SCALARS.params).sizes_bytes
    Kernel(SCALARS, 0, b"cubin").launch(
        grid=(1, 1, 1), block=1, shared_bytes=0, stream=0, args=(1, 2, 3, 4.5, 5, 6, 7, 8)
    )
    first, fields, large, fraction = fake.launched_values
    assert struct.unpack("<i", first) == (1,)
    assert struct.unpack("<i4xqf4xQi4x", fields) == (2, 3, 4.5, 5, 6)
    assert struct.unpack("<q", large) == (7,)
    assert struct.unpack("<f", fraction) == (8.0,)


@pytest.mark.parametrize(
    "args",
    [
        (MAP, 0, 0, 0),
        (MAP, 0, 0, 0, 1.0, 0),
        (0, 0, 0, 0, 1.0),
        (MAP, -1, 0, 0, 1.0),
        (MAP, 0, 2**31, 0, 1.0),
        (MAP, 0, 0.5, 0, 1.0),
        (MAP, 0, 0, 2**63, 1.0),
        (MAP, 0, 0, 0, 1e39),
    ],
)
def test_other_arguments_are_refused_and_nothing_is_launched(
    args: tuple[Any, ...], kernel: Kernel, fake: FakeDriver
) -> None:
    wanted = r"tile_copy.* takes \(TENSOR_MAP, POINTER, INT32, INT64, FLOAT32\), got \("
    with pytest.raises(TypeError, match=wanted):
        kernel.launch(grid=(1, 1, 1), block=1, shared_bytes=0, stream=0, args=args)
    assert fake.asked == []


def test_a_tensor_of_another_device_is_refused(kernel: Kernel, fake: FakeDriver) -> None:
    args = (MAP, torch.zeros(1), 0, 0, 1.0)
    with pytest.raises(AssertionError, match="tensor of device -1"):
        kernel.launch(grid=(1, 1, 1), block=1, shared_bytes=0, stream=0, args=args)
    assert fake.asked == []


def test_more_shared_memory_is_asked_for_when_a_launch_needs_it(
    kernel: Kernel,
    fake: FakeDriver,
) -> None:
    for shared_bytes in (48 * 1024, 60_000, 50_000, 70_000):
        kernel.launch(
            grid=(1, 1, 1), block=1, shared_bytes=shared_bytes, stream=0, args=(MAP, 0, 0, 0, 1.0)
        )
    attributes = [asked for asked in fake.asked if asked[0] == "cuFuncSetAttribute"]
    assert attributes == [
        ("cuFuncSetAttribute", CONTEXT, FUNCTION, MAX_SHARED, size) for size in (60_000, 70_000)
    ]


def test_calls_go_to_the_kernel_s_gpu_and_leave_the_thread_s_own(
    kernel: Kernel,
    fake: FakeDriver,
) -> None:
    fake.contexts[:] = [OTHER_CONTEXT]
    kernel.launch(grid=(1, 1, 1), block=1, shared_bytes=50_000, stream=0, args=(MAP, 0, 0, 0, 1.0))
    assert [asked[1] for asked in fake.asked] == [CONTEXT, CONTEXT]
    assert fake.contexts == [OTHER_CONTEXT]


def test_a_refused_launch_names_what_was_launched(kernel: Kernel, fake: FakeDriver) -> None:
    fake.launch_status = 701
    with pytest.raises(CudaCallError) as error:
        kernel.launch(grid=(7, 1, 1), block=64, shared_bytes=9, stream=0, args=(MAP, 0, 0, 0, 1.0))
    for words in (
        "launch of tile_copy",
        "grid=(7, 1, 1)",
        "block=64",
        "701: CUDA_ERROR_701: words",
    ):
        assert words in str(error.value)
    assert error.value.code == 701
    fake.launch_status = 0
    kernel.launch(grid=(7, 1, 1), block=64, shared_bytes=9, stream=0, args=(MAP, 1, 2, 3, 1.0))
    assert struct.unpack("<i", fake.launched_values[2]) == (2,)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    "params", [TILE_COPY.params[1:], (*TILE_COPY.params, Param.INT32), TILE_COPY.params[::-1]]
)
def test_a_spec_with_other_parameters_than_the_cubin_s_is_not_loaded(
    params: tuple[Param, ...],
) -> None:
    with pytest.raises((AssertionError, CudaCallError), match=r"parameter \d of tile_copy"):
        Kernel(replace(TILE_COPY, params=params), 0, b"cubin")


@pytest.mark.usefixtures("fake")
def test_statuses_become_errors_and_values_are_unpacked() -> None:
    with pytest.raises(CudaCallError, match="cuX failed with 2: CUDA_ERROR_2: words") as error:
        check_driver("cuX", (2, None))
    assert (error.value.call, error.value.code) == ("cuX", 2)
    assert check_driver("cuX", (0,)) is None
    assert check_driver("cuX", (0, 5)) == 5
    assert check_driver("cuX", (0, 5, 6)) == (5, 6)
