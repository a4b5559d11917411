"""The client's HTTP connections, against a server that is silent for a while."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from ratoon_client.config import ClientConfig
from ratoon_client.errors import TransportError
from ratoon_client.rpcs import GET_OPERATION
from ratoon_client.transport.http_wire import HttpTransport
from ratoon_proto.v1 import service_pb2

# Twice what a client has at once.
NUM_CALLS = 40
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


async def test_calls_that_end_of_their_timeout_keep_no_connections() -> None:
    """After kills of the service, calls over HTTP found no free connection for minutes: those that
    timed out while they waited for one had been given it in the same moment, and nobody used it.
    """
    answers = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                await answers.wait()
                writer.write(ANSWER)
                await writer.drain()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    transport = HttpTransport(url, ClientConfig(), None)
    request = service_pb2.GetOperationRequest(operation_id="p.1")

    async def call(timeout_s: float) -> None:
        await transport.call(GET_OPERATION, request, timeout_s=timeout_s)

    for _ in range(3):
        ends = await asyncio.gather(*(call(0.3) for _ in range(NUM_CALLS)), return_exceptions=True)
        assert {type(end) for end in ends} == {TransportError}
    answers.set()
    await asyncio.gather(*(call(5.0) for _ in range(NUM_CALLS)))
    await transport.close()
    server.close()
