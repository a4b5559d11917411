"""The clients as resources: what they are opened with, and what closing does."""

from __future__ import annotations

import threading

import pytest

from ratoon_client import AsyncRatoonClient, InvalidArgumentError, RatoonClient
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
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="the client is closed"):
        client.health()
    with pytest.raises(RuntimeError, match="the client is closed"):
        session.next_seq()


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
