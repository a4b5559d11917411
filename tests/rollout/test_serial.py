"""Bytes of a batch: there and back, canonical, and nothing else accepted."""

from __future__ import annotations

import functools
import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ratoon.errors import ErrorCode, RatoonError
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.serial import BatchBytes, batch_digest, batch_from_bytes, batch_to_bytes
from tests.builders import Outcome, random_batch
from tests.rollout.strategies import CHECKED, batches

_PREFIX = struct.Struct("<8sII")


def _assert_equal(a: RolloutBatch, b: RolloutBatch) -> None:
    for name in RolloutBatch.__slots__:
        mine, other = getattr(a, name), getattr(b, name)
        if isinstance(mine, np.ndarray):
            assert mine.dtype == other.dtype, name
            np.testing.assert_array_equal(mine, other, err_msg=name)
        else:
            assert mine == other, name


@CHECKED
@given(batch=batches())
def test_a_batch_survives_its_bytes(batch: RolloutBatch) -> None:
    data = batch_to_bytes(batch)
    again = batch_from_bytes(data)
    _assert_equal(batch, again)
    assert batch_to_bytes(again) == data


@pytest.mark.parametrize("outcome", ["reward", "advantages", "none"])
@pytest.mark.parametrize("with_logprobs", [True, False])
def test_optional_columns_come_back_or_stay_away(outcome: Outcome, with_logprobs: bool) -> None:
    batch = random_batch(np.random.default_rng(1), outcome=outcome, with_logprobs=with_logprobs)
    _assert_equal(batch, batch_from_bytes(batch_to_bytes(batch)))


def test_arrays_are_aligned_and_may_be_written() -> None:
    batch = batch_from_bytes(batch_to_bytes(random_batch(np.random.default_rng(1))))
    assert batch.sampler_logprobs is not None
    assert batch.sampler_logprobs.flags.writeable
    assert batch.sampler_logprobs.flags.aligned


def test_memory_layout_does_not_change_the_bytes() -> None:
    batch = random_batch(np.random.default_rng(2))
    assert batch.rewards is not None
    spread = np.repeat(batch.rewards, 2)[::2].astype(">f8")
    assert batch_to_bytes(replace(batch, rewards=spread)) == batch_to_bytes(batch)


def test_any_other_value_changes_the_bytes() -> None:
    batch = random_batch(np.random.default_rng(2))
    data = batch_to_bytes(batch)
    assert batch.rewards is not None
    assert batch_to_bytes(replace(batch, rewards=batch.rewards + 1)) != data
    assert batch_to_bytes(replace(batch, truncated=~batch.truncated)) != data
    assert batch_to_bytes(replace(batch, group_ids=("x", *batch.group_ids[1:]))) != data
    assert batch_to_bytes(replace(batch, old_logprobs=None)) != data


def test_group_ids_of_any_script() -> None:
    batch = random_batch(np.random.default_rng(2), num_groups=2)
    named = replace(batch, group_ids=('é\n"', "問題"))
    assert batch_from_bytes(batch_to_bytes(named)).group_ids == ('é\n"', "問題")


def test_the_digest_is_sha256() -> None:
    body = BatchBytes(random_batch(np.random.default_rng(2)))
    data = bytes(body)
    assert len(body) == len(data)
    assert batch_digest(body) == batch_digest(data) == hashlib.sha256(data).hexdigest()


@functools.cache
def _whole() -> bytes:
    return bytes(batch_to_bytes(random_batch(np.random.default_rng(3))))


