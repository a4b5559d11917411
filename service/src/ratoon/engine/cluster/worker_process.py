"""Finds, starts and ends workers' processes.

Importing torch and transformers takes a process seconds. So on CPUs a spare is started ahead; the
first policy that looks for a worker takes it, and keeps it until it ends.
"""

# Ray's decorators are only partly typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

import ray
from ray import ObjectRef

from ratoon.engine.cluster.ray_calls import ActorLostError, ask, find_actor, kill_actor
from ratoon.engine.cluster.worker_actor import CONCURRENCY_GROUPS, WorkerActor
from ratoon.engine.settings import EngineSettings

if TYPE_CHECKING:
    from ray.actor import ActorClass, ActorProxy

    Worker = ActorProxy["WorkerActor"]

T = TypeVar("T")
_SPARE = "ratoon-spare-worker"
# A spare that has not answered in this time never will.
_SPARE_S = 60.0


def make_worker(
    policy_id: str, num_workers: int, settings: EngineSettings, **options: object
) -> Worker:
    """Start a policy's process, that of its first rank; `options` are those of its actor."""
    return _make(_name(policy_id), policy_id, num_workers, settings, options)


def make_spare(settings: EngineSettings) -> Worker:
    """The spare, which may be some policy's by now."""
    return _make(_SPARE, "", 1, settings, {})


def find_spare(namespace: str) -> Worker | None:
    """The spare, which may be some policy's by now; None: there is none."""
    return _find(_SPARE, namespace)


async def find_worker(policy_id: str, namespace: str) -> Worker | None:
    """A policy's process, which may be the spare, taken now; None: it has none."""
    named = _find(_name(policy_id), namespace)
    if named is not None:
        return named
    spare = find_spare(namespace)
    if spare is None or not await _told(spare.take.remote(policy_id), namespace):
        return None
    return spare


async def end_worker(policy_id: str, namespace: str) -> None:
    """End a policy's process, if there is one."""
    await kill_actor(_name(policy_id), namespace)
    spare = find_spare(namespace)
    if spare is not None and await _told(spare.holder.remote(), namespace) == policy_id:
        await kill_actor(_SPARE, namespace)


async def end_spare(namespace: str) -> None:
    """End the spare, even if a policy has taken it."""
    await kill_actor(_SPARE, namespace)


def _name(policy_id: str) -> str:
    return f"ratoon-worker-{policy_id}"


def _find(name: str, namespace: str) -> Worker | None:
    return cast("Worker | None", find_actor(name, namespace))


def _make(
    name: str,
    policy_id: str,
    num_workers: int,
    settings: EngineSettings,
    options: dict[str, object],
) -> Worker:
    # Ray accepts concurrency groups here, but its types do not say so.
    remote = cast(
        "Callable[..., Callable[[type[WorkerActor]], ActorClass[WorkerActor]]]", ray.remote
    )
    actor = remote(num_cpus=0, concurrency_groups=CONCURRENCY_GROUPS)(WorkerActor).options(
        name=name, namespace=settings.namespace, lifetime="detached", get_if_exists=True, **options
    )
    return actor.remote(
        policy_id,
        num_workers,
        settings.log_level,
        settings.crash_points,
        settings.compiled,
        settings.max_silence_s,
    )


async def _told(reference: ObjectRef[T], namespace: str) -> T | None:
    """The spare's answer. One that does not answer is ended; its policy gets another worker."""
    try:
        async with asyncio.timeout(_SPARE_S):
            return await ask(reference)
    except (ActorLostError, TimeoutError):
        await kill_actor(_SPARE, namespace)
        return None
