"""The engine's processes: up with one call, down with another.

Enters the config in a process attached to Ray, leaves the coordinator and the metrics hub as
detached actors, which bring policies back by themselves. Invariant: starting twice is starting
once.
"""

# Ray's decorators are only partly typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, cast

import ray

from ratoon.config import RatoonConfig
from ratoon.engine.archive import check_store
from ratoon.engine.coordinator_actor import CoordinatorActor
from ratoon.engine.metrics_actor import MetricsActor
from ratoon.engine.ray_calls import ActorLostError, ask, find_actor, kill_actor
from ratoon.engine.settings import COORDINATOR_NAME, METRICS_NAME, EngineSettings

if TYPE_CHECKING:
    from ray.actor import ActorProxy

_MAX_CONCURRENCY = 10_000
# For the coordinator's answers, beyond what it was given. One that waits for its database at its
# start gives none.
_LATE_S = 15.0


def start_engine(config: RatoonConfig) -> None:
    """Start what is not running. Raises what opening the database and the object store raises."""
    settings = EngineSettings.from_config(config)
    check_store(settings.storage_url)
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
    # Loads torch, which the first caller of GetServerInfo would wait for; nobody waits here.
    coordinator.backends.remote()


def drain_engine(config: RatoonConfig) -> None:
    """Take nothing new, and wait until what runs has ended, `limits.drain_s` at most."""
    asyncio.run(_drain(config.ray.namespace, config.limits.drain_s))


def stop_engine(config: RatoonConfig) -> None:
    """End all processes of the engine; what is in the store stays, a running operation does not."""
    asyncio.run(_stop(config.ray.namespace))


async def _drain(namespace: str, grace_s: float) -> None:
    found = find_actor(COORDINATOR_NAME, namespace)
    if found is None:
        return
    coordinator = cast("ActorProxy[CoordinatorActor]", found)
    with suppress(ActorLostError, TimeoutError):
        await asyncio.wait_for(ask(coordinator.drain.remote(grace_s)), grace_s + _LATE_S)


async def _stop(namespace: str) -> None:
    found = find_actor(COORDINATOR_NAME, namespace)
    if found is not None:
        coordinator = cast("ActorProxy[CoordinatorActor]", found)
        with suppress(ActorLostError, TimeoutError):
            await asyncio.wait_for(ask(coordinator.stop_policies.remote()), _LATE_S)
    await kill_actor(COORDINATOR_NAME, namespace)
    await kill_actor(METRICS_NAME, namespace)
