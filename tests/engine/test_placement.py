"""What a worker holds of a Ray cluster is given back with it, and not asked for again unasked."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, cast

import pytest
import ray

from ratoon.cluster import placement, worker_places, worker_process
from ratoon.cluster.placement import place
from ratoon.cluster.ray_calls import find_actor
from ratoon.cluster.ray_cluster import RayCluster as Workers
from ratoon.cluster.worker_places import SPARE, find_place, has_room, hosts, own_name
from ratoon.config import RatoonConfig, RayConfig, WorkerConfig
from ratoon.engine.crash_points import never
from ratoon.engine.settings import EngineSettings
from ratoon.engine.worker.host import WorkerHost
from ratoon.engine.worker.tasks import RemoteWorker, WorkerLostError
from ratoon.engine.worker.worker import WorkerCore
from ratoon.errors import ErrorCode, RatoonError
from ratoon.method_call import MethodCall
from tests.conftest import RayCluster


class Idle:
    @ray.method
    def answer(self) -> int:
        return 1


async def test_a_worker_that_was_released_is_made_by_no_question(ray_cluster: RayCluster) -> None:
    """A caller that looked at an operation of a failed policy gave it a GPU again."""
    settings = EngineSettings.from_config(
        RatoonConfig(ray=RayConfig(namespace=ray_cluster.namespace))
    )
    name = own_name("idle")
    idle = ray.remote(Idle).options(name=name, namespace=settings.namespace, lifetime="detached")
    handle = idle.remote()
    assert ray.get(handle.answer.remote()) == 1
    worker = Workers(settings).worker("idle", 1)
    await worker.release()
    for question in (
        worker.call(WorkerCore.progress),
        worker.call(WorkerCore.cancel, "idle.1"),
        worker.call(WorkerCore.snapshot, 1),
    ):
        with pytest.raises(WorkerLostError):
            await question
    assert find_actor(name, settings.namespace) is None


class Host:
    """Process without a core; one that `hangs` does not answer."""

    def __init__(self, hangs: bool) -> None:
        self._hangs = hangs
        self._host = WorkerHost(cast("Any", None), never)

    @ray.method
    def take(self, policy_id: str, key: str, max_tenants: int) -> bool:
        if self._hangs:
            time.sleep(60.0)
        return self._host.take(policy_id, key, max_tenants)

    @ray.method
    def leave(self, policy_id: str) -> bool:
        return self._host.leave(policy_id)

    @ray.method
    def tenants(self) -> tuple[str, ...]:
        if self._hangs:
            time.sleep(60.0)
        return self._host.tenants()

    @ray.method
    def ping(self) -> None:
        pass

    @ray.method
    def fence(self, _policy_id: str, _token: int) -> None:
        pass

    @ray.method
    def compute(self, policy_id: str, call: MethodCall[object]) -> object:
        return call.on(self._host.core(policy_id))


def start(name: str, namespace: str, *, hangs: bool = False) -> Any:
    options = {"name": name, "namespace": namespace, "lifetime": "detached", "get_if_exists": True}
    handle = ray.remote(Host).options(**options).remote(hangs)
    ray.get(handle.ping.remote())
    return handle


class Lodging:
    """Policies of one engine, over processes that this test makes."""

    def __init__(self, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
        config = RatoonConfig(
            ray=RayConfig(namespace=namespace), worker=WorkerConfig(device="cpu", max_tenants=2)
        )
        self.settings = EngineSettings.from_config(config)
        self.cluster = Workers(self.settings)
        self.made: list[str] = []

        def make(_policy_id: str, name: str, *_: object, **__: object) -> Any:
            self.made.append(name)
            return start(name, namespace)

        monkeypatch.setattr(worker_process, "make_worker", make)

    async def place(self, worker: RemoteWorker, policy_id: str) -> str:
        await worker.fence(1)
        place = await find_place(policy_id, self.settings.namespace)
        assert place is not None
        return place.name


async def test_policies_of_a_key_share_a_process_until_the_last_one_leaves(
    ray_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = Lodging(f"{ray_cluster.namespace}-hosts", monkeypatch)
    namespace, cluster = house.settings.namespace, house.cluster
    a, b, c, other = (
        cluster.worker(name, 1, key)
        for name, key in (("a", "base"), ("b", "base"), ("c", "base"), ("d", "another"))
    )
    first = await house.place(a, "a")
    assert await house.place(b, "b") == first
    assert not await has_room("base", 2, namespace)
    second = await house.place(c, "c")
    assert await has_room("base", 2, namespace)
    assert len({first, second, await house.place(other, "d")}) == len(house.made) == 3
    # Another engine, after this one, finds each where it is, whatever its settings say by then.
    again = Workers(replace(house.settings, max_tenants=1))
    for name, where in (("a", first), ("c", second)):
        assert await house.place(again.worker(name, 1), name) == where
    await a.release()
    assert find_actor(first, namespace) is not None
    assert await house.place(b, "b") == first
    # The place is free again, and taken before another process is started.
    assert await house.place(cluster.worker("e", 1, "base"), "e") == first
    for name in ("b", "e"):
        await cluster.end_worker(name)
    assert find_actor(first, namespace) is None
    for name in ("c", "d"):
        await cluster.end_worker(name)
    assert not hosts(namespace)


async def test_a_process_that_is_lost_is_each_tenants_loss_once(
    ray_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first to replace it starts another one, which the second must not end."""
    house = Lodging(f"{ray_cluster.namespace}-lost", monkeypatch)
    a, b = (house.cluster.worker(name, 1, "base") for name in "ab")
    where = await house.place(a, "a")
    assert await house.place(b, "b") == where
    ray.kill(cast("Any", find_actor(where, house.settings.namespace)))
    for worker, name in ((a, "a"), (b, "b")):
        with pytest.raises(WorkerLostError):
            await worker.fence(2)
        await worker.replace()
        assert await house.place(worker, name) == where
    assert house.made == [where, where]
    for name in "ab":
        await house.cluster.end_worker(name)


