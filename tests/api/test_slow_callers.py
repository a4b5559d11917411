"""Callers that send or read slowly, or not at all, cost a bounded time and a bounded memory."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest
from starlette.types import Receive, Scope, Send

from harness.attacks.floods import FLOODS
from harness.attacks.http2 import PREFACE, SETTINGS, Sent, frame, message_calls, withheld_messages
from ratoon.api.grpc import intake
from ratoon.api.grpc.server import GRPC_BOUNDS, start_grpc
from ratoon.api.http.app import create_app
from ratoon.edge import grpc_proxy
from ratoon.edge.budget import EdgeBounds
from ratoon.edge.turns import MAX_UNJUDGED, MAX_UNJUDGED_OF_CONNECTION
from ratoon_proto.v1 import operation_pb2, service_pb2
from ratoon_proto.v1.service_pb2_grpc import PolicyServiceStub
from tests.api import requests
from tests.api.conftest import MAX_MESSAGE_BYTES, Api
from tests.api.open_gate import OPEN_GATE
from tests.api.served import served
from tests.until import until

MIB = 2**20
PATH = f"/v1/policies/{requests.POLICY}/update"
HEADERS = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


async def _answer(port: int, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """What comes back for `parts`, up to the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        writer.write(part)
        await asyncio.sleep(pause_s)
    answer = b""
    try:
        while data := await asyncio.wait_for(reader.read(MIB), 5.0):
            answer += data
            if b"\r\n\r\n" in answer and answer.endswith(b"}"):
                break
    except ConnectionError:
        pass
    writer.close()
    return answer


@pytest.mark.parametrize("sent", [b"", b"GET /v1/heal", b"GET / HTTP/1.1\r\nHost: x\r\nA: b\r\n"])
async def test_headers_that_do_not_come_end_the_connection(api: Api, sent: bytes) -> None:
    async with served(api.app, headers_s=0.2) as port:
        begin = time.monotonic()
        assert await _answer(port, sent) == b""
        assert 0.2 <= time.monotonic() - begin < 4.0


async def test_a_second_request_has_as_long_and_no_longer(api: Api) -> None:
    ask = b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with served(api.app, headers_s=0.3, keep_alive_s=90) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(ask)
            answer = await asyncio.wait_for(reader.readuntil(b"}"), 30.0)
            assert answer.startswith(b"HTTP/1.1 200")
        await asyncio.sleep(0.4)
        writer.write(ask[:20])
        assert await asyncio.wait_for(reader.read(MIB), 30.0) == b""
        writer.close()


async def test_headers_without_end_are_refused(api: Api) -> None:
    async with served(api.app) as port:
        line = b"X-Long: " + b"x" * 8000 + b"\r\n"
        answer = await _answer(port, HEADERS.encode(), *[line] * 20)
        assert answer.startswith(b"HTTP/1.1 400") or answer == b""


async def test_a_body_that_pauses_too_long_is_refused_and_ends_the_connection(api: Api) -> None:
    """The answer alone left it open, for as long as an idle one may be."""
    limits = api.limits.model_copy(update={"max_body_pause_s": 0.2})
    app = create_app(api.service, limits, gate=OPEN_GATE)
    async with served(app, keep_alive_s=90) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{HEADERS}Content-Length: 99\r\n\r\n{{".encode())
        answer = await asyncio.wait_for(reader.read(), 30.0)
        writer.close()
    assert b"408" in answer.splitlines()[0]
    assert b"REQUEST_TIMEOUT" in answer


async def test_a_body_that_dribbles_has_an_end_too(api: Api) -> None:
    limits = api.limits.model_copy(update={"max_body_s": 0.3})
    async with served(create_app(api.service, limits, gate=OPEN_GATE)) as port:
        head = f"{HEADERS}Content-Length: 9999\r\n\r\n".encode()
        begin = time.monotonic()
        answer = await _answer(port, head, *[b" "] * 12, pause_s=0.05)
    # Whoever still sends may not get to read why.
    assert b"REQUEST_TIMEOUT" in answer or answer == b""
    assert time.monotonic() - begin < 5.0


async def test_a_reader_that_takes_nothing_is_let_go() -> None:
    """And others are refused meanwhile, rather than held in memory."""
    ended = asyncio.Event()

    async def large(scope: Scope, _: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(16 * MIB)})
        ended.set()

    ask = b"GET /v1/policies/p/files/d HTTP/1.1\r\nHost: x\r\n\r\n"
    async with served(large, stalled_s=1.0, max_unsent_bytes=20 * MIB) as port:
        _, stalled = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        stalled.write(ask)
        await asyncio.wait_for(ended.wait(), 5.0)
        await asyncio.sleep(0.2)
        answer = await _answer(port, ask)
        assert answer.startswith(b"HTTP/1.1 429")
        assert b"retry-after: 1" in answer
        await asyncio.sleep(1.2)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ask)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        stalled.close()


