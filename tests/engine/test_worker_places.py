"""Who is in which process: joining, leaving and losing one. Processes are objects here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
from ray.exceptions import RayActorError

from ratoon.cluster import worker_places, worker_process
from ratoon.cluster.ray_cluster import RayCluster
from ratoon.cluster.worker_places import SPARE, find_place, has_room, hosts
from ratoon.config import RatoonConfig, WorkerConfig
from ratoon.engine.crash_points import never
from ratoon.engine.settings import EngineSettings
from ratoon.engine.worker.host import WorkerHost
from ratoon.engine.worker.tasks import NeighbourLostError, RemoteWorker, WorkerLostError
from ratoon.engine.worker.worker import WorkerCore
from ratoon.method_call import MethodCall

NAMESPACE = RatoonConfig().ray.namespace


class Method:
    """A method of a process, called by `remote`, as Ray's are."""

    def __init__(self, process: Process, call: Callable[..., Any]) -> None:
        self._process, self._call = process, call

    def remote(self, *args: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._answer(args))

    def options(self, **_: Any) -> Method:
        return self

    async def _answer(self, args: tuple[Any, ...]) -> Any:
        await asyncio.sleep(0)
        if self._process.hangs:
            await asyncio.sleep(60)
        answer = None
        if self._process.is_alive:
            answer = self._call(*args)
            if asyncio.iscoroutine(answer):
                answer = await answer
        if not self._process.is_alive:
            raise RayActorError
        return answer


class Process:
    """A worker's process without a trainer. `busy` holds what it computes."""

    def __init__(self, *, hangs: bool = False) -> None:
        host = self.host = WorkerHost(cast("Any", None), never)
        self.is_alive, self.hangs = True, hangs
        self.busy: asyncio.Event | None = None
        self.take, self.leave = Method(self, host.take), Method(self, host.leave)
        self.tenants, self.ping = Method(self, host.tenants), Method(self, lambda: None)
        self.fence = Method(self, lambda policy_id, token: host.core(policy_id).fence(token))
        self.compute = Method(self, self._compute)
        self.call_beside = Method(self, lambda policy_id, call: call.on(host.core(policy_id)))
        self._actor_id = str(id(self)).encode()

    async def _compute(self, policy_id: str, call: MethodCall[object]) -> object:
        if self.busy is not None:
            await self.busy.wait()
        return call.on(self.host.core(policy_id))


