"""The tensor codec: what goes in comes out bit for bit, and what lies is refused."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from ratoon_proto.codec import (
    DTYPES,
    MAX_RANK,
    CodecError,
    decode_bytes,
    decode_tensor,
    encode_array,
)
from ratoon_proto.v1.tensor_pb2 import Tensor

LIMIT = 2**20

arrays = st.sampled_from(sorted(DTYPES)).flatmap(
    lambda name: hnp.arrays(
        dtype=DTYPES[name],
        shape=hnp.array_shapes(min_dims=0, max_dims=MAX_RANK, min_side=0, max_side=3),
    )
)


def refusal(dtype: str, shape: list[int], data: bytes, max_bytes: int = LIMIT) -> CodecError:
    with pytest.raises(CodecError) as caught:
        decode_bytes(dtype, shape, data, max_bytes=max_bytes)
    return caught.value


@given(arrays)
def test_round_trip_keeps_dtype_shape_and_bits(array: NDArray[np.generic]):
    tensor = Tensor.FromString(encode_array(array).SerializeToString())
    decoded = decode_tensor(tensor, max_bytes=LIMIT)
    assert decoded.dtype == array.dtype
    assert decoded.shape == array.shape
    assert decoded.tobytes() == array.tobytes()


@given(
    st.sampled_from([*DTYPES, "", "float31", "object", "<f4"]),
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 5), max_size=MAX_RANK + 2),
    st.binary(max_size=64),
    st.integers(0, 64),
)
def test_decoder_answers_any_input_with_its_bytes_or_a_codec_error(
    dtype: str, shape: list[int], data: bytes, max_bytes: int
):
    try:
        decoded = decode_bytes(dtype, shape, data, max_bytes=max_bytes)
    except CodecError as error:
        assert error.part in {"dtype", "shape", "data"}
        assert error.got
        assert error.expected
    else:
        assert decoded.tobytes() == data
        assert decoded.shape == tuple(shape)
        assert decoded.nbytes <= max_bytes


def test_encoder_writes_little_endian_c_order_whatever_the_source_layout():
    expected = bytes.fromhex("00000000 03000000 01000000 04000000 02000000 05000000")
    source = np.arange(6, dtype=np.int32).reshape(2, 3).T
    assert encode_array(source).data == expected
    assert encode_array(source.astype(">i4")).data == expected
    assert list(encode_array(source).shape) == [3, 2]
    assert encode_array(np.repeat(source, 2, axis=0)[::2]).data == expected


def test_decoder_reads_documented_bytes():
    decoded = decode_bytes("float32", [2], bytes.fromhex("0000803f 000000c0"), max_bytes=8)
    assert decoded.tolist() == [1.0, -2.0]


def test_decoded_array_is_a_read_only_view():
    data = bytes(8)
    decoded = decode_bytes("int32", [2], data, max_bytes=8)
    assert np.shares_memory(decoded, np.frombuffer(data, np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        decoded[0] = 1


@pytest.mark.parametrize("array", [np.zeros(2, np.complex64), np.array(["a"]), np.array([None])])
def test_encoder_refuses_dtypes_that_have_no_wire_form(array: NDArray[np.generic]):
    with pytest.raises(CodecError) as caught:
        encode_array(array)
    assert caught.value.part == "dtype"


def test_encoder_refuses_a_rank_that_the_decoder_would_refuse():
    with pytest.raises(CodecError, match="9 dimensions"):
        encode_array(np.zeros((1,) * (MAX_RANK + 1), np.int32))


def test_decoder_refuses_an_unknown_dtype_and_does_not_echo_a_long_one():
    error = refusal("x" * 10_000, [1], b"\0")
    assert error.part == "dtype"
    assert len(str(error)) < 300


@pytest.mark.parametrize(
    ("shape", "got"),
    [
        ([-1], "-1 in dimension 0"),
        ([2, -(2**63)], f"{-(2**63)} in dimension 1"),
        ([-1, -4], "-1 in dimension 0"),
        ([1] * (MAX_RANK + 1), "9 dimensions"),
        ([2**62, 4, 1], str([2**62, 4, 1])),
        ([0, 2**62, 2**62], str([0, 2**62, 2**62])),
        ([LIMIT + 1], f"{LIMIT + 1} bytes"),
    ],
)
def test_decoder_refuses_hostile_shapes(shape: list[int], got: str):
    error = refusal("uint8", shape, b"\0\0\0\0")
    assert (error.part, error.got) == ("shape", got)


@pytest.mark.parametrize(("shape", "size"), [([3], 8), ([3], 16), ([], 8), ([0], 4), ([3, 1], 0)])
def test_decoder_refuses_a_size_that_dtype_and_shape_deny(shape: list[int], size: int):
    error = refusal("int32", shape, bytes(size))
    assert error.part == "data"
    assert error.got == f"{size} bytes"


def test_size_bound_is_inclusive():
    assert decode_bytes("int32", [2], bytes(8), max_bytes=8).tolist() == [0, 0]
    assert refusal("int32", [2], bytes(8), max_bytes=7).expected == "at most 7 bytes"


def test_bool_bytes_other_than_0_and_1_are_refused_by_index():
    assert decode_bytes("bool", [3], b"\0\1\0", max_bytes=3).tolist() == [False, True, False]
    error = refusal("bool", [4], b"\0\1\2\xff")
    assert (error.part, error.got, error.expected) == ("data", "bool byte 2 at 2", "0 or 1")


def test_codec_error_crosses_process_borders_whole():
    error = pickle.loads(pickle.dumps(CodecError("data", "1 byte", "2 bytes")))
    assert str(error) == "tensor data: got 1 byte, expected 2 bytes"
