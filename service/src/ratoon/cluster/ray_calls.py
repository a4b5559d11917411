"""Calls to actors, which raise the actor's own exceptions, or `ActorLostError`."""

# Ray's decorators are only partly typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar, cast

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

T = TypeVar("T")
# Seconds that a process may take to come up, on a busy machine.
START_S = 300.0
# Pings of an actor that computes, within the time that it has to answer one.
ASKED_TIMES = 6
# The longest pause between two pings: an answer may say that the call will never end.
_ASKED_S = 2.0
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
    except RayError as err:
        raise ActorLostError(str(err)) from err


async def ask_living(
    reference: ObjectRef[T], ping: Callable[[], ObjectRef[Any]], max_silence_s: float
) -> T:
    """`ask`, for as long as the actor answers `ping`, which waits for no other call.

    Raises `ActorLostError` also where one is not answered in time, and what `ping` raises.
    """
    call = asyncio.ensure_future(ask(reference))
    every_s = min(max_silence_s / ASKED_TIMES, _ASKED_S)
    try:
        while not (await asyncio.wait([call], timeout=every_s))[0]:
            try:
                async with asyncio.timeout(max_silence_s):
                    await ask(ping())
            except TimeoutError:
                if not call.done():
                    raise ActorLostError(f"it did not answer for {max_silence_s:g} s") from None
        return await call
    finally:
        call.cancel()


def find_actor(name: str, namespace: str) -> ActorHandle[Any] | None:
    """A named actor's handle; None: there is none."""
    try:
        return cast("ActorHandle[Any]", ray.get_actor(name, namespace))
    except ValueError:
        return None


async def kill_actor(name: str, namespace: str, only: ActorHandle[Any] | None = None) -> None:
    """End a named actor, if any, and wait until its name is free.

    `only`: end no other that has its name by now.
    """
    deadline = asyncio.get_running_loop().time() + _GONE_S
    while (handle := find_actor(name, namespace)) is not None and only in (None, handle):
        ray.kill(handle, no_restart=True)
        if asyncio.get_running_loop().time() > deadline:
            raise ActorLostError(f"{name} does not end")
        await asyncio.sleep(_POLL_S)
