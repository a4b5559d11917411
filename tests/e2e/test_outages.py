"""A service whose database is killed, or has no room, and that is told to end.

Its one policy is only ever updated, so that seq, version and the journal's rows are counted alike;
what was sent to it is at last sent to another one, to which nothing happens: the weights are the
same. The tests share the service and run in order.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import psycopg
import pytest
from google.protobuf.message import Message

from harness.service import Service
from ratoon_client import AsyncOperationHandle, AsyncRatoonClient, RatoonApiError, StepResult
from ratoon_proto.v1 import service_pb2
from tests.api import requests
from tests.api.wires import GrpcWire, HttpWire, Wire, WireError
from tests.engine.postgres import PostgresServer, running_postgres
from tests.engine.postgres_room import SmallDatabase, small_database
from tests.network.samples import LOSS, OPTIM, batch

pytestmark = [pytest.mark.e2e, pytest.mark.more]
POLICY, UNDISTURBED = "outages", "undisturbed"
DRAIN_S = 8.0
# Beyond it: what docs/api.md promises.
END_S = 240.0
DOWN_S = 2.0
# For what a caller waits for over restarts, on a machine that does much else.
PATIENCE_S = 240.0
# Groups and tokens of updates: a short one, and one that takes a second or two.
SMALL, LONG = (2, 8), (48, 256)
Handle = AsyncOperationHandle[StepResult]


@dataclass
class Outages:
    """The service, its database, and the sizes of all updates that were sent, by seq."""

    service: Service
    server: PostgresServer
    database: SmallDatabase
    sent: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    async def send(self, client: AsyncRatoonClient, size: tuple[int, int] = SMALL) -> Handle:
        self.sent.append(size)
        return await _update(client, POLICY, len(self.sent), size)

    def journal(self) -> list[tuple[int, str]]:
        """Seq and state of every update."""
        query = "SELECT seq, state FROM operations WHERE policy_id = %s AND seq > 0 ORDER BY seq"
        with psycopg.connect(self.database.url) as connection:
            return [(int(seq), str(state)) for seq, state in connection.execute(query, [POLICY])]

    async def check(self, client: AsyncRatoonClient) -> None:
        """Everything that was sent is applied, once."""
        num_sent = len(self.sent)
        policy = await client.get_policy(POLICY)
        assert (policy.version, policy.next_seq) == (num_sent, num_sent + 1)
        assert self.journal() == [(seq, "applied") for seq in range(1, num_sent + 1)]


@asynccontextmanager
async def clients(
    service: Service, timeout_s: float = 60.0
) -> AsyncIterator[tuple[AsyncRatoonClient, AsyncRatoonClient]]:
    async with (
        AsyncRatoonClient(service.http, timeout_s=timeout_s) as http,
        AsyncRatoonClient(service.grpc, timeout_s=timeout_s) as rpc,
    ):
        yield http, rpc


async def _update(
    client: AsyncRatoonClient, policy_id: str, seq: int, size: tuple[int, int]
) -> Handle:
    return await client.policy(policy_id).update(batch(*size), loss=LOSS, optim=OPTIM, seq=seq)


@pytest.fixture(scope="module")
def outages() -> Iterator[Outages]:
    # Ray puts sockets below it, and the path of a socket has at most 107 bytes.
    short = tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp")
    with short as root, running_postgres() as server, small_database(server) as database:
        limits = {"drain_s": DRAIN_S}
        with Service(Path(root), limits=limits, database_url=database.url) as service:
            asyncio.run(_create(service.http, POLICY))
            yield Outages(service=service, server=server, database=database)


async def _create(target: str, policy_id: str) -> None:
    async with AsyncRatoonClient(target) as client:
        await (await client.create_policy(policy_id, preset="tiny", seed=3)).result(PATIENCE_S)


@asynccontextmanager
async def wires(service: Service) -> AsyncIterator[tuple[Wire, Wire]]:
    """What is said to a caller as it is said, where a client would ask again."""
    async with (
        httpx.AsyncClient(base_url=service.http, trust_env=False, timeout=60) as http,
        grpc.aio.insecure_channel(service.grpc.removeprefix("grpc://")) as channel,
    ):
        yield HttpWire(client=http), GrpcWire(channel=channel)


async def _running(handle: Handle) -> None:
    while (state := (await handle.status()).state) != "running":
        assert state == "queued"
        await asyncio.sleep(0.02)


async def _versions(handles: Sequence[AsyncOperationHandle[Any]]) -> list[int]:
    return [
        result.version for result in await asyncio.gather(*(h.result(PATIENCE_S) for h in handles))
    ]


async def _asked(wire: Wire, operation_id: str, codes: set[str]) -> None:
    """Ask for ever; `codes` are those of the errors."""
    asked: list[tuple[str, Message]] = [
        ("GetPolicy", service_pb2.GetPolicyRequest(policy_id=POLICY)),
        ("GetOperation", service_pb2.GetOperationRequest(operation_id=operation_id, wait_s=0.2)),
        ("Update", requests.update(1, policy_id=POLICY)),
    ]
    while True:
        for rpc, request in asked:
            try:
                await wire.call(rpc, request)
            except WireError as error:
                codes.add(error.detail.code)
            await asyncio.sleep(0.05)


async def test_a_database_that_is_killed_only_lengthens_operations(outages: Outages) -> None:
    """While an update runs; then while many begin and end. Asked all the while over both wires."""
    async with clients(outages.service) as (http, rpc), wires(outages.service) as asking:
        long = await outages.send(http, LONG)
        codes: set[str] = set()
        probes = [asyncio.create_task(_asked(w, long.operation_id, codes)) for w in asking]
        handles = [long, *[await outages.send(rpc) for _ in range(2)]]
        waiting = asyncio.create_task(_versions(handles))
        await _running(long)
        await asyncio.to_thread(outages.server.kill)
        late = asyncio.create_task(outages.send(http))
        await asyncio.sleep(DOWN_S)
        assert not waiting.done()
        assert not late.done()
        await asyncio.to_thread(outages.server.start)
        assert await waiting == [1, 2, 3]
        handles = [await late, *[await outages.send(rpc) for _ in range(8)]]
        await asyncio.to_thread(outages.server.kill)
        await asyncio.to_thread(outages.server.start)
        assert await _versions(handles) == list(range(4, 13))
        for probe in probes:
            assert not probe.done(), probe.exception()
            probe.cancel()
        # Update 1 is another one.
        assert codes <= {"UNAVAILABLE", "KEY_REUSED"}
        await outages.check(http)


async def test_a_full_disk_of_the_database_refuses_new_work_and_loses_none(
    outages: Outages,
) -> None:
    first = len(outages.sent) + 1
    # Whoever is told to ask again in 10 s, and has not so long, hears why.
    async with clients(outages.service, timeout_s=5.0) as (http, rpc):
        handles = [await outages.send(http, LONG)]
        await _running(handles[0])
        outages.database.fill()
        try:
            for client in (http, rpc):
                error = await _refusal(outages, client, handles)
                assert (error.code, error.retryable) == ("RESOURCE_EXHAUSTED", True)
                assert error.details["resource"] == "disk"
            waiting = asyncio.create_task(_versions(handles))
            # What is there is read.
            assert (await rpc.get_policy(POLICY)).next_seq == first + len(handles)
            assert (await handles[-1].status()).seq == handles[-1].seq
            await asyncio.sleep(DOWN_S)
            assert not waiting.done()
        finally:
            outages.database.clear()
        last = await outages.send(rpc)
        assert await waiting == list(range(first, first + len(handles)))
        assert (await last.result(PATIENCE_S)).version == first + len(handles)
        await outages.check(http)


async def _refusal(
    outages: Outages, client: AsyncRatoonClient, handles: list[Handle]
) -> RatoonApiError:
    """Refusal of an update; earlier ones are accepted, because the database's last pages have
    room."""
    for _ in range(100):
        try:
            handles.append(await outages.send(client))
        except RatoonApiError as error:
            outages.sent.pop()
            return error
    raise AssertionError("a full disk has room")


async def test_sigterm_ends_what_runs_and_keeps_what_is_queued(outages: Outages) -> None:
    """Callers wait over both wires for what runs and what is queued, and watch the last."""
    first = len(outages.sent) + 1
    async with clients(outages.service, timeout_s=PATIENCE_S) as (http, rpc):
        handles = [await outages.send(http, LONG)]
        handles += [await outages.send(client) for client in (http, rpc, http)]
        by_rpc = [await rpc.operation(handle.operation_id) for handle in handles]
        await _running(handles[0])
        waiting = [asyncio.create_task(_versions(each)) for each in (handles, by_rpc)]
        watching = [asyncio.create_task(_watched(each[-1])) for each in (handles, by_rpc)]
        assert await asyncio.to_thread(outages.service.terminate, DRAIN_S + END_S) == 0
        states = [state for _, state in outages.journal()[first - 1 :]]
        # On a slow machine it takes longer than it has, and is left for the next start.
        assert states[0] in ("applied", "accepted")
        assert states[1:] == ["accepted"] * 3
        assert not any(task.done() for task in (*waiting, *watching))
        await asyncio.to_thread(outages.service.start)
        versions = list(range(first, first + len(handles)))
        assert await asyncio.gather(*waiting) == [versions, versions]
        assert await asyncio.gather(*watching) == [versions[-1]] * 2
        await outages.check(http)


async def _watched(handle: AsyncOperationHandle[Any]) -> int:
    """The version at the end of a watch, which goes on over restarts."""
    last = [state async for state in handle.watch()][-1]
    assert last.step is not None, last
    return last.step.version


async def test_nothing_was_lost_or_doubled(outages: Outages) -> None:
    """Weights, after all of the above, are those of a policy that none of it happened to."""
    await _create(outages.service.grpc, UNDISTURBED)
    async with clients(outages.service) as (http, rpc):
        handles = [
            await _update(rpc, UNDISTURBED, seq, size) for seq, size in enumerate(outages.sent, 1)
        ]
        assert await _versions(handles) == list(range(1, len(handles) + 1))
        digests = [
            {file.digest for file in (await http.weight_manifest(policy_id, len(handles))).files}
            for policy_id in (POLICY, UNDISTURBED)
        ]
    assert digests[0] == digests[1]


@pytest.mark.slow
async def test_sigterm_needs_no_database(outages: Outages) -> None:
    """It was waited for before anything was stopped. Short form: tests/engine/test_coordinator."""
    async with clients(outages.service) as (http, rpc):
        handles = [await outages.send(http, LONG), await outages.send(rpc)]
        await _running(handles[0])
        waiting = asyncio.create_task(_versions(handles))
        await asyncio.to_thread(outages.server.kill)
        try:
            assert await asyncio.to_thread(outages.service.terminate, DRAIN_S + END_S) == 0
        finally:
            await asyncio.to_thread(outages.server.start)
        assert not waiting.done()
        waiting.cancel()
    assert [state for _, state in outages.journal()[-2:]] == ["accepted", "accepted"]
