"""Files on their way to a reader: from the page cache, without being held in memory."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import xxhash

from harness.attacks import http as attacks
from ratoon.api.http.app import create_app
from ratoon.api.http.edge_budget import EdgeBounds
from ratoon.api.http.listener import start_http
from ratoon.api.http.tls import server_context
from ratoon.auth.certificates import CertificateFiles, CertificateStore
from tests.api import requests
from tests.api.conftest import Api
from tests.api.open_gate import OPEN_GATE
from tests.api.served import target_at
from tests.certificates import make_authority

MIB = 2**20
SIZE = 12 * MIB + 5
PATH = f"/v1/policies/{requests.POLICY}/weights/0/files/model.safetensors"


@asynccontextmanager
async def edge(
    api: Api, context: ssl.SSLContext | None = None, **bounds: float
) -> AsyncIterator[int]:
    """The port of a service whose one file has `SIZE` bytes, all in one answer."""
    (api.weights / "model.safetensors").write_bytes(os.urandom(SIZE))
    await api.create_policy()
    limits = api.limits.model_copy(update={"max_fetch_bytes": 16 * MIB})
    running = await start_http(
        create_app(api.service, limits, gate=OPEN_GATE),
        host="127.0.0.1",
        port=0,
        bounds=EdgeBounds(**bounds),  # type: ignore[arg-type]
        context=context,
    )
    try:
        yield running.port
    finally:
        await running.stop(None)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that the kernel took from a file at a time."""
    taken: list[int] = []
    sendfile = os.sendfile

    def noted(*arguments: Any) -> int:
        taken.append(sendfile(*arguments))
        return taken[-1]

    monkeypatch.setattr(os, "sendfile", noted)
    return taken


def _tls(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Of a server, and of its clients."""
    authority = make_authority("servers")
    (folder / "ca.pem").write_bytes(authority.pem)
    authority.issue(folder / "cert.pem", folder / "key.pem")
    files = CertificateFiles(cert=folder / "cert.pem", key=folder / "key.pem", client_ca=None)
    client = ssl.create_default_context(cafile=folder / "ca.pem")
    return server_context(CertificateStore(files)), client


async def _fetch(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first: int, last: int
) -> tuple[dict[str, str], bytes]:
    writer.write(attacks.head("GET", PATH, f"Range: bytes={first}-{last}"))
    head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
    assert head[0].startswith("HTTP/1.1 206"), head
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    return headers, await reader.readexactly(int(headers["content-length"]))


@pytest.mark.parametrize("is_tls", [False, True])
async def test_a_file_comes_as_it_is_and_the_connection_goes_on(
    api: Api, tmp_path: Path, sent: list[int], is_tls: bool
) -> None:
    server, client = _tls(tmp_path) if is_tls else (None, None)
    async with edge(api, server) as port:
        data = (api.weights / "model.safetensors").read_bytes()
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client)
        for first, last in ((0, SIZE - 1), (7, 9 * MIB), (SIZE - 1, SIZE - 1)):
            headers, body = await _fetch(reader, writer, first, last)
            assert body == data[first : last + 1]
            assert headers["ratoon-chunk-digest"] == xxhash.xxh3_128_hexdigest(body)
            assert headers["content-range"] == f"bytes {first}-{last}/{SIZE}"
        writer.close()
    expected = 0 if is_tls else SIZE + 9 * MIB - 6 + 1
    assert sum(sent) == expected


@pytest.mark.parametrize("is_tls", [False, True])
async def test_readers_that_take_nothing_are_let_go_and_hold_no_memory(
    api: Api, tmp_path: Path, is_tls: bool
) -> None:
    """Bytes of chunks that wait for their readers have a bound; these wait in the file."""
    server, client = _tls(tmp_path) if is_tls else (None, None)
    async with edge(api, server, stalled_s=2.0, max_unsent_bytes=20 * MIB) as port:
        stalled = [
            await asyncio.open_connection("127.0.0.1", port, ssl=client, limit=1024)
            for _ in range(4)
        ]
        for _, writer in stalled:
            writer.write(attacks.head("GET", PATH, f"Range: bytes=0-{SIZE - 1}"))
            await asyncio.sleep(0.3)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client)
        _, body = await _fetch(reader, writer, 0, SIZE - 1)
        assert len(body) == SIZE
        writer.close()
        await asyncio.sleep(2.5)
        for reader, writer in stalled:
            with pytest.raises((asyncio.IncompleteReadError, OSError)):
                async with asyncio.timeout(30.0):
                    await reader.readexactly(SIZE)
            writer.close()


async def test_a_reader_that_leaves_leaves_nothing_behind(api: Api) -> None:
    def num_open() -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    async with edge(api) as port:
        before = num_open()
        for _ in range(5):
            connection = await attacks.stalled_reader(target_at(port), PATH)
            await asyncio.sleep(0.2)
            connection.close()
        await _until(lambda: num_open() <= before)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert len((await _fetch(reader, writer, 0, 9))[1]) == 10
        writer.close()


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30.0):
        while not is_so():  # noqa: ASYNC110 - descriptors have no event
            await asyncio.sleep(0.05)
