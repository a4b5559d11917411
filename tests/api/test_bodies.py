"""JSON is read off the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest
from pydantic import BaseModel

from ratoon.api.http import bodies
from tests.api import requests
from tests.api.conftest import Api
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
