"""What a worker holds of a Ray cluster is given back with it, and not asked for again unasked."""

from __future__ import annotations

import pytest
import ray

from ratoon.cluster import placement
from ratoon.cluster.placement import place
from ratoon.cluster.ray_calls import find_actor
from ratoon.cluster.ray_cluster import RayCluster as Workers
from ratoon.cluster.worker_places import own_name
from ratoon.config import RatoonConfig, RayConfig
from ratoon.engine.settings import EngineSettings
from ratoon.engine.worker.tasks import WorkerLostError
from ratoon.engine.worker.worker import WorkerCore
from ratoon.errors import ErrorCode, RatoonError
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
