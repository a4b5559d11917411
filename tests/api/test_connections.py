"""Connections that callers hold open, or fill, for nothing."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast

import httpx
import pytest
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from harness.attacks import http as attacks
from harness.attacks.http import Connection, Target
from ratoon.api.contract import LISTS_BYTES, SMALL_BYTES, body_bound_at
from ratoon.api.http.app import create_app
from ratoon.config import LimitsConfig
from tests.api.conftest import Api
from tests.api.open_gate import OPEN_GATE
from tests.api.served import served, target_at
from tests.api.wires import http_error
from tests.until import until

MIB = 2**20
BATCH = "/v1/policies/p/update"
FETCH = "/v1/policies/p/files/abc"


class App:
    """Answers at once, but what is asked below `/held` and for files: after `release`."""

    def __init__(self, size_bytes: int = 2) -> None:
        self.size_bytes = size_bytes
        self.release = asyncio.Event()
        self.paths: list[str] = []
        self.is_greedy = False
        self.num_body_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        held = scope["path"].startswith(("/held", "/v1/policies"))
        # As Serve's proxy, which reads whether its replica does or not.
        reading = asyncio.create_task(self._read(receive)) if self.is_greedy else None
        if held:
            await self.release.wait()
        if reading is not None:
            reading.cancel()
        length = str(self.size_bytes).encode()
        headers = [(b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": bytes(self.size_bytes)})

    async def _read(self, receive: Receive) -> None:
        while (message := await receive())["type"] == "http.request":
            self.num_body_bytes += len(message.get("body", b""))


async def _status(port: int, path: str) -> int:
    connection = await target_at(port).connect()
    await connection.send(attacks.head("GET", path, "Connection: close"))
    async with asyncio.timeout(5.0):
        status = await connection.answer()
    connection.close()
    return status


@pytest.mark.parametrize(
    "attack", [attacks.newline_after_answer, attacks.byte_of_body_after_answer]
)
async def test_what_is_no_request_does_not_keep_a_connection(
    attack: Callable[[Target], Awaitable[Connection]],
) -> None:
    """Any byte ended the idle timer, and no other was begun: 8,192 of them closed the port."""
    async with served(App(), keep_alive_s=1) as port:
        connection = await attack(target_at(port))
        assert await connection.seconds_until_end(5.0) < 2.0
        connection.close()


async def test_newlines_without_end_are_no_request_either() -> None:
    async with served(App(), keep_alive_s=1) as port:
        connection = await attacks.newline_after_answer(target_at(port))
        for _ in range(8):
            await asyncio.sleep(0.2)
            connection.writer.write(b"\r\n")
        assert await connection.seconds_until_end(5.0) < 2.0
        connection.close()


async def test_a_request_behind_another_keeps_no_stalled_reader() -> None:
    """Its headers ended the timer of the answer that nobody reads."""
    async with served(App(16 * MIB), stalled_s=0.6) as port:
        connection = await attacks.stalled_reader_with_another(target_at(port), "/")
        await asyncio.sleep(1.0)
        connection.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert await connection.seconds_until_end(5.0) < 1.0
        connection.close()


async def test_a_reader_of_little_is_let_go_too() -> None:
    """What was under the high-water mark of 64 KiB had no timer, and a closing waited for it."""
    async with served(App(60_000), keep_alive_s=1, stalled_s=0.5) as port:
        connection = await target_at(port).connect(receive_bytes=4096)
        connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
        answered = 0
        while answered < 200:
            # One after the other until the kernel takes no more.
            connection.writer.write(attacks.head("GET", "/"))
            await asyncio.sleep(0.005)
            answered += 1
        await asyncio.sleep(1.0)
        connection.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert await connection.seconds_until_end(5.0) < 1.0
        connection.close()


async def test_requests_are_answered_one_at_a_time() -> None:
    """12,000 of them in 256 KiB were as many objects; now what comes early is not read."""
    app = App()
    async with served(app) as port:
        connection = await attacks.many_at_once(target_at(port), "/v1/health", 5000)
        assert await connection.answer() == 200
        assert await connection.seconds_until_end(5.0) < 2.0
        connection.close()
    assert app.paths == ["/v1/health"]


@pytest.mark.parametrize("sent", [attacks.endless_header, attacks.endless_trailer])
async def test_a_line_without_end_is_cut(sent: Callable[..., Awaitable[int]]) -> None:
    """The parser keeps a header until it is whole, and said nothing of it before."""
    app = App()
    async with served(app) as port:
        args = (BATCH,) if sent is attacks.endless_trailer else ()
        assert await sent(target_at(port), *args, 64 * MIB) < 8 * MIB
        app.release.set()


async def test_headers_beyond_a_hundred_are_refused() -> None:
    async with served(App()) as port:
        connection = await target_at(port).connect()
        await connection.send(attacks.head("GET", "/", *["a: b"] * 101))
        assert await connection.answer() == 400
        connection.close()


@pytest.mark.parametrize(
    ("method", "path", "most"),
    [
        ("GET", "/held/events", 0),
        ("DELETE", "/v1/policies/p", 0),
        ("POST", "/v1/policies", 64 * 1024),
        ("POST", "/held/nothing", 64 * 1024),
        ("POST", BATCH, MIB),
        ("PUT", "/v1/policies/p/uploads/u/parts/0", MIB),
        ("POST", "/v1/policies/p/gradients", MIB),
    ],
)
async def test_of_a_body_no_more_is_passed_on_than_its_route_reads(
    method: str, path: str, most: int
) -> None:
    """Serve's proxy reads all that comes, and kept it until the answer."""
    app = App()
    app.is_greedy = True
    async with served(app, max_body_bytes=MIB) as port:
        await attacks.endless_body(target_at(port), method, path, 8 * MIB)
        await until(lambda: app.num_body_bytes >= most)
        app.release.set()
        await asyncio.sleep(0.1)
    # One byte more says that it was too large.
    assert app.num_body_bytes in (most, most + 1)


