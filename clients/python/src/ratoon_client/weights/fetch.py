"""Bytes named by a digest and a size, into memory, verified."""

from __future__ import annotations

from ratoon_client.caller import Caller
from ratoon_client.errors import IntegrityError
from ratoon_client.weights.chunks import check_chunk, chunk_ranges, digest_of
from ratoon_client.wire.encode import request_message
from ratoon_client.wire.rpcs import FETCH_WEIGHTS
from ratoon_proto.v1 import service_pb2


async def fetch_chunk(
    caller: Caller, policy_id: str, digest: str, *, offset: int, length: int
) -> bytes:
    """`length` bytes from `offset` on. Raises IntegrityError where they have another digest."""
    request = request_message(
        service_pb2.FetchWeightsRequest,
        policy_id=policy_id,
        digest=digest,
        offset=offset,
        length=length,
    )
    chunk = await caller.call(FETCH_WEIGHTS, request)
    check_chunk(digest, offset, length, chunk.data, chunk.digest)
    return chunk.data


async def fetch_result_file(caller: Caller, policy_id: str, digest: str, size_bytes: int) -> bytes:
    """A whole result file, chunk by chunk."""
    parts = [
        await fetch_chunk(caller, policy_id, digest, offset=part.offset, length=part.length)
        for part in chunk_ranges(size_bytes, await caller.chunk_bytes())
    ]
    data = b"".join(parts)
    if digest_of(data) != digest:
        raise IntegrityError(f"result file {digest}: the bytes have another digest")
    return data