async def test_a_chunk_counts_before_it_is_read() -> None:
    """Fifty readers that come at once had fifty chunks in memory."""
    release, asked = asyncio.Event(), 0

    async def slow(scope: Scope, _: Receive, send: Send) -> None:
        nonlocal asked
        asked += "/files/" in scope["path"]
        if "/files/" in scope["path"]:
            await release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    def ask(path: str) -> bytes:
        return f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()

    async with served(slow, max_unsent_bytes=48 * MIB) as port:
        fetches = [
            asyncio.create_task(_answer(port, ask("/v1/policies/p/files/d"))) for _ in range(10)
        ]
        assert len((await asyncio.wait(fetches, timeout=1.0))[0]) == 7
        assert (await _answer(port, ask("/v1/health"))).startswith(b"HTTP/1.1 200")
        release.set()
        answers = [(await fetch)[9:12] for fetch in fetches]
    assert (sorted(answers), asked) == ([b"200"] * 3 + [b"429"] * 7, 3)


@asynccontextmanager
async def gateway(
    api: Api, bounds: EdgeBounds = GRPC_BOUNDS, **changes: float
) -> AsyncIterator[int]:
    running = await start_grpc(
        api.service,
        api.limits.model_copy(update=changes),
        gate=OPEN_GATE,
        host="127.0.0.1",
        port=0,
        max_message_bytes=MAX_MESSAGE_BYTES,
        bounds=bounds,
    )
    yield running.port
    await running.stop(None)


async def test_half_a_message_is_waited_for_only_so_long(api: Api) -> None:
    sent, begin = Sent(), time.monotonic()
    async with gateway(api, max_body_s=0.3) as port:
        calls = withheld_messages(
            ("127.0.0.1", port), rpcs=["Update"], num_streams=1, message_bytes=1000,
            seconds=60.0, sent=sent,
        )  # fmt: skip
        calling = asyncio.create_task(calls)
        await until(lambda: sent.num_ended)
        calling.cancel()
    assert 0.3 <= time.monotonic() - begin < 5.0


