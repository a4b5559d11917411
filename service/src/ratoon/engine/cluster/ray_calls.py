"""Calls to actors, which raise the actor's own exceptions, or `ActorLostError`."""

# Ray's decorators are only partly typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
from typing import Any, TypeVar, cast

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

T = TypeVar("T")
_GONE_S = 10.0
_POLL_S = 0.05


class ActorLostError(Exception):
    """The actor died or is unreachable; whether the call took effect is not known."""


async def ask(reference: ObjectRef[T]) -> T:
    """Wait for a call. Raises what the actor raised, or `ActorLostError`."""
    try:
        return await reference
    except RayTaskError as err:
        cause = err.cause
        assert isinstance(cause, BaseException)
        raise cause from None
    except RayActorError as err:
        raise ActorLostError(str(err)) from err


def find_actor(name: str, namespace: str) -> ActorHandle[Any] | None:
    """A named actor's handle; None: there is none."""
    try:
        return cast("ActorHandle[Any]", ray.get_actor(name, namespace))
    except ValueError:
        return None


async def kill_actor(name: str, namespace: str) -> None:
    """End a named actor, if any, and wait until its name is free."""
    deadline = asyncio.get_running_loop().time() + _GONE_S
    while (handle := find_actor(name, namespace)) is not None:
        ray.kill(handle, no_restart=True)
        if asyncio.get_running_loop().time() > deadline:
            raise ActorLostError(f"{name} does not end")
        await asyncio.sleep(_POLL_S)
