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
    single = dict.fromkeys(range(5), 1)
    assert placement.by_node({0: "b", 1: "a", 2: "b", 3: "c", 4: "a"}, single) == [0, 2, 1, 4, 3]
    assert placement.by_node({1: "a", 0: "a"}, single) == [0, 1]
    assert placement.by_node({1: "a", 0: "b"}, {0: 2, 1: 2}) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("num_ranks", "free", "num_nodes", "expected"),
    [
        (1, (0, 1), 0, 1),
        (1, (0.5,), 0, 0),
        (8, (8, 8), 0, 1),
        (8, (7, 8), 0, 1),
        (8, (7, 7), 0, 2),
        (8, (4, 3, 3), 0, 0),
        (8, (2, 3, 2, 2), 0, 4),
        # A node of one rank has all weights: nothing is shared there.
        (2, (1, 1), 0, 0),
        (3, (1, 1, 1), 0, 0),
        (6, (3, 2, 3), 0, 2),
        (6, (2, 2, 2), 0, 3),
        (6, (4, 2), 0, 0),
        # As many nodes as before, though fewer would do, or others have room.
        (8, (8, 4, 4), 2, 2),
        (8, (8, 3, 3), 2, 0),
        (8, (2, 2, 2, 2), 2, 0),
        (8, (), 0, 0),
    ],
)
def test_ranks_are_on_the_fewest_nodes_that_have_room_for_as_many_each(
    num_ranks: int, free: tuple[float, ...], num_nodes: int, expected: int
) -> None:
    assert placement.even_nodes(num_ranks, free, num_nodes) == expected


@pytest.mark.parametrize(
    ("num_ranks", "cpus", "expected"),
    [
        (2, {"own": 4, "a": 8}, "own own"),
        (4, {"own": 2, "a": 1, "b": 2}, "own own b b"),
        (6, {"own": 2, "a": 2, "b": 2}, "own own a a b b"),
        (4, {"own": 3, "a": 1}, "own own own a"),
        (5, {"own": 1, "a": 2, "b": 3}, "own b b b a"),
        # The only node of a Ray that knows two of its cores.
        (4, {"own": 2}, "own own own own"),
        # A node that was declared to have none may have the worker nevertheless.
        (2, {"a": 2}, "own a"),
        (3, {"own": 1, "a": 1}, "own own a"),
    ],
)
def test_ranks_on_cpus_begin_at_the_worker_s_node(
    num_ranks: int, cpus: dict[str, int], expected: str
) -> None:
    assert placement.nodes_of_ranks(num_ranks, cpus, "own") == expected.split()


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
