"""Request heads that two readers may take for two requests: 400, before the application runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from starlette.types import Receive, Scope, Send

from tests.api.served import served

HOST = b"Host: localhost\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
BODY = b"\r\n2\r\nab\r\n0\r\n\r\n"
GET = b"GET / HTTP/1.1\r\n"
POST = b"POST / HTTP/1.1\r\n"

REFUSED = {
    "no host": GET + b"\r\n",
    "two hosts": GET + HOST + b"Host: evil.example\r\n\r\n",
    "the same host twice": GET + HOST + HOST + b"\r\n",
    "two hosts in HTTP/1.0": b"GET / HTTP/1.0\r\n" + HOST + HOST + b"\r\n",
    "an empty host": GET + b"Host:\r\n\r\n",
    "a user": GET + b"Host: user@localhost\r\n\r\n",
    "a list of hosts": GET + b"Host: localhost, evil.example\r\n\r\n",
    "a host with a space": GET + b"Host: local host\r\n\r\n",
    "a host with a path": GET + b"Host: localhost/x\r\n\r\n",
    "a host that is no ASCII": GET + b"Host: l\xc3\xb6calhost\r\n\r\n",
    "a port that is a name": GET + b"Host: localhost:http\r\n\r\n",
    "two ports": GET + b"Host: localhost:80:80\r\n\r\n",
    "a port that is none": GET + b"Host: localhost:65536\r\n\r\n",
    "an open bracket": GET + b"Host: [::1\r\n\r\n",
    "a host before the colon": GET + b"Host : localhost\r\n\r\n",
    "a target of another host": b"GET http://evil.example/ HTTP/1.1\r\n" + HOST + b"\r\n",
    "a target with a user": b"GET http://a@localhost/ HTTP/1.1\r\n" + HOST + b"\r\n",
    "a target of another port": b"GET http://localhost:1/ HTTP/1.1\r\n" + HOST + b"\r\n",
    "a target of a file": b"GET file://localhost/ HTTP/1.1\r\n" + HOST + b"\r\n",
    "a target that is a host": b"GET localhost:80 HTTP/1.1\r\n" + HOST + b"\r\n",
    "a folded line": GET + HOST + b"X: a\r\n b\r\n\r\n",
    "lines that end in LF": b"GET / HTTP/1.1\nHost: localhost\n\n",
    "one line that ends in LF": GET + HOST + b"X: a\nY: b\r\n\r\n",
    "one line that ends in CR": GET + HOST + b"X: a\rY: b\r\n\r\n",
    "a NUL": GET + HOST + b"X: a\x00\r\n\r\n",
    "a name that is none": GET + HOST + b"X(: a\r\n\r\n",
    "a name with a space": GET + HOST + b"X : a\r\n\r\n",
    "no name": GET + HOST + b": a\r\n\r\n",
    "two lengths": POST + HOST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nabc",
    "the same length twice": POST + HOST + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\nab",
    "a list of lengths": POST + HOST + b"Content-Length: 2, 2\r\n\r\nab",
    "a length with a sign": POST + HOST + b"Content-Length: +2\r\n\r\nab",
    "a length and chunks": POST + HOST + b"Content-Length: 2\r\n" + CHUNKED + BODY,
    "chunks and a length": POST + HOST + CHUNKED + b"Content-Length: 2\r\n" + BODY,
    "chunks twice": POST + HOST + CHUNKED + CHUNKED + BODY,
    "chunks in gzip": POST + HOST + b"Transfer-Encoding: gzip, chunked\r\n" + BODY,
    "chunks in HTTP/1.0": b"POST / HTTP/1.0\r\n" + HOST + CHUNKED + BODY,
    "HTTP/0.9": b"GET /\r\n" + HOST + b"\r\n",
    "HTTP/2.0": b"GET / HTTP/2.0\r\n" + HOST + b"\r\n",
}
ANSWERED = {
    "a name": GET + HOST + b"\r\n",
    "a name with a port": GET + b"Host: my_host.example:8000\r\n\r\n",
    "an address": GET + b"Host: 127.0.0.1:80\r\n\r\n",
    "an IPv6 address": GET + b"Host: [fe80::1%25eth0]:80\r\n\r\n",
    "an empty port": GET + b"Host: localhost:\r\n\r\n",
    "HTTP/1.0 without a host": b"GET / HTTP/1.0\r\n\r\n",
    "a target with its host": b"GET http://LocalHost/ HTTP/1.1\r\n" + HOST + b"\r\n",
    "an empty line ahead": b"\r\n" + GET + HOST + b"\r\n",
    "chunks": POST + HOST + CHUNKED + BODY,
}


class App:
    """Answers 200 once it has the whole body; keeps the headers that it was given."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.num_calls = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_calls += 1
        while (await receive()).get("more_body", False):
            pass
        self.headers = list(scope["headers"])
        headers = [(b"content-length", b"2"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
async def port(app: App) -> AsyncIterator[int]:
    async with served(app) as port:
        yield port


async def _answer(port: int, sent: bytes) -> tuple[int, bytes]:
    """Status and body of the answer, after which the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    async with asyncio.timeout(5):
        answer = await reader.read(-1)
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


async def test_a_head_of_two_meanings_is_refused(app: App, port: int) -> None:
    """RFC 9112, 3.2, 3.2.2, 5.2, 6.1, 6.3. Most went to the parser, which took some of them."""
    for name, sent in REFUSED.items():
        status, body = await _answer(port, sent)
        assert (status, json.loads(body)["error"]["code"]) == (400, "MALFORMED_BODY"), name
        assert app.num_calls == 0, name
    status, body = await _answer(port, POST + HOST + CHUNKED + b"\r\n2\nab\n0\n\n")
    assert (status, json.loads(body)["error"]["code"]) == (400, "MALFORMED_BODY")


async def test_other_heads_are_answered(port: int) -> None:
    for name, sent in ANSWERED.items():
        assert await _answer(port, sent) == (200, b"ok"), name


async def test_a_second_request_is_looked_at_too(app: App, port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(POST + HOST + b"Connection: keep-alive\r\nContent-Length: 2\r\n\r\nab")
    writer.write(GET + HOST + HOST + b"\r\n")
    async with asyncio.timeout(5):
        await reader.read(-1)
    writer.close()
    assert app.num_calls == 1


async def test_a_trailer_is_no_header(app: App, port: int) -> None:
    """What follows a body was added to the headers, of a request that is being answered."""
    trailer = b"Host: evil.example\r\nAuthorization: Bearer x\r\nX-Late: 1\r\n"
    sent = POST + HOST + CHUNKED + b"\r\n2\r\nab\r\n0\r\n" + trailer + b"\r\n"
    assert await _answer(port, sent) == (200, b"ok")
    assert app.headers == [(b"host", b"localhost"), (b"transfer-encoding", b"chunked")]
