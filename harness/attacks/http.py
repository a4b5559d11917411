"""HTTP attacks written by hand, as no client library sends these bytes.

Each opens a connection, attacks, and returns the connection as it is then.
"""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import dataclass

_PIECE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`source`: the address to connect from; "" for any."""

    host: str
    port: int
    source: str = ""

    async def connect(self, *, receive_bytes: int | None = None) -> Connection:
        """`receive_bytes`: size of the kernel's buffer; unread bytes soon fill a small one."""
        raw = socket.socket()
        raw.setblocking(False)
        if receive_bytes is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        if self.source:
            raw.bind((self.source, 0))
        await asyncio.get_running_loop().sock_connect(raw, (self.host, self.port))
        return Connection(*await asyncio.open_connection(sock=raw, limit=1024))


class Connection:
    """The connection that an attack leaves."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> int:
        """Status of the next answer, 0 if none; its body is read if its length is given."""
        try:
            status = await self.reader.readline()
            length = 0
            while (line := await self.reader.readline()) not in (b"\r\n", b""):
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            await self.reader.readexactly(length)
        except (ConnectionError, asyncio.IncompleteReadError):
            return 0
        return int(status.split()[1]) if status else 0

    async def seconds_until_end(self, within_s: float) -> float:
        """Seconds until the other end hangs up. Raises TimeoutError."""
        begin = time.monotonic()
        async with asyncio.timeout(within_s):
            try:
                while await self.reader.read(_PIECE_BYTES):
                    pass
            except ConnectionError:
                pass
        return time.monotonic() - begin

    def close(self) -> None:
        self.writer.transport.abort()


def head(method: str, path: str, *headers: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


async def silent(target: Target) -> Connection:
    """A connection that sends nothing."""
    return await target.connect()


async def newline_after_answer(target: Target) -> Connection:
    """A newline after an answer: data, but no request."""
    connection = await target.connect()
    await connection.send(head("GET", "/v1/health"))
    await connection.answer()
    await connection.send(b"\r\n")
    return connection


async def byte_of_body_after_answer(target: Target) -> Connection:
    """Sends more of a request's body, never complete, after its answer."""
    connection = await target.connect()
    await connection.send(head("POST", "/nothing", "Content-Length: 1000"))
    await connection.answer()
    await connection.send(b"x")
    return connection


async def stalled_reader(target: Target, path: str) -> Connection:
    """A request whose answer nobody reads."""
    connection = await target.connect(receive_bytes=4096)
    connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await connection.send(head("GET", path))
    return connection


async def stalled_reader_with_another(
    target: Target, path: str, pause_s: float = 0.1
) -> Connection:
    """Stalled reader with a second request behind the first."""
    connection = await stalled_reader(target, path)
    await asyncio.sleep(pause_s)
    await connection.send(head("GET", "/v1/health"))
    return connection


async def many_at_once(target: Target, path: str, num_requests: int) -> Connection:
    """Many requests in one write, without waiting for answers."""
    connection = await target.connect()
    await connection.send(head("GET", path) * num_requests)
    return connection


async def endless_header(target: Target, max_bytes: int) -> int:
    """One endless header; returns the bytes of it that were taken."""
    connection = await target.connect()
    await connection.send(b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
    return await _pour(connection, b"x" * _PIECE_BYTES, max_bytes)


async def endless_trailer(target: Target, path: str, max_bytes: int) -> int:
    """A body with an endless trailer."""
    connection = await target.connect()
    await connection.send(head("POST", path, "Transfer-Encoding: chunked"))
    await connection.send(b"2\r\n{}\r\n0\r\nX-Long: ")
    return await _pour(connection, b"x" * _PIECE_BYTES, max_bytes)


async def endless_body(target: Target, method: str, path: str, max_bytes: int) -> int:
    """An endless chunked body where no handler reads one."""
    connection = await target.connect()
    await connection.send(head(method, path, "Transfer-Encoding: chunked"))
    piece = b"%x\r\n%s\r\n" % (_PIECE_BYTES, b" " * _PIECE_BYTES)
    return await _pour(connection, piece, max_bytes)


async def withheld_body(target: Target, path: str, num_bytes: int) -> Connection:
    """A body without its last byte."""
    connection = await target.connect()
    await connection.send(head("POST", path, f"Content-Length: {num_bytes}"))
    await _pour_open(connection, b" " * _PIECE_BYTES, num_bytes - 1)
    return connection


async def _pour(connection: Connection, piece: bytes, max_bytes: int) -> int:
    sent = await _pour_open(connection, piece, max_bytes)
    connection.close()
    return sent


async def _pour_open(connection: Connection, piece: bytes, max_bytes: int) -> int:
    """Bytes sent until the other end hung up, or took nothing for a second."""
    sent = 0
    try:
        while sent < max_bytes:
            data = piece[: max_bytes - sent]
            async with asyncio.timeout(1.0):
                await connection.send(data)
            sent += len(data)
    except (ConnectionError, TimeoutError):
        pass
    return sent