async def test_a_spare_is_taken_once(
    ray_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one that shares nothing, or by all that share one thing."""
    house = Lodging(f"{ray_cluster.namespace}-spare", monkeypatch)
    namespace, cluster = house.settings.namespace, house.cluster
    for keys, in_spare in ((("", "", "base"), 1), (("base", "", "base"), 2)):
        start(SPARE, namespace)
        workers = [cluster.worker(f"p{i}", 1, key) for i, key in enumerate(keys)]
        found = [await house.place(worker, f"p{i}") for i, worker in enumerate(workers)]
        assert found.count(SPARE) == in_spare
        assert found[0] == SPARE
        for worker in workers:
            await worker.release()
        assert find_actor(SPARE, namespace) is None


@pytest.mark.more
async def test_a_spare_that_hangs_holds_no_policy_up(
    ray_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = f"{ray_cluster.namespace}-hangs"
    monkeypatch.setattr(worker_places, "_SPARE_S", 0.2)
    start(SPARE, namespace, hangs=True)
    assert await find_place("a", namespace) is None
    assert find_actor(SPARE, namespace) is None


def test_ranks_of_one_node_are_neighbours_and_those_of_the_workers_are_first() -> None:
    assert placement.by_node({0: "b", 1: "a", 2: "b", 3: "c", 4: "a"}) == [0, 2, 1, 4, 3]
    assert placement.by_node({1: "a", 0: "a"}) == [0, 1]


async def test_a_gpu_that_is_not_there_is_refused_and_not_waited_for(
    ray_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ray_cluster.address
    monkeypatch.setattr(placement, "_PLACEMENT_S", 0.1)
    with pytest.raises(RatoonError) as caught:
        await place("wants-gpus", 2)
    assert caught.value.code is ErrorCode.RESOURCE_EXHAUSTED
    assert caught.value.details == {"resource": "GPU", "wanted": "2", "free": "0"}
    assert placement.find_group("wants-gpus") is None
