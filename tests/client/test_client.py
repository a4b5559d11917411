"""The clients as resources: what they are opened with, and what closing does."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from ratoon_client import (
    AsyncRatoonClient,
    InvalidArgumentError,
    RatoonClient,
    UnusableClientError,
)
from tests.client.conftest import serving
from tests.client.fake_service import FakeService
from tests.client.samples import LOSS, OPTIM, one_group


@pytest.mark.parametrize("target", ["", "ftp://host", "grpc://", "http://", "://x"])
def test_a_target_of_no_wire_is_refused_at_once(target: str):
    with pytest.raises(InvalidArgumentError) as caught:
        RatoonClient(target)
    assert caught.value.field == "target"


def test_a_url_that_is_none_is_refused():
    with (
        RatoonClient("http://host:port") as client,
        pytest.raises(InvalidArgumentError, match="target"),
    ):
        client.health()


def test_a_bare_address_is_grpc(service: FakeService, url: str, wire: str):
    if wire == "http":
        url += "/"
    with RatoonClient(url.removeprefix("grpc://")) as client:
        assert client.health().is_ok
    assert service.calls["Health"] == 1


def test_a_closed_client_says_so_and_closes_again(client: RatoonClient):
    session = client.policy("p")
    handle = session.discard_gradients()
    client.close()
    client.close()
    calls: list[Callable[[], object]] = [
        client.health,
        session.next_seq,
        handle.status,
        lambda: list(handle.watch()),
        client.policy("p").next_seq,
    ]
    for call in calls:
        with pytest.raises(UnusableClientError, match="the client is closed"):
            call()


async def test_what_a_closed_asynchronous_client_made_says_so_too(url: str, tmp_path: Path):
    """It was an error of the library below, or the client opened itself again."""
    client = AsyncRatoonClient(url)
    session = client.policy("p")
    handle = await session.discard_gradients()
    await client.close()
    await client.close()
    calls: list[Awaitable[object]] = [
        client.health(),
        session.resync(),
        session.discard_gradients(),
        handle.status(),
        anext(handle.watch()),
        client.pull_weights("p", tmp_path),
    ]
    for call in calls:
        with pytest.raises(UnusableClientError, match="the client is closed"):
            await call


async def test_calls_that_were_about_to_be_sent_say_so_too(service: FakeService):
    with serving(service, "http") as url:
        client = AsyncRatoonClient(url)
        await client.health()
        lists = [asyncio.create_task(client.list_policies()) for _ in range(20)]
        for _ in range(5):
            await asyncio.sleep(0)
        await client.close()
        ends = await asyncio.gather(*lists, return_exceptions=True)
    errors = [end for end in ends if not isinstance(end, list)]
    assert {type(error) for error in errors} == {UnusableClientError}


FORKED = """
import os, sys
from ratoon_client import RatoonClient, UnusableClientError

def tried(call):
    try:
        print(call())
    except UnusableClientError as error:
        print(error)

def forked(*calls):
    sys.stdout.flush()
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        return
    for call in calls:
        tried(call)
    sys.stdout.flush()
    os._exit(0)

def fresh():
    with RatoonClient(sys.argv[1], timeout_s=20.0) as client:
        return client.health()

fresh()
forked(fresh)
with RatoonClient(sys.argv[1], timeout_s=20.0) as client:
    client.health()
    session = client.policy("p")
    forked(client.health, session.next_seq, client.close, fresh)
    assert client.health().is_ok
"""


def test_a_client_of_the_process_before_a_fork_says_so(url: str, wire: str):
    """It waited for a thread that the fork does not copy; over gRPC a new one does too."""
    command = [sys.executable, "-W", "ignore", "-c", FORKED, url]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    well = "Health(status='ok')"
    after_closing, first, second, closed, fresh = done.stdout.splitlines()
    assert after_closing == well
    assert first == second
    assert "make a client in each process" in first
    assert closed == "None"
    assert "start processes with spawn" in fresh if wire == "grpc" else fresh == well


async def test_an_asynchronous_client_of_another_process_says_so(
    url: str, monkeypatch: pytest.MonkeyPatch
):
    async with AsyncRatoonClient(url) as client:
        await client.health()
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 1)
            with pytest.raises(UnusableClientError, match="make a client in each process"):
                await client.health()
        assert (await client.health()).is_ok


def test_closing_ends_the_threads(url: str):
    before = set(threading.enumerate())
    client = RatoonClient(url)
    client.forward("p", one_group()).result()
    client.close()
    left = [thread for thread in set(threading.enumerate()) - before if thread.is_alive()]
    assert not [thread.name for thread in left if thread.name.startswith(("ratoon", "asyncio"))]


async def test_both_clients_have_the_same_calls(url: str):
    def calls(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert calls(AsyncRatoonClient) == calls(RatoonClient)
    async with AsyncRatoonClient(url) as client:
        handle = await client.update("p", one_group(), loss=LOSS, optim=OPTIM, seq=1)
        assert (await handle.result()).version == 1
        assert [state.state async for state in handle.watch()] == ["done"]
        assert (await client.get_operation(handle.operation_id)).step is not None
        assert (await client.cancel_operation(handle.operation_id)).state == "done"
        with pytest.raises(InvalidArgumentError, match="one of them"):
            await client.discard_gradients("p", seq=2, request_id="x")
