"""Files on their way to a reader: from the page cache, without being held in memory."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from harness.attacks import http as attacks
from ratoon.api.http import connection as connection_module
from ratoon.api.http import files
from ratoon.api.http.app import start_http
from ratoon.auth.keys import KeyFile, Scope
from ratoon.edge.budget import EdgeBounds
from ratoon.edge.tls import CertificateFiles, CertificateStore, server_context
from ratoon.edge.zero_copy import ZERO_COPY
from ratoon.stream.files import is_open_elsewhere
from ratoon.stream.versions import (
    find_named,
    list_versions,
    prune_versions,
    publish_version,
    version_folder,
)
from ratoon_proto.types import WeightFile, WeightKind
from tests.api import requests
from tests.api.conftest import Api
from tests.api.guarded import Guarded
from tests.api.served import target_at
from tests.certificates import make_authority

MIB = 2**20
# Less than the service's own, but more than the kernel takes for a reader that reads nothing.
CHUNK_BYTES = 6 * MIB
SIZE = 2 * CHUNK_BYTES + 3 * MIB + 5
PATH = f"/v1/policies/{requests.POLICY}/weights/0/files/model.safetensors"


@pytest.fixture(autouse=True)
def _smaller_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (files, connection_module):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK_BYTES)


@asynccontextmanager
async def edge(
    api: Api, context: ssl.SSLContext | None = None, **bounds: float
) -> AsyncIterator[int]:
    """The port of a service whose one file has `SIZE` bytes, three chunks of them."""
    path = api.weights / "model.safetensors"
    if path.stat().st_size != SIZE:
        path.write_bytes(os.urandom(SIZE))
    await api.create_policy()
    running = await start_http(
        api.app,
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
    """TLS contexts of a server and of its clients."""
    authority = make_authority("servers")
    (folder / "ca.pem").write_bytes(authority.pem)
    authority.issue(folder / "cert.pem", folder / "key.pem")
    files = CertificateFiles(cert=folder / "cert.pem", key=folder / "key.pem", client_ca=None)
    client = ssl.create_default_context(cafile=folder / "ca.pem")
    return server_context(CertificateStore(files)), client


async def _head(reader: asyncio.StreamReader, status: int) -> dict[str, str]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
    assert head[0].startswith(f"HTTP/1.1 {status}"), head
    return dict(line.lower().split(": ", 1) for line in head[1:] if line)


async def _fetch(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, range_header: str = ""
) -> tuple[dict[str, str], bytes]:
    """The whole file where no range is given."""
    writer.write(attacks.head("GET", PATH, *[f"Range: {range_header}"] * bool(range_header)))
    headers = await _head(reader, 206 if range_header else 200)
    return headers, await reader.readexactly(int(headers["content-length"]))


@pytest.mark.parametrize("is_tls", [False, True])
async def test_a_file_comes_as_it_is_and_the_connection_goes_on(
    api: Api, tmp_path: Path, sent: list[int], is_tls: bool
) -> None:
    server, client = _tls(tmp_path) if is_tls else (None, None)
    async with edge(api, server) as port:
        data = (api.weights / "model.safetensors").read_bytes()
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client)
        headers, body = await _fetch(reader, writer)
        assert body == data
        assert headers["etag"] == f'"{xxhash.xxh3_128_hexdigest(data)}"'
        ends = ((0, SIZE - 1), (7, CHUNK_BYTES + 6), (7, CHUNK_BYTES + 7), (SIZE - 1, SIZE - 1))
        for first, last in ends:
            headers, body = await _fetch(reader, writer, f"bytes={first}-{last}")
            assert body == data[first : last + 1]
            digest = xxhash.xxh3_128_hexdigest(body) if len(body) <= CHUNK_BYTES else None
            assert headers.get("ratoon-chunk-digest") == digest
            assert headers["content-range"] == f"bytes {first}-{last}/{SIZE}"
        writer.close()
    expected = 0 if is_tls else 2 * SIZE + 2 * CHUNK_BYTES + 2
    assert sum(sent) == expected


@pytest.mark.parametrize("is_tls", [False, True])
async def test_readers_that_take_nothing_are_let_go_and_hold_no_memory(
    api: Api, tmp_path: Path, is_tls: bool
) -> None:
    """Bytes of chunks that wait for their readers have a bound; these wait in the file."""
    server, client = _tls(tmp_path) if is_tls else (None, None)
    most = CHUNK_BYTES + CHUNK_BYTES // 4
    async with edge(api, server, stalled_s=1.0, max_unsent_bytes=most) as port:
        stalled = [
            await asyncio.open_connection("127.0.0.1", port, ssl=client, limit=1024)
            for _ in range(4)
        ]
        for reader, writer in stalled:
            writer.write(attacks.head("GET", PATH))
            await _head(reader, 200)
            await asyncio.sleep(0.1)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client)
        _, body = await _fetch(reader, writer)
        assert len(body) == SIZE
        writer.close()
        await asyncio.sleep(1.2)
        for reader, writer in stalled:
            with pytest.raises((asyncio.IncompleteReadError, OSError)):
                async with asyncio.timeout(30.0):
                    await reader.readexactly(SIZE)
            writer.close()


async def test_a_reader_that_leaves_leaves_nothing_behind(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[range] = []
    digest = files._digest

    def noted(file: int, start: int, stop: int) -> str:
        read.append(range(start, stop))
        return digest(file, start, stop)

    monkeypatch.setattr(files, "_digest", noted)

    def num_open() -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    async with edge(api) as port:
        before = num_open()
        for _ in range(5):
            connection = await attacks.stalled_reader(target_at(port), PATH)
            await asyncio.sleep(0.2)
            connection.close()
        await _until(lambda: num_open() <= before)
        # Nor are the chunks read that come after the first.
        assert read == [range(CHUNK_BYTES)] * 5
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert len((await _fetch(reader, writer, "bytes=0-9"))[1]) == 10
        writer.close()


async def _messages(
    app: Any, headers: dict[str, str], on_chunk: Callable[[], None]
) -> list[dict[str, Any]]:
    """What the application sends of the whole file to a server that has zero-copy sends."""
    messages: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        messages.append(message)
        if message["type"] == ZERO_COPY:
            on_chunk()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http",
        "method": "GET",
        "path": PATH,
        "query_string": b"",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        "extensions": {ZERO_COPY: {}},
    }
    await app(scope, receive, send)
    return messages


async def test_each_chunk_of_a_file_has_a_readers_time(api: Api) -> None:
    """The connection's timer is of one message."""
    (api.weights / "model.safetensors").write_bytes(bytes(SIZE))
    await api.create_policy()
    start, *chunks = await _messages(api.app, {}, lambda: None)
    assert start["status"] == 200
    assert [(chunk["offset"], chunk["count"], chunk["more_body"]) for chunk in chunks] == [
        (0, CHUNK_BYTES, True),
        (CHUNK_BYTES, CHUNK_BYTES, True),
        (2 * CHUNK_BYTES, SIZE - 2 * CHUNK_BYTES, False),
    ]


