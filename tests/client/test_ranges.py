"""Ranges of files over HTTP, against peers that do what a peer can do."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import xxhash

from ratoon_client import ClientConfig, IntegrityError, RatoonApiError, TlsError, TransportError
from ratoon_client.transport.http_wire import HttpTransport
from ratoon_client.transport.ranges import RangeReader
from ratoon_client.transport.target import ssl_context
from ratoon_proto.types import WeightFile
from tests.certificates import make_authority

DATA = bytes(range(256)) * 4
FILE = WeightFile(name="a.bin", size_bytes=len(DATA), digest=xxhash.xxh3_128_hexdigest(DATA))
OFFSET, LENGTH = 300, 64
PART = DATA[OFFSET : OFFSET + LENGTH]
LONG_S, SHORT_S = 30.0, 0.3


class Peer:
    """Answers each request by `reply`; `heads` has the requests of each connection."""

    def __init__(self, listener: socket.socket, context: ssl.SSLContext | None) -> None:
        self.reply: Callable[[socket.socket], object] = lambda connection: connection.sendall(
            answer(206, PART)
        )
        self.heads: list[list[str]] = []
        # Connections whose other end has gone.
        self.left = threading.Semaphore(0)
        self._listener, self._context = listener, context
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(LONG_S)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._threads.append(
                    threading.Thread(target=self._serve, args=(connection,), daemon=True)
                )
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        heads: list[str] = []
        with suppress(OSError), connection:
            if self._context is not None:
                connection = self._context.wrap_socket(connection, server_side=True)
            self.heads.append(heads)
            with connection:
                while head := self._head(connection):
                    heads.append(head)
                    self.reply(connection)
        self.left.release()

    def _head(self, connection: socket.socket) -> str:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            if not (data := connection.recv(4096)):
                return ""
            head += data
        return head.decode()


def answer(status: int, body: bytes, *lines: str, length: int | None = None) -> bytes:
    """`length`: as it is said, where that is another than the body's."""
    said = len(body) if length is None else length
    head = (f"HTTP/1.1 {status} -", f'ETag: "{FILE.digest}"', f"Content-Length: {said}", *lines)
    return "\r\n".join((*head, "", "")).encode() + body


@contextmanager
def listening(
    family: socket.AddressFamily = socket.AF_INET, context: ssl.SSLContext | None = None
) -> Iterator[tuple[Peer, int]]:
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    listener = socket.create_server((host, 0), family=family)
    peer = Peer(listener, context)
    try:
        yield peer, listener.getsockname()[1]
    finally:
        peer.close()


@pytest.fixture
def peer_and_url() -> Iterator[tuple[Peer, str]]:
    with listening() as (peer, port):
        yield peer, f"http://127.0.0.1:{port}"


async def read(transport: HttpTransport, timeout_s: float = LONG_S) -> bytes:
    return await transport.read_file(
        "p", 1, FILE, offset=OFFSET, length=LENGTH, timeout_s=timeout_s
    )


def opened(url: str, context: ssl.SSLContext | None = None, in_flight: int = 4) -> HttpTransport:
    return HttpTransport(url, ClientConfig(fetches_in_flight=in_flight, api_key="key"), context)


def slowly(connection: socket.socket) -> None:
    """A byte now and then, each long before a wait for the peer would end."""
    for byte in answer(206, PART):
        connection.sendall(bytes([byte]))
        time.sleep(SHORT_S / 6)


async def test_a_connection_is_used_again(peer_and_url: tuple[Peer, str]) -> None:
    peer, url = peer_and_url
    transport = opened(f"{url}/behind/a%20proxy/")
    assert [await read(transport) for _ in range(3)] == [PART] * 3
    await transport.close()
    assert [len(heads) for heads in peer.heads] == [3]
    lines = peer.heads[0][2].split("\r\n")
    path = "/behind/a%20proxy/v1/policies/p/weights/1/files/a.bin"
    assert lines[0] == f"GET {path} HTTP/1.1"
    assert {
        f"Host: {url.removeprefix('http://')}",
        "Range: bytes=300-363",
        "Authorization: Bearer key",
        "Accept-Encoding: identity",
    } <= set(lines)
    assert "If-Range" not in peer.heads[0][2]
    assert peer.left.acquire(timeout=LONG_S)


