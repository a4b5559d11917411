"""The engine's process, a detached actor around `engine.Engine`, and how others connect to it.

After a restart the engine recovers by itself, from its settings and the journal. Processes that
look the actor up import this module, so the constructor imports the engine.
"""

# Ray's decorators are only partly typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar, cast

import ray
from ray import ObjectRef

from ratoon.cluster.ray_calls import ActorLostError, ask, find_actor
from ratoon.engine.client import Engine, EngineClient
from ratoon.engine.journal.records import JournalAwayError
from ratoon.engine.settings import ENGINE_NAME, EngineSettings
from ratoon.errors import ErrorCode, RatoonError, described
from ratoon.garbage import frozen_imports
from ratoon.log import configure_logging, get_logger
from ratoon.method_call import MethodCall

if TYPE_CHECKING:
    from ray.actor import ActorProxy

# Shared by all policies, to read, write and hash files.
_NUM_THREADS = 64
_LOG = get_logger("client")
T = TypeVar("T")


class EngineActor:
    """Wraps `Engine`: `call` runs any of its public methods."""

    def __init__(self, settings: EngineSettings) -> None:
        configure_logging(settings.log_level)
        with frozen_imports():
            from ratoon.cluster.ray_cluster import open_engine

            self._engine = open_engine(settings)
        self._threads: ThreadPoolExecutor | None = None
        # Nobody else would call it after a restart.
        ray.get_runtime_context().current_actor.call.remote(MethodCall.of(Engine.recover))

    @ray.method
    async def call(self, call: MethodCall[Awaitable[Any]]) -> Any:
        """Call a method of the engine. Raises what the method raises."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="files")
            asyncio.get_running_loop().set_default_executor(self._threads)
        return await call.on(self._engine)


async def connect(namespace: str) -> EngineClient:
    """A client, in a process connected to Ray. Raises UNAVAILABLE where no engine runs."""
    found = find_actor(ENGINE_NAME, namespace)
    if found is None:
        raise RatoonError(ErrorCode.UNAVAILABLE, f"no engine runs as {namespace}")
    actor = cast("ActorProxy[EngineActor]", found)

    async def send(call: MethodCall[Awaitable[Any]]) -> Any:
        return await _answer(actor.call.remote(call))

    return EngineClient(send, await send(MethodCall.of(Engine.settings)))


async def _answer(reference: ObjectRef[T]) -> T:
    """Await the answer. Raises only `RatoonError`."""
    try:
        return await ask(reference)
    except RatoonError:
        raise
    except ActorLostError as err:
        raise RatoonError(ErrorCode.UNAVAILABLE, "the engine does not answer; try again") from err
    except JournalAwayError as err:
        raise RatoonError(ErrorCode.UNAVAILABLE, f"{err}; try again") from err
    except Exception as err:
        _LOG.exception("unexpected failure of the engine")
        raise RatoonError(ErrorCode.INTERNAL, described(err)) from err