@pytest.mark.parametrize(
    ("coding", "is_chunked"), [("identity", False), ("identity", True), ("gzip", False)]
)
async def test_a_body_over_its_routes_bound_is_refused_at_once(
    api: Api, coding: str, is_chunked: bool
) -> None:
    """The connection passes on one byte more than the bound, and the rest was waited for."""
    pad = b" " * MIB
    data = gzip.compress(pad) if coding == "gzip" else pad
    app = create_app(api.service, LimitsConfig(max_body_pause_s=2.0), gate=OPEN_GATE)

    async def chunks() -> AsyncIterator[bytes]:
        yield data

    async with served(app) as port, httpx.AsyncClient() as client:
        answer = await client.post(
            f"http://127.0.0.1:{port}/v1/policies",
            content=chunks() if is_chunked else data,
            headers={"Content-Type": "application/json", "Content-Encoding": coding},
        )
    detail = http_error(answer).detail
    assert (answer.status_code, detail.code) == (413, "BODY_TOO_LARGE")
    assert detail.expected == "at most 65536 bytes"
    assert "parts" not in detail.message


def test_routes_that_take_a_batch_are_known(api: Api) -> None:
    """Bytes beyond a route's bound are not passed on: one that is missing would never be whole."""
    found: dict[str, bool] = {}
    for route in api.app.routes:
        if isinstance(route, APIRoute) and route.body_field is not None:
            model = cast("type[BaseModel]", route.body_field.field_info.annotation)
            has_batch = bool({"batch", "groups", "data"} & model.model_fields.keys())
            method = next(iter(route.methods or ()))
            small = LISTS_BYTES if {"names", "prompt"} & {*model.model_fields} else SMALL_BYTES
            expected = 4 * MIB if has_batch else small
            assert body_bound_at(method, route.path, 4 * MIB) == expected
            found[route.name] = has_batch
    assert sum(found.values()) == 5
    assert len(found) > 4


async def test_bodies_of_all_connections_have_one_bound() -> None:
    """4,352 bodies that wait for their last byte were as much memory as their senders liked."""
    app = App()
    app.is_greedy = True
    async with served(app, max_body_bytes=MIB, max_held_bytes=3 * MIB) as port:
        target = target_at(port)
        held = [await attacks.withheld_body(target, BATCH, MIB) for _ in range(3)]
        more = await target.connect()
        await more.send(attacks.head("POST", BATCH, f"Content-Length: {MIB}"))
        assert await more.answer() == 429
        assert await _status(port, "/v1/health") == 200
        held.pop().close()
        await asyncio.sleep(0.1)
        again = await attacks.withheld_body(target, BATCH, MIB)
        await again.send(b" ")
        app.release.set()
        assert await again.answer() == 200
        for connection in (*held, more, again):
            connection.close()


