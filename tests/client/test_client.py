"""The clients as resources: what they are opened with, and what closing does."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest

from ratoon_client import (
    AsyncRatoonClient,
    InvalidArgumentError,
    PolicyOptions,
    RatoonClient,
    ReceiverEvent,
    UnusableClientError,
    WeightManifest,
)
from tests.client.conftest import CONFIG, serving
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


def test_arguments_of_wrong_types_are_refused_by_field(
    service: FakeService, client: RatoonClient, root: Path
):
    """They were a TypeError of protobuf's."""
    any_client, session = cast("Any", client), cast("Any", client.policy("p"))
    calls: list[tuple[str, Callable[[], object]]] = [
        ("version", lambda: any_client.pull_weights("p", root, version="1")),
        ("version", lambda: any_client.weight_manifest("p", 1.5)),
        ("version", lambda: any_client.ack_weights("p", "r", version="1")),
        ("offset", lambda: any_client.fetch_weights("p", "0" * 32, offset="0", length=1)),
        (
            "expected_version",
            lambda: session.update(one_group(), loss=LOSS, optim=OPTIM, expected_version="1"),
        ),
        ("with_entropy", lambda: session.forward(one_group(), with_entropy="yes")),
        ("checkpoint_id", lambda: session.save_checkpoint(5)),
        ("include_seqs", lambda: session.optim_step(optim=OPTIM, include_seqs=[1.5])),
        ("include_seqs", lambda: session.optim_step(optim=OPTIM, include_seqs=1)),
        ("policy_id", lambda: any_client.get_policy(5)),
        ("policy_id", any_client.policy(5).next_seq),
        ("policy_id", lambda: any_client.create_policy(5, preset="tiny")),
        ("operation_id", lambda: any_client.cancel_operation(5)),
        ("part_index", lambda: any_client.upload_part("p", "u", "0", one_group())),
    ]
    for field, call in calls:
        with pytest.raises(InvalidArgumentError) as caught:
            call()
        assert caught.value.field == field
    assert set(service.calls) <= {"GetPolicy", "GetServerInfo"}


def test_none_is_the_services_default(service: FakeService, client: RatoonClient):
    """`lora=None` was refused: each caller built a dictionary of what it had."""
    none = dict.fromkeys(PolicyOptions.__annotations__)
    client.create_policy("q", **(none | {"preset": "tiny"}))  # pyright: ignore[reportArgumentType]
    client.create_policy("r", preset="tiny")
    first, second = [cast("Any", r) for name, r in service.requests if name == "CreatePolicy"]
    second.spec.policy_id = "q"
    assert first == second


def test_closing_ends_the_threads(url: str):
    before = set(threading.enumerate())
    client = RatoonClient(url)
    client.forward("p", one_group()).result()
    client.close()
    left = [thread for thread in set(threading.enumerate()) - before if thread.is_alive()]
    assert not [thread.name for thread in left if thread.name.startswith(("ratoon", "asyncio"))]


def test_a_call_on_the_clients_own_thread_is_refused(service: FakeService, root: Path):
    """It waited for itself, for ever and with it all other threads."""
    service.publish(1, {"a": b"1"})
    with serving(service, "grpc") as url, RatoonClient(url, config=CONFIG) as client:
        waits: list[Callable[[], Any]] = [lambda: client.get_policy("p"), client.close]
        for call in waits:
            receiver = client.weight_receiver("p", root, on_event=lambda _, call=call: call())
            with pytest.raises(UnusableClientError, match="on the client's own thread"):
                _ended(receiver.sync_once)
            service.publish(2, {"a": b"2"})
        assert client.health().is_ok


def test_a_watch_that_is_collected_on_the_clients_own_thread_ends(service: FakeService, root: Path):
    """The collector ran its end there, and that waited for itself."""
    service.publish(1, {"a": b"1"})
    with serving(service, "grpc") as url, RatoonClient(url, config=CONFIG) as client:
        cycle: list[object] = [client.watch_weights("p")]
        cycle.append(cycle)
        assert next(cast("Iterator[WeightManifest]", cycle[0])).version == 1
        del cycle

        def collect(_: ReceiverEvent) -> None:
            gc.collect()

        receiver = client.weight_receiver("p", root, on_event=collect)
        _ended(receiver.sync_once)
        assert client.health().is_ok


def _ended(call: Callable[[], object]) -> None:
    """The call, on a thread that may be left where it hangs."""
    ends: Future[object] = Future()

    def run() -> None:
        try:
            ends.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised by `ends.result`
            ends.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    ends.result(20.0)


async def test_both_clients_have_the_same_calls(url: str):
    def calls(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert calls(AsyncRatoonClient) == calls(RatoonClient)
    async with AsyncRatoonClient(url) as client:
        handle = await client.policy("p").update(one_group(), loss=LOSS, optim=OPTIM, seq=1)
        assert (await handle.result()).version == 1
        assert [state.state async for state in handle.watch()] == ["done"]
        assert (await client.get_operation(handle.operation_id)).step is not None
        assert (await client.cancel_operation(handle.operation_id)).state == "done"
