"""Chunks of files on the wire: what protobuf itself would have sent, to any reader."""

from __future__ import annotations

import pytest
import xxhash

from ratoon.api.answers import FileChunk
from ratoon_proto.v1 import service_pb2


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 2**21 - 1, 2**21, 16 * 2**20])
async def test_a_reader_finds_the_message(size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    chunk = await FileChunk.of(data[:size])
    expected = service_pb2.FetchWeightsResponse(
        data=data[:size], digest=xxhash.xxh3_128_hexdigest(data[:size])
    )
    sent = chunk.SerializeToString()
    assert service_pb2.FetchWeightsResponse.FromString(sent) == expected
    assert len(sent) <= len(expected.SerializeToString()) + 2


def test_no_field_is_left_out() -> None:
    """A field that the message gets has to be sent by `FileChunk` too."""
    fields = service_pb2.FetchWeightsResponse.DESCRIPTOR.fields_by_name
    assert set(fields) == {"data", "digest"}