async def test_chunked_bodies_have_that_bound_too() -> None:
    app = App()
    app.is_greedy = True
    async with served(app, max_body_bytes=4 * MIB, max_held_bytes=2 * MIB) as port:
        assert await attacks.endless_body(target_at(port), "POST", BATCH, 16 * MIB) < 12 * MIB
        assert app.num_body_bytes <= 2 * MIB
        app.release.set()


async def test_what_is_fetched_is_told_by_the_path_alone() -> None:
    """`/v1/health?/files/` took the place of a chunk, and `/%66iles/` none."""
    app = App()
    async with served(app, max_unsent_bytes=20 * MIB) as port:
        other = asyncio.create_task(_status(port, "/held?/files/"))
        first = asyncio.create_task(_status(port, FETCH.replace("files", "%66iles")))
        await until(lambda: len(app.paths) == 2)
        assert await _status(port, "/v1/health?/files/") == 200
        assert await _status(port, "/v1/files/files/files") == 200
        assert await _status(port, FETCH + "?offset=0&length=1") == 429
        assert await _status(port, "/v1/policies/p/weights/3/files/model.safetensors") == 429
        app.release.set()
        assert (await first, await other) == (200, 200)


async def test_stalled_readers_of_other_answers_do_not_close_the_port() -> None:
    """Readers of the API document, which needs no key, made every request a 429 for a minute."""
    app = App(8 * MIB)
    async with served(app, max_unsent_bytes=20 * MIB) as port:
        stalled = [await attacks.stalled_reader(target_at(port), "/openapi.json") for _ in range(9)]
        await asyncio.sleep(0.5)
        assert await _status(port, "/v1/health") == 200
        for connection in stalled:
            connection.close()


async def test_a_host_has_its_share_of_connections() -> None:
    """And who waits for nothing gives way to who comes."""
    async with served(App(), max_connections_of_host=4) as port:
        target = target_at(port)
        silent = [await attacks.silent(target) for _ in range(8)]
        assert await _status(port, "/v1/health") == 200
        assert await silent[0].seconds_until_end(2.0) < 1.0
        held = [await target.connect() for _ in range(4)]
        for connection in held:
            await connection.send(attacks.head("GET", "/held"))
        await asyncio.sleep(0.2)
        # All are being answered: none gives way.
        assert await _status(port, "/v1/health") == 0
        for connection in (*silent, *held):
            connection.close()


async def test_a_full_port_makes_room_for_who_comes() -> None:
    async with served(App(), max_connections=4) as port:
        silent = [await attacks.silent(target_at(port)) for _ in range(16)]
        assert await _status(port, "/v1/health") == 200
        for connection in silent:
            connection.close()


async def test_an_upgraded_connection_would_have_no_bounds() -> None:
    """A WebSocket left the class for another that has none of its timers."""
    async with served(App(), keep_alive_s=1) as port:
        connection = await target_at(port).connect()
        upgrade = (
            "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        )  # fmt: skip
        await connection.send(attacks.head("GET", "/", *upgrade))
        assert await connection.answer() == 200
        assert await connection.seconds_until_end(5.0) < 2.0
        connection.close()


async def test_a_malformed_second_request_does_not_cut_into_an_answer() -> None:
    app = App()
    async with served(app) as port:
        connection = await target_at(port).connect()
        await connection.send(attacks.head("GET", "/held") + b"\x00nonsense\r\n\r\n")
        await asyncio.sleep(0.2)
        app.release.set()
        assert await connection.answer() == 200
        connection.close()


@pytest.mark.parametrize("name", ["X-Forwarded-For", "x-forwarded-for"])
async def test_a_caller_says_nothing_about_its_own_address(name: str) -> None:
    """uvicorn believes whoever calls from loopback: the audit log named the peer it was told."""
    peers: list[str] = []

    async def app(scope: Scope, _: Receive, send: Send) -> None:
        peers.append(scope["client"][0])
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async with served(app) as port:
        connection = await target_at(port).connect()
        await connection.send(attacks.head("GET", "/", f"{name}: 203.0.113.7"))
        assert await connection.answer() == 204
        connection.close()
    assert peers == ["127.0.0.1"]
