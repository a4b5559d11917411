"""Sends file bytes from the page cache to a socket: ASGI's `http.response.zerocopysend`."""

from __future__ import annotations

import asyncio
import os
import socket

# Message type of the ASGI specification: `file` is a descriptor, `offset` and `count` are bytes.
ZERO_COPY = "http.response.zerocopysend"


class FileSender:
    """Sends one range of a file; `stop` ends it, however the connection ends."""

    def __init__(self, connection: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        # A transport forbids waiting on its own descriptor, so duplicate it.
        self._descriptor = os.dup(connection.fileno())
        self._loop = loop
        self._writable: asyncio.Future[None] | None = None
        self._is_stopped = False

    async def send(self, file: int, offset: int, count: int) -> bool:
        """Send bytes [offset, offset + count) and return whether the kernel took all of them.

        The transport's own buffer must be empty.
        """
        try:
            stop = offset + count
            while offset < stop and not self._is_stopped:
                try:
                    sent = os.sendfile(self._descriptor, file, offset, stop - offset)
                except BlockingIOError:
                    sent = None
                except OSError:
                    return False
                if sent == 0:
                    return False  # The file is shorter.
                offset += sent or 0
                if offset < stop:
                    # Yield to other connections, even if the kernel would take more.
                    await self._wait()
            return offset >= stop
        finally:
            os.close(self._descriptor)

    def stop(self) -> None:
        """Stop sending; a `send` that is under way returns False."""
        self._is_stopped = True
        self._wake()

    async def _wait(self) -> None:
        self._writable = self._loop.create_future()
        self._loop.add_writer(self._descriptor, self._wake)
        try:
            await self._writable
        finally:
            self._loop.remove_writer(self._descriptor)

    def _wake(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