async def test_as_many_connections_as_are_wanted_and_no_more(
    peer_and_url: tuple[Peer, str],
) -> None:
    peer, url = peer_and_url
    barrier = threading.Barrier(3)

    def together(connection: socket.socket) -> None:
        barrier.wait(LONG_S)
        connection.sendall(answer(206, PART))

    peer.reply = together
    transport = opened(url, in_flight=3)
    assert await asyncio.gather(*(read(transport) for _ in range(9))) == [PART] * 9
    await transport.close()
    assert len(peer.heads) == 3
    assert sum(map(len, peer.heads)) == 9


async def test_a_wait_for_others_takes_none_of_the_time_that_an_answer_has(
    peer_and_url: tuple[Peer, str],
) -> None:
    peer, url = peer_and_url
    good, asked = peer.reply, threading.Event()
    peer.reply = lambda _: asked.set()
    transport = opened(url, in_flight=1)
    first = asyncio.create_task(read(transport))
    assert await asyncio.to_thread(asked.wait, LONG_S)
    second = asyncio.create_task(read(transport, timeout_s=2.0))
    await asyncio.sleep(2.2)
    peer.reply = good
    first.cancel()
    assert await second == PART
    await transport.close()


@pytest.mark.parametrize("is_told", [True, False])
async def test_a_connection_that_the_service_closes_is_replaced(
    peer_and_url: tuple[Peer, str], is_told: bool
) -> None:
    peer, url = peer_and_url

    def once(connection: socket.socket) -> None:
        connection.sendall(answer(206, PART, *(["Connection: close"] if is_told else [])))
        connection.shutdown(socket.SHUT_RDWR)

    peer.reply = once
    transport = opened(url)
    for number in range(3):
        assert await read(transport) == PART
        assert await asyncio.to_thread(peer.left.acquire, timeout=LONG_S)
        assert len(peer.heads) == number + 1
    await transport.close()


@pytest.mark.parametrize("reply", [lambda _: None, slowly], ids=["silent", "trickling"])
async def test_what_does_not_end_in_time_is_abandoned(
    peer_and_url: tuple[Peer, str], reply: Callable[[socket.socket], object]
) -> None:
    peer, url = peer_and_url
    good, peer.reply = peer.reply, reply
    transport = opened(url, in_flight=1)
    begun = time.monotonic()
    with pytest.raises(TransportError, match=r"no whole answer in 0\.3 s|timed out"):
        await read(transport, SHORT_S)
    assert time.monotonic() - begun < SHORT_S + 5
    # The thread has hung up, and serves the next call, on another connection.
    assert await asyncio.to_thread(peer.left.acquire, timeout=LONG_S)
    peer.reply = good
    assert await read(transport) == PART
    assert len(peer.heads) == 2
    await transport.close()


async def test_a_call_that_is_cancelled_hangs_up(peer_and_url: tuple[Peer, str]) -> None:
    peer, url = peer_and_url
    asked = threading.Event()
    peer.reply = lambda _: asked.set()
    transport = opened(url, in_flight=1)
    call = asyncio.create_task(read(transport))
    assert await asyncio.to_thread(asked.wait, LONG_S)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await asyncio.to_thread(peer.left.acquire, timeout=LONG_S)
    await transport.close()


async def test_a_connection_that_comes_back_after_the_end_is_closed(
    peer_and_url: tuple[Peer, str],
) -> None:
    peer, url = peer_and_url
    reader = RangeReader(url, {}, None, in_flight=1, connect_timeout_s=LONG_S)
    connection = reader.connected(LONG_S)
    reader.close()
    reader.give_back(connection)
    assert await asyncio.to_thread(peer.left.acquire, timeout=LONG_S)


@pytest.mark.parametrize(
    ("reply", "error", "text"),
    [
        (answer(206, PART[:-1]), IntegrityError, "63 bytes, 64 were asked for"),
        (answer(206, PART + b"!!"), IntegrityError, "65 bytes, 64 were asked for"),
        (answer(206, PART[:-9], length=LENGTH), TransportError, "IncompleteRead"),
        (answer(206, b"", length=LENGTH), TransportError, "IncompleteRead"),
        (answer(200, DATA[:100], length=len(DATA)), TransportError, "IncompleteRead"),
        (b"HTTP/1.1 206 -\r\n\r\n" + PART, IntegrityError, "another file of this name"),
        (b"what?\r\n\r\n", TransportError, "what"),
        (answer(206, PART, f"Ratoon-Chunk-Digest: {'0' * 32}"), IntegrityError, "another digest"),
        (
            answer(404, b'{"error": {"code": "WEIGHTS_NOT_FOUND", "message": "was removed"}}'),
            RatoonApiError,
            "WEIGHTS_NOT_FOUND: was removed",
        ),
        (answer(404, b"<html>"), TransportError, "files/a.bin: HTTP 404"),
        (answer(502, b""), TransportError, "HTTP 502"),
        (answer(403, b"<html>"), RatoonApiError, "HTTP_403"),
        (answer(301, b"", "Location: http://127.0.0.1:9/"), RatoonApiError, "HTTP_301"),
    ],
)
async def test_an_answer_that_is_not_the_range_is_told(
    peer_and_url: tuple[Peer, str], reply: bytes, error: type[Exception], text: str
) -> None:
    """A cut may be tried again, bytes that a service means to be the range may not."""
    peer, url = peer_and_url

    def once(connection: socket.socket) -> None:
        connection.sendall(reply)
        connection.shutdown(socket.SHUT_WR)

    peer.reply = once
    transport = opened(url)
    with pytest.raises(error, match=text):
        await read(transport)
    await transport.close()


