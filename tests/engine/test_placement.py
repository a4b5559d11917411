"""What a worker holds of a Ray cluster is given back with it, and not asked for again unasked."""

from __future__ import annotations

import pytest
import ray

from ratoon.config import RatoonConfig, RayConfig
from ratoon.engine.cluster import placement
from ratoon.engine.cluster.placement import end_worker, place
from ratoon.engine.cluster.ray_calls import find_actor
from ratoon.engine.cluster.ray_cluster import RayCluster as Workers
from ratoon.engine.settings import EngineSettings, worker_name
from ratoon.engine.worker.tasks import WorkerLostError
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
    name = worker_name("idle")
    idle = ray.remote(Idle).options(name=name, namespace=settings.namespace, lifetime="detached")
    handle = idle.remote()
    assert ray.get(handle.answer.remote()) == 1
    worker = Workers(settings).worker("idle")
    await worker.release()
    for question in (worker.progress(), worker.cancel("idle.1"), worker.snapshot(1)):
        with pytest.raises(WorkerLostError):
            await question
    assert find_actor(name, settings.namespace) is None
    await end_worker("idle", settings.namespace)


async def test_a_gpu_that_is_not_there_is_refused_and_not_waited_for(
    ray_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ray_cluster.address
    monkeypatch.setattr(placement, "_PLACEMENT_S", 0.1)
    with pytest.raises(RatoonError) as caught:
        await place("wants-a-gpu")
    assert caught.value.code is ErrorCode.RESOURCE_EXHAUSTED
    assert caught.value.details["resource"] == "GPU"
    assert placement._find_group("wants-a-gpu") is None