async def test_a_revoked_key_sees_no_more_of_a_file(api: Api, guarded: Guarded) -> None:
    (api.weights / "model.safetensors").write_bytes(bytes(SIZE))
    await api.create_policy()
    key = guarded.key(Scope.READ)

    def revoke() -> None:
        KeyFile(guarded.root).revoke(key.split("_")[1], time.time())

    start, *chunks = await _messages(guarded.app, {"Authorization": f"Bearer {key}"}, revoke)
    assert start["status"] == 200
    assert [chunk["offset"] for chunk in chunks] == [0]
    refused = guarded.audit()[-1]
    assert (refused["call"], refused["outcome"]) == ("fetch_weights", "UNAUTHENTICATED")


def _publish(root: Path, version: int) -> WeightFile:
    """A version of `SIZE` bytes. The one before it is pruned, and written over by the next."""

    def write(folder: Path) -> dict[str, str]:
        path = folder / "model.safetensors"
        with path.open("r+b" if path.exists() else "wb") as file:
            file.write(np.random.default_rng(version).bytes(SIZE))
        return {}

    manifest = publish_version(root, requests.POLICY, version, WeightKind.FULL, write, 0.0)
    prune_versions(root, list_versions(root)[-1:])
    return manifest.files[0]


@pytest.fixture
def published(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of versions that the service reads, the first of which is there."""
    root = tmp_path / "versions"

    async def weight_file(_: str, version: int, name: str) -> tuple[Path, WeightFile]:
        return find_named(root, version, name)

    monkeypatch.setattr(api.engine, "weight_file", weight_file)
    (api.weights / "model.safetensors").write_bytes(bytes(SIZE))
    _publish(root, 0)
    return root


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
@pytest.mark.parametrize("is_all_sent", [False, True])
async def test_a_slow_reader_gets_the_bytes_of_its_digest_whatever_is_published(
    api: Api, published: Path, sent: list[int], connection: str, is_all_sent: bool
) -> None:
    """Once the kernel had all, the reader's last megabytes were those of a later version."""
    async with edge(api) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=MIB)
        writer.write(attacks.head("GET", PATH, f"Connection: {connection}"))
        headers = await _head(reader, 200)
        body = bytearray()
        while is_all_sent and sum(sent) < SIZE:
            body += await reader.read(64 * 1024)
        for version in (1, 2):
            await asyncio.to_thread(_publish, published, version)
        body += await reader.readexactly(SIZE - len(body))
        assert headers["etag"] == f'"{xxhash.xxh3_128_hexdigest(body)}"'
        if connection == "close":
            async with asyncio.timeout(30.0):
                assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("end", ["next request", "close"])
async def test_a_file_is_let_go_once_its_reader_has_it(api: Api, published: Path, end: str) -> None:
    path = version_folder(published, 0) / "model.safetensors"
    async with edge(api) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await _fetch(reader, writer)
        assert is_open_elsewhere(path)
        if end == "close":
            writer.close()
        else:
            writer.write(attacks.head("GET", "/v1/health"))
        await _until(lambda: not is_open_elsewhere(path))
        writer.close()


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30.0):
        while not is_so():  # noqa: ASYNC110 - descriptors have no event
            await asyncio.sleep(0.05)
