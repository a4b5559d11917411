"""The least servers of one file: sendfile behind HTTP, and `grpc.aio` with the service's messages.

Each is a process of its own. Chunks over gRPC are what `ratoon_client` asks for, as many at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import re
import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import grpc
import grpc.aio

from ratoon_client.config import ClientConfig
from ratoon_proto.v1 import service_pb2, service_pb2_grpc

_RANGE = re.compile(rb"bytes=(\d+)-(\d+)")
OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


class Named(Protocol):
    @property
    def digest(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...


@contextlib.contextmanager
def serving(path: Path) -> Iterator[tuple[int, int]]:
    """Ports of both servers of the file."""
    context = multiprocessing.get_context("spawn")
    ports: list[int] = []
    processes = []
    try:
        for serve in (_serve_http, _serve_grpc):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=serve, args=(str(path), theirs), daemon=True))
            processes[-1].start()
            ports.append(ours.recv())
        yield ports[0], ports[1]
    finally:
        for process in processes:
            process.kill()
            process.join()


def read_grpc(port: int, policy_id: str, file: Named) -> None:
    """Fetch the whole file in chunks, and keep none. Raises `RuntimeError` for missing bytes."""
    asyncio.run(_read_grpc(port, policy_id, file))


async def _read_grpc(port: int, policy_id: str, file: Named) -> None:
    config = ClientConfig()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", OPTIONS) as channel:
        fetch = service_pb2_grpc.PolicyServiceStub(channel).FetchWeights
        places = asyncio.Semaphore(config.fetches_in_flight)

        async def chunk(offset: int) -> int:
            length = min(config.chunk_bytes, file.size_bytes - offset)
            async with places:
                answer = await fetch(
                    service_pb2.FetchWeightsRequest(
                        policy_id=policy_id, digest=file.digest, offset=offset, length=length
                    )
                )
            return len(answer.data)

        offsets = range(0, file.size_bytes, config.chunk_bytes)
        lengths = await asyncio.gather(*map(chunk, offsets))
    if sum(lengths) != file.size_bytes:
        raise RuntimeError(f"{sum(lengths)} of {file.size_bytes} bytes")


def _serve_http(path: str, ready: Connection) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    ready.send(listener.getsockname()[1])
    while True:
        caller, _ = listener.accept()
        threading.Thread(target=_send, args=(caller, path), daemon=True).start()


def _send(caller: socket.socket, path: str) -> None:
    """Answer ranges until the caller leaves."""
    with caller, Path(path).open("rb") as file, contextlib.suppress(OSError):
        while head := caller.recv(65_536):
            found = _RANGE.search(head)
            assert found is not None
            start, last = map(int, found.groups())
            count = max(min(last + 1, os.fstat(file.fileno()).st_size) - start, 0)
            answer = f"HTTP/1.1 206 Partial Content\r\nContent-Length: {count}\r\n\r\n"
            caller.sendall(answer.encode())
            caller.sendfile(file, start, count)


def _serve_grpc(path: str, ready: Connection) -> None:
    asyncio.run(_answer(path, ready))


async def _answer(path: str, ready: Connection) -> None:
    descriptor = os.open(path, os.O_RDONLY)

    class Servicer(service_pb2_grpc.PolicyServiceServicer):
        async def FetchWeights(  # noqa: N802 - the contract's name
            self, request: service_pb2.FetchWeightsRequest, context: object
        ) -> service_pb2.FetchWeightsResponse:
            del context
            data = await asyncio.to_thread(os.pread, descriptor, request.length, request.offset)
            return service_pb2.FetchWeightsResponse(data=data)

    server = grpc.aio.server(options=OPTIONS)
    servicer = Servicer()  # pyright: ignore[reportAbstractUsage]
    service_pb2_grpc.add_PolicyServiceServicer_to_server(servicer, server)
    ready.send(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    await server.wait_for_termination()
