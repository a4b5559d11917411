"""What the client needs of a wire.

A wire raises `RatoonApiError` for what the service said, `TransportError` where no answer of the
service came, and nothing else; it never retries.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from ratoon_client.wire.rpcs import RequestT, ResponseT, Rpc
from ratoon_proto.types import WeightFile


class Transport(Protocol):
    """One connection, of one event loop."""

    async def call(
        self, rpc: Rpc[RequestT, ResponseT], request: RequestT, *, timeout_s: float
    ) -> ResponseT: ...

    def stream(
        self, rpc: Rpc[RequestT, ResponseT], request: RequestT
    ) -> AsyncGenerator[ResponseT, None]: ...

    async def read_file(
        self,
        policy_id: str,
        version: int,
        file: WeightFile,
        *,
        offset: int,
        length: int,
        timeout_s: float,
    ) -> bytes:
        """`length` bytes of a version's file. Raises IntegrityError where the wire shows a flaw."""
        ...

    async def close(self) -> None: ...
