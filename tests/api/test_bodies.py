"""Bodies are read off the event loop, and inflated; bombs cost nothing."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import httpx
import pytest
import zstandard
from pydantic import BaseModel

from ratoon.api.contract import check_size
from ratoon.api.http import bodies
from ratoon.edge.bodies import Inflater
from ratoon.errors import ErrorCode, RatoonError
from tests.api import requests
from tests.api.conftest import MAX_BODY_BYTES, Api
from tests.api.wires import request_json
from tests.until import until


async def test_other_calls_go_on_while_a_body_is_read(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    await api.create_policy()
    read, threads = bodies._parsed, list[threading.Thread]()
    may_go_on = threading.Event()

    def slow(model: type[BaseModel], body: bytes) -> BaseModel:
        threads.append(threading.current_thread())
        may_go_on.wait()
        return read(model, body)

    monkeypatch.setattr(bodies, "_parsed", slow)
    posting = asyncio.create_task(api.http.call("Update", requests.update()))
    await until(lambda: threads)
    assert (await api.http.client.get("/v1/health")).status_code == 200
    assert not posting.done()
    may_go_on.set()
    assert (await posting).seq == 1
    assert threads
    assert threads[0] is not threading.main_thread()


MIB = 2**20
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "zstd": zstandard.ZstdCompressor(write_checksum=True).compress,
}
coding = pytest.fixture(params=list(COMPRESS))(lambda request: request.param)


def at_most(num_bytes: int) -> Callable[[int], None]:
    return partial(check_size, "Update", bound=num_bytes)


def _body(count: int = 2) -> bytes:
    message = requests.update(batch=requests.groups(count))
    message.ClearField("policy_id")
    return json.dumps(request_json(message)).encode()


async def _post(api: Api, content: object, **headers: str) -> httpx.Response:
    url = f"/v1/policies/{requests.POLICY}/update"
    headers = {"Content-Type": "application/json", **headers}
    return await api.http.client.post(url, content=content, headers=headers)  # pyright: ignore[reportArgumentType]


async def test_a_compressed_body_is_the_same_request(api: Api, coding: str) -> None:
    await api.create_policy()
    plain = await _post(api, _body())
    packed = COMPRESS[coding](_body())

    async def dribble() -> AsyncIterator[bytes]:
        for start in range(0, len(packed), 7):
            yield packed[start : start + 7]

    for content in (packed, dribble()):
        answer = await _post(api, content, **{"Content-Encoding": coding})
        assert (answer.status_code, answer.json()) == (202, plain.json())


async def test_a_cut_or_longer_or_other_stream_is_malformed(api: Api, coding: str) -> None:
    await api.create_policy()
    packed = COMPRESS[coding](_body())
    for damaged in (packed[:-3], packed + b"more", _body()):
        answer = await _post(api, damaged, **{"Content-Encoding": coding})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "MALFORMED_BODY")
    assert api.engine.submissions == {}


async def test_a_body_is_bounded_by_what_it_inflates_to(api: Api, coding: str) -> None:
    packed = COMPRESS[coding](_body(500))
    assert len(packed) < MAX_BODY_BYTES < len(_body(500))
    answer = await _post(api, packed, **{"Content-Encoding": coding})
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "BODY_TOO_LARGE"


async def test_other_codings_are_refused_by_name(api: Api) -> None:
    for name in ("br", "gzip, gzip", "x" * 1000):
        answer = await _post(api, _body(), **{"Content-Encoding": name})
        assert (answer.status_code, answer.json()["error"]["field"]) == (422, "Content-Encoding")


def _bomb(coding: str, num_bytes: int) -> bytes:
    """Zeros, made without holding them."""
    block = bytes(MIB)
    if coding == "gzip":
        packer = zlib.compressobj(6, wbits=31)
    else:
        packer = zstandard.ZstdCompressor(level=3).compressobj()
    parts = [packer.compress(block) for _ in range(num_bytes // MIB)]
    return b"".join([*parts, packer.flush()])


def _peak_bytes() -> int:
    """Most memory of this process since it was last asked for."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")
    return int(line.split()[1]) * 1024


def test_a_bomb_is_given_up_without_memory(coding: str) -> None:
    """Zeros that are within the bound on bodies, and a hundred times as many as are sent."""
    bomb = _bomb(coding, 64 * MIB)
    growths: list[int] = []
    # The process has other threads, and the first run its allocator's: the least is the inflater's.
    for _ in range(3):
        _peak_bytes()
        before = _peak_bytes()
        pieces = Inflater(coding, check_size=at_most(256 * MIB)).pieces(bomb)
        with pytest.raises(RatoonError) as caught:
            deque(pieces, maxlen=0)
        growths.append(_peak_bytes() - before)
        assert caught.value.code is ErrorCode.BODY_TOO_LARGE
        assert "times" in caught.value.message
    assert min(growths) < 24 * MIB


def test_what_shrinks_as_batches_do_is_inflated_whole(coding: str) -> None:
    data = json.dumps(list(range(400_000))).encode()
    inflater = Inflater(coding, check_size=at_most(16 * MIB))
    packed = COMPRESS[coding](data)
    pieces = [
        p for i in range(0, len(packed), 65_536) for p in inflater.pieces(packed[i : i + 65_536])
    ]
    inflater.check_end()
    assert b"".join(pieces) == data