async def test_only_so_many_chunks_wait_for_their_readers(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ratoon.edge.budget.PATIENCE_S", 0.2)
    started, release = asyncio.Event(), asyncio.Event()

    async def fetch(*_: object) -> bytes:
        started.set()
        await release.wait()
        return b"data"

    monkeypatch.setattr(api.engine, "fetch_chunk", fetch)
    request = service_pb2.FetchWeightsRequest(
        policy_id=requests.POLICY, digest="0" * 32, offset=0, length=4
    )
    few = replace(GRPC_BOUNDS, max_unsent_bytes=1)
    async with (
        gateway(api, few) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = PolicyServiceStub(channel)
        first = asyncio.ensure_future(stub.FetchWeights(request))
        await started.wait()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.FetchWeights(request)
        trailers = dict(caught.value.trailing_metadata() or ())
        detail = operation_pb2.ErrorDetail.FromString(trailers["ratoon-error-bin"])  # pyright: ignore[reportArgumentType]
        assert detail.details["resource"] == "unsent_bytes"
        release.set()
        assert (await first).data == b"data"
        assert (await stub.FetchWeights(request)).data == b"data"


@pytest.mark.parametrize(
    ("num_connections", "most"), [(1, MAX_UNJUDGED_OF_CONNECTION), (8, MAX_UNJUDGED)]
)
async def test_a_flood_of_calls_does_not_stand_before_those_of_others(
    api: Api, monkeypatch: pytest.MonkeyPatch, num_connections: int, most: int
) -> None:
    """4,352 calls without a key stood in line: a good caller waited for seconds."""
    begun, source, sent = 0, "127.0.0.2", Sent()
    read, never = intake.Intake.read, asyncio.Event()

    async def never_judged(self: intake.Intake, request: intake.Request, caller: str) -> Any:
        nonlocal begun
        if request.call.arrival.host == source:
            begun += 1
            await never.wait()
        return await read(self, request, caller)

    monkeypatch.setattr(intake.Intake, "read", never_judged)
    async with gateway(api) as port:
        flood = [
            asyncio.create_task(
                message_calls(
                    ("127.0.0.1", port), rpc="Health", message=b"", num_streams=200,
                    seconds=60.0, source=source, sent=sent,
                )
            )
            for _ in range(num_connections)
        ]  # fmt: skip
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            answer = await PolicyServiceStub(channel).Health(service_pb2.HealthRequest())
        assert answer.status == "ok"
        await until(lambda: sent.num_calls == 200 * num_connections and begun >= most)
        await asyncio.sleep(0.3)
        assert begun == most
        for one in flood:
            one.cancel()


async def test_what_grpc_says_at_once_is_passed_on(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its settings were lost where they came before the connection to it was known: a hang."""
    loop = asyncio.get_running_loop()
    connect = loop.create_unix_connection

    async def slow(*arguments: Any, **options: Any) -> Any:
        made = await connect(*arguments, **options)
        await asyncio.sleep(0.2)
        return made

    monkeypatch.setattr(loop, "create_unix_connection", slow)
    async with gateway(api) as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        answer = await PolicyServiceStub(channel).Health(service_pb2.HealthRequest(), timeout=5)
    assert answer.status == "ok"


async def test_what_a_caller_left_behind_is_not_served(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of its bytes is behind them: thousands of calls of nobody were answered first."""
    begun, num_calls = 0, 3000
    read = intake.Intake.read

    async def counted(self: intake.Intake, request: intake.Request, caller: str) -> Any:
        nonlocal begun
        begun += 1
        return await read(self, request, caller)

    monkeypatch.setattr(intake.Intake, "read", counted)
    _, frames_of = FLOODS["calls"]
    async with gateway(api) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(PREFACE + frame(SETTINGS, 0, 0, b""))
        writer.write(b"".join(frames_of(number) for number in range(num_calls)))
        writer.write_eof()
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionResetError):
                while await reader.read(MIB):
                    pass
        writer.close()
    assert begun < num_calls / 10


async def test_calls_that_are_answered_unjudged_are_forgotten(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those are that gRPC refuses itself: they kept their places for 2 s."""
    monkeypatch.setattr(grpc_proxy.Call, "judged", lambda _: None)
    sent = Sent()
    async with gateway(api) as port:
        calls = message_calls(
            ("127.0.0.1", port), rpc="Health", message=b"", num_streams=20, seconds=60.0, sent=sent
        )
        calling = asyncio.create_task(calls)
        await until(lambda: sent.num_ended > 2 * MAX_UNJUDGED or calling.done())
        calling.cancel()
    assert sent.num_ended > 2 * MAX_UNJUDGED


async def test_a_compressed_message_is_not_inflated(api: Api) -> None:
    """gRPC inflates before it looks at the size: a bomb would be memory of the process."""
    async with gateway(api) as port:
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(
            f"127.0.0.1:{port}", compression=grpc.Compression.Gzip, options=options
        ) as packed:
            request = service_pb2.GetPolicyRequest(policy_id="p" * 8 * MIB)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await PolicyServiceStub(packed).GetPolicy(request)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
