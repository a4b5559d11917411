"""Where the workers of policies are: processes by the names of their actors, and who is in which.

A policy that shares nothing has a process of its name, or was the first to take the spare. Others
are tenants of a host, of which there may be several with one `TrainerSpec.host_key`, or of the
spare. Nothing here is written down: a process knows its tenants, and is asked for them.
"""

# Ray's functions are only partly typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ray.util import list_named_actors

from ratoon.cluster.placement import free_gpus, placed_names
from ratoon.cluster.ray_calls import (
    START_S,
    ActorLostError,
    ask,
    ask_living,
    find_actor,
    kill_actor,
)

if TYPE_CHECKING:
    from ray import ObjectRef

    from ratoon.cluster.worker_process import Worker

T = TypeVar("T")
SPARE = "ratoon-spare-worker"
# No policy has an id with a colon.
_HOST = "ratoon-host:"
# A spare that has not answered in this time never will; nor will a process that a policy leaves.
_SPARE_S = 60.0
_LEAVE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """A process, by its actor's name; `is_own`: it is one policy's alone."""

    name: str
    worker: Worker
    is_own: bool = False


def own_name(policy_id: str) -> str:
    """The name of a process that is this policy's alone."""
    return f"ratoon-worker-{policy_id}"


def unused_name(host_key: str, namespace: str) -> str:
    """A name for another host of this key."""
    prefix = _prefix(host_key)
    taken = {host.name for host in hosts(namespace, host_key)}
    return next(name for number in count() if (name := f"{prefix}{number}") not in taken)


def hosts(namespace: str, host_key: str | None = None) -> list[WorkerPlace]:
    """Processes that may have several tenants, of one key or all, by name, and then the spare."""
    listed = cast("list[dict[str, str]]", list_named_actors(all_namespaces=True))
    names = {each["name"] for each in listed if each["namespace"] == namespace}
    prefix = _HOST if host_key is None else _prefix(host_key)
    named = sorted(name for name in names if name.startswith(prefix))
    found = ((name, find_actor(name, namespace)) for name in (*named, SPARE) if name in names)
    return [
        WorkerPlace(name=name, worker=cast("Worker", handle))
        for name, handle in found
        if handle is not None
    ]


async def find_place(policy_id: str, namespace: str) -> WorkerPlace | None:
    """The process that has a policy; None: none has."""
    name = own_name(policy_id)
    if (own := find_actor(name, namespace)) is not None:
        return WorkerPlace(name=name, worker=cast("Worker", own), is_own=True)
    asked = hosts(namespace)
    told = zip(asked, await _tenants(asked, namespace), strict=True)
    return next((host for host, tenants in told if policy_id in (tenants or ())), None)


async def has_room(host_key: str, max_tenants: int, namespace: str) -> bool:
    """Whether a process of this key takes another tenant; the key "" has none."""
    if not host_key:
        return False
    tenants = await _tenants(hosts(namespace, host_key), namespace)
    return any(told is not None and len(told) < max_tenants for told in tenants)


async def leave(place: WorkerPlace, policy_id: str) -> bool:
    """Take a policy from a process; returns whether that is to end (`end_place`), as nobody stays.

    One that is the policy's own is not asked: one that hangs would not answer.
    """
    if place.is_own:
        return True
    try:
        left = place.worker.leave.remote(policy_id)
        return await ask_living(left, place.worker.ping.remote, _LEAVE_S)
    except ActorLostError:
        return True


async def end_place(place: WorkerPlace, namespace: str) -> None:
    """End a process, but no other that has its name by now."""
    await kill_actor(place.name, namespace, cast("Any", place.worker))


async def end_spare(namespace: str) -> None:
    """End the spare, even if it has tenants."""
    await kill_actor(SPARE, namespace)


def free_hosts(namespace: str) -> None:
    """Free the GPUs of hosts that have ended."""
    for name in placed_names(_HOST):
        if find_actor(name, namespace) is None:
            free_gpus(name)


async def told(place: WorkerPlace, reference: ObjectRef[T], namespace: str) -> T | None:
    """What a process answers at once. One that does not is ended; its policies get another."""
    try:
        async with asyncio.timeout(_SPARE_S if place.name == SPARE else START_S):
            return await ask(reference)
    except (ActorLostError, TimeoutError):
        await end_place(place, namespace)
        return None


async def _tenants(asked: Sequence[WorkerPlace], namespace: str) -> list[tuple[str, ...] | None]:
    """The tenants of each; None: it did not answer, and has ended."""
    answers = (told(place, place.worker.tenants.remote(), namespace) for place in asked)
    return await asyncio.gather(*answers)


def _prefix(host_key: str) -> str:
    return f"{_HOST}{hashlib.sha256(host_key.encode()).hexdigest()[:16]}-"
