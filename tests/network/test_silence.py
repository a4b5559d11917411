"""Networks that swallow bytes, trickle or go away for a while, and clients that wait through it."""

from __future__ import annotations

import asyncio
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import pytest

from ratoon_client import ClientConfig, TransportError
from ratoon_client.transport import grpc_wire, http_wire
from tests.network.conftest import Bench, opened
from tests.network.proxy import Direction, Fault
from tests.network.samples import LOSS, OPTIM, batch
from tests.running_service import Service

pytestmark = [pytest.mark.e2e, pytest.mark.more]
OUTAGE_S = 12.0
NUM_SLOW_EACH = 50
# The longest of what the service waits for: headers, bodies, handshakes; and for a busy machine.
SLOW_END_S = 40.0
# Groups and tokens of an update that takes some seconds.
LONG = (96, 512)
# A dead connection is noticed in seconds, so that the tests do not take minutes.
IMPATIENT = ClientConfig(attempt_timeout_s=3.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowSenders:
    """Connections that began a request and send no more of it."""

    sockets: dict[str, list[socket.socket]]
    since: float

    def num_open(self) -> dict[str, int]:
        """Open connections by kind, for kinds that have some."""
        counts = {kind: sum(map(_is_open, sockets)) for kind, sockets in self.sockets.items()}
        return {kind: count for kind, count in counts.items() if count}


def _is_open(connection: socket.socket) -> bool:
    """Whether the other side has not ended it; an answer may come first."""
    with suppress(BlockingIOError):
        try:
            while connection.recv(65_536):
                pass
        except OSError as err:
            if isinstance(err, BlockingIOError):
                raise
        return False
    return True


@pytest.fixture(scope="module")
def slow_senders(service: Service) -> Iterator[SlowSenders]:
    """They are there during all tests of this module, and must not hinder any."""
    http = service.addresses.http.removeprefix("http://")
    head = f"POST /v1/policies HTTP/1.1\r\nHost: {http}\r\nContent-Type: application/json\r\n"
    begun = {
        "headers": (http, head.encode()),
        "body": (http, f"{head}Content-Length: 1000\r\n\r\n{{".encode()),
        "preface": (service.addresses.grpc, b"PRI * HTTP/2.0\r\n"),
    }
    with ExitStack() as stack:
        sockets: dict[str, list[socket.socket]] = {kind: [] for kind in begun}
        for kind, (address, data) in begun.items():
            host, _, port = address.rpartition(":")
            for _ in range(NUM_SLOW_EACH):
                connection = stack.enter_context(socket.create_connection((host, int(port))))
                connection.sendall(data)
                connection.setblocking(False)
                sockets[kind].append(connection)
        yield SlowSenders(sockets=sockets, since=time.monotonic())


@pytest.fixture(autouse=True)
def _among_slow_senders(slow_senders: SlowSenders) -> None:
    """Every test here has such neighbours."""


@pytest.fixture(autouse=True)
def _impatient_wires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_wire, "STREAM_TIMEOUT_S", 2.0)
    monkeypatch.setattr(http_wire, "EVENT_TIMEOUT_S", 2.0)


@pytest.mark.parametrize("direction", ["up", "down"])
async def test_a_half_open_connection_is_left_for_a_new_one(
    bench: Bench, policy: str, direction: Direction
):
    """In the middle of a request nothing more arrives, or in the middle of an answer."""
    async with bench.direct_client() as direct, bench.client(IMPATIENT) as client:
        before = (await direct.get_policy(policy)).version
        session = client.policy(policy)
        await session.next_seq()
        bench.proxy.arm(Fault(kind="silence", direction=direction, at_byte=40))
        handle = await session.update(batch(), loss=LOSS, optim=OPTIM)
        assert bench.proxy.num_hits == 1
        assert (await handle.result()).version == before + 1


async def test_a_watch_over_a_half_open_connection_goes_on(bench: Bench, policy: str):
    """The watched update waits for the one before it, which is sent once the watch is cut off."""
    async with bench.direct_client() as direct, bench.client(IMPATIENT) as client:
        before = await direct.get_policy(policy)
        session = direct.policy(policy)
        sent = await session.update(batch(), loss=LOSS, optim=OPTIM, seq=before.next_seq + 1)
        watched = (await client.operation(sent.operation_id)).watch()
        assert (await anext(watched)).state == "queued"
        bench.proxy.arm(Fault(kind="silence", direction="down", at_byte=0))
        await session.update(batch(), loss=LOSS, optim=OPTIM, seq=before.next_seq)
        last = [state async for state in watched][-1]
        assert bench.proxy.num_hits == 1
        assert last.step is not None, last
        assert last.step.version == before.version + 2


async def test_an_outage_during_an_update_only_lengthens_the_wait(service: Service, policy: str):
    """Both wires at once: a waiter each, and nothing is there for 12 s, not even the port."""

    async def wait(bench: Bench, operation_id: str) -> int:
        async with bench.client() as client:
            final = await (await client.operation(operation_id)).wait()
        assert final.step is not None, final
        return final.step.version

    async with (
        opened(service, "http") as http,
        opened(service, "grpc") as grpc,
        http.direct_client() as direct,
    ):
        benches = (http, grpc)
        version = (await direct.get_policy(policy)).version
        sent = await direct.policy(policy).update(batch(*LONG), loss=LOSS, optim=OPTIM)
        waits = [asyncio.create_task(wait(bench, sent.operation_id)) for bench in benches]
        await asyncio.gather(*(bench.proxy.first_answer() for bench in benches))
        await asyncio.sleep(0.2)
        assert (await sent.status()).state == "running"
        await asyncio.gather(*(bench.proxy.outage(OUTAGE_S) for bench in benches))
        assert await asyncio.gather(*waits) == [version + 1] * 2


async def test_a_slow_network_changes_nothing(bench: Bench, policy: str):
    bench.proxy.delay_s = 0.1
    async with bench.client() as client:
        version = (await client.get_policy(policy)).version
        handle = await client.policy(policy).update(batch(), loss=LOSS, optim=OPTIM)
        assert (await handle.result()).version == version + 1


async def test_an_answer_that_trickles_ends_with_the_attempt(bench: Bench, policy: str):
    """A byte now and then keeps a read of httpx alive, and with it the call, for minutes."""
    async with bench.client(ClientConfig(timeout_s=2.0, attempt_timeout_s=1.0)) as client:
        await client.get_policy(policy)
        bench.proxy.trickle_s = 0.2
        with pytest.raises(TransportError):
            await asyncio.wait_for(client.get_policy(policy), 8.0)
        bench.proxy.trickle_s = 0.0
        await client.get_policy(policy)


async def test_slow_senders_hinder_nobody_and_are_let_go(
    bench: Bench, policy: str, slow_senders: SlowSenders
):
    async with bench.direct_client() as client:
        await client.get_policy(policy)
        took_s: list[float] = []
        for _ in range(20):
            start = time.monotonic()
            await client.get_policy(policy)
            took_s.append(time.monotonic() - start)
        assert statistics.median(took_s) < 1.0
        while slow_senders.num_open():
            assert time.monotonic() - slow_senders.since < SLOW_END_S, slow_senders.num_open()
            await asyncio.sleep(0.2)
