"""Who is in which process: joining, leaving and losing one. Processes are objects here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from ray.exceptions import RayActorError

from ratoon.cluster import worker_places, worker_process
from ratoon.cluster.ray_cluster import RayCluster
from ratoon.cluster.worker_places import SPARE, find_place, has_room, hosts
from ratoon.config import LimitsConfig, RatoonConfig, WorkerConfig
from ratoon.engine.crash_points import never
from ratoon.engine.policy import turns
from ratoon.engine.settings import EngineSettings
from ratoon.engine.worker.host import WorkerHost
from ratoon.engine.worker.tasks import NeighbourLostError, RemoteWorker, Task, WorkerLostError
from ratoon.engine.worker.worker import WorkerCore
from ratoon.errors import ErrorCode
from ratoon.method_call import MethodCall
from ratoon_proto.types import OperationState, Recovery
from tests.engine.fake_trainer import FakeTrainer, as_trainer
from tests.engine.harness import RATE, Machine, code_of, digest_of, policy_spec
from tests.engine.test_worker_host import Building

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
    """A worker's process. `busy` holds what it computes; it dies of bodies with these digests."""

    def __init__(self, *, hangs: bool = False, poison: Collection[str] = ()) -> None:
        host = self.host = WorkerHost(lambda _: as_trainer(Building(object())), never)
        self._poison = poison
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
        if any(getattr(each, "body_digest", "") in self._poison for each in _commands(call)):
            self.is_alive = False
            return None
        return call.on(self.host.core(policy_id))


def _commands(call: MethodCall[object]) -> list[object]:
    return [each.command for each in call.args if isinstance(each, Task)]


class Town:
    """A cluster of such processes, and one engine's policies on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = RatoonConfig(worker=WorkerConfig(device="cpu", max_tenants=2))
        self.settings = EngineSettings.from_config(config)
        self.cluster = RayCluster(self.settings)
        self.processes: dict[str, Process] = {}
        self.made: list[str] = []
        self.poison: set[str] = set()
        for module in (worker_places, worker_process):
            for name, fake in (
                ("find_actor", lambda name, _namespace: self._living().get(name)),
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
        return [*({"name": name, "namespace": NAMESPACE} for name in self._living()), others]

    def _living(self) -> dict[str, Process]:
        return {name: process for name, process in self.processes.items() if process.is_alive}

    def _make(self, policy_id: str, name: str, *_: object, **__: object) -> Process:
        self.made.append(name)
        made = self.processes[name] = Process(poison=self.poison)
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


async def test_a_poisonous_operation_fails_alone_and_all_tenants_recover(
    town: Town, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four processes are lost to it. The neighbour's windows and weights are as if alone."""
    monkeypatch.setattr(turns, "_BACKOFF_S", 0.01)
    monkeypatch.setattr(turns, "_WAITING_S", 0.02)

    def machine(name: str) -> Machine:
        spec = policy_spec(name, recovery=Recovery.REPLAY)
        worker = cast("Any", town.policy(name))
        return Machine(tmp_path / name, spec, LimitsConfig(), make_worker=lambda _: worker)

    a, b = machine("a"), machine("b")
    await a.start()
    await b.start()
    assert len(town.made) == 1
    await a.updates(1, 2)
    await b.updates(1)
    await b.end(await b.forward_backward(2, 2.0))
    town.poison.add(digest_of(13.0))
    poisonous = await a.update(3, 13.0)
    others = [await b.forward_backward(3, 3.0), await b.step(4), await b.update(5, 5.0)]
    ended = await a.end(poisonous)
    assert ended.state is OperationState.FAILED
    assert code_of(ended) == ErrorCode.WORKER_LOST
    for operation in others:
        assert (await b.end(operation)).state is OperationState.DONE
    await a.updates(4)
    await b.updates(6)

    def weights(name: str) -> list[tuple[list[float], float]]:
        (process,) = town._living().values()
        return cast("FakeTrainer", process.host.core(name).trainer).weights

    assert weights("a") == [([1.0], RATE), ([2.0], RATE), ([4.0], RATE)]
    assert weights("b") == [([1.0], RATE), ([2.0, 3.0], RATE), ([5.0], RATE), ([6.0], RATE)]
    assert len(town.made) == 5
    for each in (a, b):
        await each.controller._turns.stop(1.0)