@pytest.mark.parametrize("length", [len(DATA), None], ids=["length", "chunked"])
async def test_all_of_the_file_has_the_range(
    peer_and_url: tuple[Peer, str], length: int | None
) -> None:
    """From a server, or a cache before it, that knows no ranges."""
    peer, url = peer_and_url
    head = f'HTTP/1.1 200 -\r\nETag: "{FILE.digest}"\r\n'
    whole = (
        f"{head}Content-Length: {length}\r\n\r\n".encode() + DATA
        if length
        else f"{head}Transfer-Encoding: chunked\r\n\r\n{len(DATA):x}\r\n".encode()
        + DATA
        + b"\r\n0\r\n\r\n"
    )
    peer.reply = lambda connection: connection.sendall(whole)
    transport = opened(url)
    assert [await read(transport) for _ in range(2)] == [PART] * 2
    await transport.close()
    # What follows the range is not read.
    assert len(peer.heads) == 2


def _has_ipv6() -> bool:
    with suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


@pytest.mark.skipif(not _has_ipv6(), reason="no IPv6 on this machine")
async def test_an_address_may_be_ipv6() -> None:
    with listening(socket.AF_INET6) as (peer, port):
        transport = opened(f"http://[::1]:{port}")
        assert await read(transport) == PART
        assert f"Host: [::1]:{port}" in peer.heads[0][0].split("\r\n")
        await transport.close()


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://[::1]", ("::1", 80)),
        ("http://example.test/prefix", ("example.test", 80)),
        ("https://example.test", ("example.test", 443)),
        ("https://[::1]:8443/", ("::1", 8443)),
    ],
)
async def test_a_port_left_out_is_the_schemes(
    url: str, address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def refuse(where: object, *_: object, **__: object) -> None:
        asked.append(where)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", refuse)
    context = ssl.create_default_context() if url.startswith("https") else None
    transport = opened(url, context)
    with pytest.raises(TransportError):
        await read(transport)
    assert asked == [address]
    await transport.close()


async def test_both_ends_are_verified(tmp_path: Path) -> None:
    servers, clients = make_authority("servers"), make_authority("clients")
    (tmp_path / "servers.pem").write_bytes(servers.pem)
    (tmp_path / "clients.pem").write_bytes(clients.pem)
    servers.issue(tmp_path / "cert.pem", tmp_path / "key.pem")
    clients.issue(tmp_path / "client.pem", tmp_path / "client-key.pem", "trainer")
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tmp_path / "clients.pem")
    theirs.verify_mode = ssl.CERT_REQUIRED
    theirs.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    known = ClientConfig(ca_file=tmp_path / "servers.pem")
    own = ClientConfig(
        ca_file=tmp_path / "servers.pem",
        cert_file=tmp_path / "client.pem",
        key_file=tmp_path / "client-key.pem",
    )
    strange = ClientConfig(ca_file=tmp_path / "clients.pem")
    with listening(context=theirs) as (peer, port):
        url = f"https://127.0.0.1:{port}"
        for config, error in ((strange, TlsError), (known, TransportError)):
            transport = opened(url, ssl_context(config))
            with pytest.raises(error):
                await read(transport)
            await transport.close()
        transport = opened(url, ssl_context(own))
        assert [await read(transport) for _ in range(2)] == [PART] * 2
        assert len(peer.heads[-1]) == 2
        # A wait under TLS can be abandoned, too.
        peer.reply = lambda _: None
        with pytest.raises(TransportError):
            await read(transport, SHORT_S)
        for _ in range(3):
            assert await asyncio.to_thread(peer.left.acquire, timeout=LONG_S)
        await transport.close()