class Town:
    """A cluster of such processes, and one engine's policies on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = RatoonConfig(worker=WorkerConfig(device="cpu", max_tenants=2))
        self.settings = EngineSettings.from_config(config)
        self.cluster = RayCluster(self.settings)
        self.processes: dict[str, Process] = {}
        self.made: list[str] = []
        for module in (worker_places, worker_process):
            for name, fake in (
                ("find_actor", lambda name, _namespace: self.processes.get(name)),
                ("kill_actor", self._kill),
                ("list_named_actors", self._list),
                ("make_worker", self._make),
                ("free_gpus", lambda _name: None),
                ("placed_names", lambda _prefix: []),
            ):
                monkeypatch.setattr(module, name, fake, raising=False)

    def _list(self, *, all_namespaces: bool) -> list[dict[str, str]]:
        assert all_namespaces
        others = {"name": "ratoon-host:other-0", "namespace": "another"}
        return [*({"name": name, "namespace": NAMESPACE} for name in self.processes), others]

    def _make(self, policy_id: str, name: str, *_: object, **__: object) -> Process:
        self.made.append(name)
        made = self.processes[name] = Process()
        if policy_id:
            made.host.take(policy_id, "", 1)
        return made

    async def _kill(self, name: str, _namespace: str, only: Process | None = None) -> None:
        if only in (None, self.processes.get(name)):
            self.lose(name)

    def lose(self, name: str) -> None:
        if (process := self.processes.pop(name, None)) is not None:
            process.is_alive = False

    def policy(self, policy_id: str, key: str = "base") -> RemoteWorker:
        return self.cluster.worker(policy_id, 1, key)

    async def place(self, worker: RemoteWorker, policy_id: str) -> str:
        await worker.fence(1)
        place = await find_place(policy_id, NAMESPACE)
        assert place is not None
        return place.name


@pytest.fixture
def town(monkeypatch: pytest.MonkeyPatch) -> Town:
    return Town(monkeypatch)


async def test_policies_of_a_key_share_a_process_until_the_last_one_leaves(town: Town) -> None:
    cluster, (a, b, c) = town.cluster, (town.policy(name) for name in "abc")
    first = await town.place(a, "a")
    assert await town.place(b, "b") == first
    assert not await has_room("base", 2, NAMESPACE)
    assert not await has_room("", 2, NAMESPACE)
    second = await town.place(c, "c")
    assert await has_room("base", 2, NAMESPACE)
    assert len({first, second, await town.place(town.policy("d", "another"), "d")}) == 3
    assert len(town.made) == 3
    # Another engine, after this one, finds each where it is, whatever its settings say by then.
    again = RayCluster(replace(town.settings, max_tenants=1))
    for name, where in (("a", first), ("c", second)):
        assert await town.place(again.worker(name, 1), name) == where
    await a.release()
    assert first in town.processes
    assert await town.place(b, "b") == first
    # The place is free again, and taken before another process is started.
    assert await town.place(town.policy("e"), "e") == first
    for name in ("b", "e"):
        await cluster.end_worker(name)
    assert first not in town.processes
    for name in ("c", "d"):
        await cluster.end_worker(name)
    assert not hosts(NAMESPACE)


async def test_policies_that_share_nothing_have_processes_of_their_names(town: Town) -> None:
    found = [await town.place(town.policy(name, ""), name) for name in "ab"]
    assert found == town.made == ["ratoon-worker-a", "ratoon-worker-b"]
    await town.cluster.end_worker("a")
    assert [*town.processes] == ["ratoon-worker-b"]


async def test_a_process_that_is_lost_is_each_tenants_loss_once(town: Town) -> None:
    """The first to replace it starts another one, which the second must not end."""
    a, b = (town.policy(name) for name in "ab")
    where = await town.place(a, "a")
    assert await town.place(b, "b") == where
    town.lose(where)
    for worker, name in ((a, "a"), (b, "b")):
        with pytest.raises(WorkerLostError):
            await worker.fence(2)
        await worker.replace()
        assert await town.place(worker, name) == where
    assert town.made == [where, where]


async def test_the_loss_is_laid_to_the_one_that_computed(town: Town) -> None:
    a, b = (town.policy(name) for name in "ab")
    where = await town.place(a, "a")
    await town.place(b, "b")
    process = town.processes[where]
    process.busy = asyncio.Event()
    calls = [asyncio.create_task(each.call(WorkerCore.status)) for each in (a, b)]
    await asyncio.sleep(0.01)
    town.lose(where)
    process.busy.set()
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(error) for error in errors] == [WorkerLostError, NeighbourLostError]


async def test_a_tenant_in_doubt_takes_the_process_and_is_no_neighbours_loss(town: Town) -> None:
    a, b = (town.policy(name) for name in "ab")
    where = await town.place(a, "a")
    await town.place(b, "b")
    process = town.processes[where]
    process.host.core("a")._lost("its state cannot be read")
    process.busy = asyncio.Event()
    running = asyncio.create_task(b.call(WorkerCore.status))
    await asyncio.sleep(0.01)
    await a.replace()
    process.busy.set()
    with pytest.raises(NeighbourLostError):
        await running
    assert where not in town.processes


async def test_two_that_come_at_once_meet(town: Town) -> None:
    """Both find no process; one is made, or one for each that has no room."""
    names = "abcd"
    places = await asyncio.gather(*(town.place(town.policy(name), name) for name in names))
    assert all(places.count(place) <= 2 for place in places)
    assert {*town.made} == {*places}


@pytest.mark.parametrize(("keys", "in_spare"), [(("", "", "base"), 1), (("base", "", "base"), 2)])
async def test_a_spare_is_one_policys_or_of_all_that_share_a_key(
    town: Town, keys: tuple[str, ...], in_spare: int
) -> None:
    town.processes[SPARE] = Process()
    workers = {f"p{index}": town.policy(f"p{index}", key) for index, key in enumerate(keys)}
    found = [await town.place(worker, name) for name, worker in workers.items()]
    assert found.count(SPARE) == in_spare
    assert found[0] == SPARE
    for worker in workers.values():
        await worker.release()
    assert not town.processes


async def test_a_spare_that_hangs_holds_no_policy_up(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_places, "_SPARE_S", 0.05)
    town.processes[SPARE] = Process(hangs=True)
    assert await find_place("a", NAMESPACE) is None
    assert SPARE not in town.processes


async def test_a_process_that_does_not_come_up_is_a_loss_and_not_tried_for_ever(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = worker_process.make_worker

    def broken(*args: Any, **options: Any) -> Any:
        process = cast("Any", make)(*args, **options)
        town.lose(args[1])
        return process

    monkeypatch.setattr(worker_process, "make_worker", broken)
    with pytest.raises(WorkerLostError):
        await town.policy("a").fence(1)
    assert len(town.made) == 1