@CHECKED
@given(position=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_one_flipped_bit_anywhere_is_detected(position: int, bit: int) -> None:
    data = bytearray(_whole())
    data[position % len(data)] ^= 1 << bit
    _assert_malformed(bytes(data))


@CHECKED
@given(stop=st.integers(0, 10**6))
def test_every_truncation_is_detected(stop: int) -> None:
    data = _whole()
    _assert_malformed(data[: stop % len(data)])


@CHECKED
@given(data=st.binary(max_size=200))
def test_other_bytes_are_refused(data: bytes) -> None:
    _assert_malformed(data)


def _assert_malformed(data: bytes | memoryview) -> None:
    with pytest.raises(RatoonError) as caught:
        batch_from_bytes(data)
    assert caught.value.code == ErrorCode.MALFORMED_BODY
    assert caught.value.field == "body"


def _sealed(header: bytes, arrays: bytes, *, header_size: int | None = None) -> bytes:
    """A body with a right checksum."""
    size = len(header) if header_size is None else header_size
    body = _PREFIX.pack(b"RATOONRB", 1, size) + header
    body += bytes(-len(body) % 8) + arrays
    return body + xxhash.xxh3_128_digest(body)


def _parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    _, _, size = _PREFIX.unpack_from(data)
    start = _PREFIX.size + size
    return json.loads(bytes(data[_PREFIX.size : start])), bytes(data[start + -start % 8 : -16])


def _canonical(header: dict[str, Any]) -> bytes:
    return json.dumps(header, sort_keys=True, separators=(",", ":")).encode()


def _huge(header: dict[str, Any]) -> None:
    header["arrays"][0]["shape"] = [2**60]


def _negative(header: dict[str, Any]) -> None:
    header["arrays"][0]["shape"] = [-1]


def _boolean(header: dict[str, Any]) -> None:
    header["arrays"][0]["shape"] = [True]


def _other_dtype(header: dict[str, Any]) -> None:
    header["arrays"][0]["dtype"] = "<f8"


def _unknown(header: dict[str, Any]) -> None:
    header["arrays"][0]["name"] = "weights"


def _swapped(header: dict[str, Any]) -> None:
    header["arrays"].reverse()


def _swapped_twins(header: dict[str, Any]) -> None:
    """Two columns of one dtype and length: only their order tells them apart."""
    names = [array["name"] for array in header["arrays"]]
    first, second = names.index("temperature"), names.index("top_p")
    header["arrays"][first]["name"], header["arrays"][second]["name"] = "top_p", "temperature"


def _missing(header: dict[str, Any]) -> None:
    del header["arrays"][0]


def _one_group_less(header: dict[str, Any]) -> None:
    header["group_ids"].pop()


def _numbered_group(header: dict[str, Any]) -> None:
    header["group_ids"][0] = 7


def _not_a_list(header: dict[str, Any]) -> None:
    header["arrays"] = 5


@pytest.mark.parametrize(
    "lie",
    [
        _huge,
        _negative,
        _boolean,
        _other_dtype,
        _unknown,
        _swapped,
        _swapped_twins,
        _missing,
        _one_group_less,
        _numbered_group,
        _not_a_list,
    ],
)
def test_a_header_that_lies_is_refused(lie: Callable[[dict[str, Any]], None]) -> None:
    header, arrays = _parts(batch_to_bytes(random_batch(np.random.default_rng(4))))
    assert batch_from_bytes(_sealed(_canonical(header), arrays))  # the helpers tell the truth
    lie(header)
    _assert_malformed(_sealed(_canonical(header), arrays))


def test_a_header_in_another_spelling_is_refused() -> None:
    header, arrays = _parts(batch_to_bytes(random_batch(np.random.default_rng(4))))
    _assert_malformed(_sealed(json.dumps(header).encode(), arrays))


def test_a_header_that_nests_without_end_is_refused() -> None:
    _assert_malformed(_sealed(b"[" * 100_000, b""))


def test_a_header_longer_than_the_body_is_refused() -> None:
    header, arrays = _parts(batch_to_bytes(random_batch(np.random.default_rng(4))))
    _assert_malformed(_sealed(_canonical(header), arrays, header_size=2**31))


def test_bytes_after_the_last_array_are_refused() -> None:
    header, arrays = _parts(batch_to_bytes(random_batch(np.random.default_rng(4))))
    _assert_malformed(_sealed(_canonical(header), arrays + bytes(8)))


def test_offsets_out_of_order_are_refused() -> None:
    batch = random_batch(np.random.default_rng(4))
    for name in ("group_offsets", "prompt_offsets", "response_offsets"):
        offsets = getattr(batch, name).copy()
        offsets[1] = offsets[-1] + 1
        changes: dict[str, Any] = {name: offsets}
        _assert_malformed(batch_to_bytes(replace(batch, **changes)))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_routes_come_back_whole_or_are_refused(dtype: type[np.unsignedinteger]) -> None:
    batch = random_batch(np.random.default_rng(5))
    ends = np.arange(batch.num_sequences + 1, dtype=np.int64)
    rows = np.arange(int(ends[-1]) * 6, dtype=dtype).reshape(-1, 2, 3)
    changes: dict[str, Any] = {
        "routed_experts": rows,
        "route_first": ends[:-1] % 2,
        "route_offsets": ends,
    }
    routed = replace(batch, **changes)
    data = batch_to_bytes(routed)
    _assert_equal(routed, batch_from_bytes(data))
    assert batch_to_bytes(batch) != data
    assert batch_to_bytes(replace(routed, routed_experts=rows + dtype(1))) != data
    for name in changes:
        broken: dict[str, Any] = {name: None}
        _assert_malformed(batch_to_bytes(replace(routed, **broken)))
    for wrong in (rows[:-1], rows[0], rows.astype(np.int32)):
        _assert_malformed(batch_to_bytes(replace(routed, routed_experts=wrong)))
