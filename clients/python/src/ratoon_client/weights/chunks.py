"""How a file is cut into chunks, and whether a chunk has the sender's digest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from ratoon_client.errors import IntegrityError


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRange:
    """Bytes [offset, offset + length)."""

    offset: int
    length: int


def chunk_ranges(size_bytes: int, chunk_bytes: int) -> Iterator[ChunkRange]:
    """The chunks of a file, in order; none where it is empty."""
    for offset in range(0, size_bytes, chunk_bytes):
        yield ChunkRange(offset=offset, length=min(chunk_bytes, size_bytes - offset))


def digest_of(data: bytes) -> str:
    """xxh3-128, 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def check_chunk(name: str, offset: int, length: int, data: bytes, digest: str) -> None:
    """Raises IntegrityError where `data` is not `length` bytes of that digest."""
    check_length(name, offset, length, data)
    if digest_of(data) != digest:
        raise IntegrityError(f"{name}: the chunk at {offset} has another digest than its sender's")


def check_length(name: str, offset: int, length: int, data: bytes) -> None:
    if len(data) != length:
        raise IntegrityError(
            f"{name}: the chunk at {offset} has {len(data)} bytes, {length} were asked for"
        )
