"""Answers of the service that are more than a plain message.

A file chunk is serialized with a single copy of its bytes. A watched operation is throttled: a slow
reader has at most one value waiting, the newest, however many changes there were.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import ClassVar

import xxhash
from google.protobuf.descriptor import Descriptor

from ratoon.engine.types import Operation
from ratoon_proto.v1 import service_pb2

_DATA = service_pb2.FetchWeightsResponse.DESCRIPTOR.fields_by_name["data"]
# Wire type of the format's length-delimited fields.
_LENGTH_DELIMITED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChunk:
    """Bytes of a file, and their xxh3-128 in hexadecimal digits.

    It looks like a protobuf message to the gate and to gRPC.
    """

    DESCRIPTOR: ClassVar[Descriptor] = service_pb2.FetchWeightsResponse.DESCRIPTOR
    data: bytes = field(repr=False)
    digest: str

    @classmethod
    async def of(cls, data: bytes) -> FileChunk:
        """Compute the digest of `data` in a thread, and return the chunk."""
        return cls(data=data, digest=await asyncio.to_thread(xxhash.xxh3_128_hexdigest, data))

    def SerializeToString(self) -> bytes:
        """Return the message's bytes, joined once.

        Protobuf would copy a field of megabytes more than once, into a growing buffer.
        """
        others = service_pb2.FetchWeightsResponse(digest=self.digest).SerializeToString()
        head = bytes([_DATA.number << 3 | _LENGTH_DELIMITED]) + _varint(len(self.data))
        return b"".join((others, head, self.data))


def _varint(value: int) -> bytes:
    digits: list[int] = []
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])


async def throttled(
    changes: AsyncIterator[Operation], *, interval_s: float
) -> AsyncGenerator[Operation, None]:
    """Yield the newest operation at once, then at most one in `interval_s` seconds.

    It ends with the final one. Raises the error of `changes`, after the last value that came before
    it.
    """
    newest: Operation | None = None
    changed = asyncio.Event()

    async def pump() -> None:
        nonlocal newest
        async for operation in changes:
            newest = operation
            changed.set()

    task = asyncio.create_task(pump())
    task.add_done_callback(lambda _: changed.set())
    sent: Operation | None = None
    try:
        while True:
            await changed.wait()
            changed.clear()
            if newest is sent or newest is None:
                if task.done():
                    await task
                    return
                continue
            sent = newest
            yield sent
            if sent.state.is_final:
                return
            await asyncio.sleep(interval_s)
            if task.done():
                changed.set()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
