"""The engine's processes: up with one call, down with another.

Enters the config in a process attached to Ray, leaves the coordinator and the metrics hub as
detached actors, which bring policies back by themselves. Invariant: starting twice is starting
once.
"""

# Ray's decorators are only partly typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import ray

from ratoon.config import RatoonConfig
from ratoon.engine.coordinator_actor import CoordinatorActor
from ratoon.engine.metrics_actor import MetricsActor
from ratoon.engine.ray_calls import ask, find_actor, kill_actor
from ratoon.engine.settings import COORDINATOR_NAME, METRICS_NAME, EngineSettings

if TYPE_CHECKING:
    from ray.actor import ActorProxy

_MAX_CONCURRENCY = 10_000


def start_engine(config: RatoonConfig) -> None:
    """Start what is not running. Raises what opening the database raises."""
    settings = EngineSettings.from_config(config)
    shared: dict[str, object] = {
        "namespace": settings.namespace,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": -1,
    }
    hub = ray.remote(MetricsActor).options(name=METRICS_NAME, **shared).remote()
    ray.get(hub.render.remote())
    coordinator = (
        ray.remote(CoordinatorActor)
        .options(name=COORDINATOR_NAME, max_concurrency=_MAX_CONCURRENCY, **shared)
        .remote(settings)
    )
    ray.get(coordinator.recover.remote())


def stop_engine(config: RatoonConfig) -> None:
    """End all processes of the engine; what is in the store stays, a running operation does not."""
    asyncio.run(_stop(config.ray.namespace))


async def _stop(namespace: str) -> None:
    found = find_actor(COORDINATOR_NAME, namespace)
    if found is not None:
        coordinator = cast("ActorProxy[CoordinatorActor]", found)
        await ask(coordinator.stop_policies.remote())
    await kill_actor(COORDINATOR_NAME, namespace)
    await kill_actor(METRICS_NAME, namespace)
