"""The engine's process: its start and end, and how others connect to it.

The process is a detached actor around `engine.Engine`. Starting is idempotent; after a restart the
engine recovers by itself, from its settings and the journal. Processes that look the actor up
import this module, so the constructor imports the engine.
"""

# Ray's decorators are only partly typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

import ray
from ray import ObjectRef
from ray.exceptions import RayTaskError

from ratoon.cluster.placement import ON_HEAD, worker_device
from ratoon.cluster.ray_calls import ActorLostError, ask, find_actor, kill_actor
from ratoon.cluster.worker_places import SPARE
from ratoon.cluster.worker_process import make_spare
from ratoon.config import RatoonConfig
from ratoon.engine.client import Engine, EngineClient
from ratoon.engine.files.archive import check_store
from ratoon.engine.journal.records import JournalAwayError
from ratoon.engine.settings import ENGINE_NAME, EngineSettings
from ratoon.engine.types import Policy
from ratoon.errors import ErrorCode, RatoonError, described
from ratoon.garbage import frozen_imports
from ratoon.log import configure_logging, get_logger
from ratoon.method_call import MethodCall
from ratoon_proto.types import PolicyState

if TYPE_CHECKING:
    from ray.actor import ActorProxy


# Shared by all policies, to read, write and hash files.
_NUM_THREADS = 64
T = TypeVar("T")
# Long polls wait inside the engine.
_MAX_CONCURRENCY = 100_000
# Seconds to wait for an answer, beyond the call's own time. There is none from an engine that waits
# for its database at its start.
_LATE_S = 15.0
# How long Serve's start waits for workers.
_START_S = 15.0
_POLL_S = 1.0
_LOG = get_logger("client")


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


def start_engine(config: RatoonConfig) -> ObjectRef[None]:
    """Start the engine unless it runs; it is up once the reference resolves.

    Raises what opening the object store raises, and `ray.get` what opening the database does.
    """
    settings = EngineSettings.from_config(config)
    check_store(settings.storage_url)
    if worker_device(settings) == "cpu":
        # Before the engine: nothing else takes as long to import.
        make_spare(settings)
    engine = (
        ray.remote(EngineActor)
        .options(
            name=ENGINE_NAME,
            namespace=settings.namespace,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            resources=ON_HEAD,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=_MAX_CONCURRENCY,
        )
        .remote(settings)
    )
    is_up = engine.call.remote(MethodCall.of(Engine.recover))
    # The first GetServerInfo would wait for torch; nobody waits for it here.
    engine.call.remote(MethodCall.of(Engine.backends))
    return is_up


def wait_for_workers(config: RatoonConfig) -> None:
    """Wait until the spare worker has started and no policy is being created.

    Returns after `_START_S` at most, and at once where the engine does not know its policies.
    """
    deadline = time.monotonic() + _START_S
    spare = find_actor(SPARE, config.ray.namespace)
    if spare is not None:
        ray.wait([spare.tenants.remote()], timeout=_START_S)
    engine = find_actor(ENGINE_NAME, config.ray.namespace)
    while engine is not None and time.monotonic() < deadline:
        with suppress(RayTaskError):
            listing = engine.call.remote(MethodCall.of(Engine.policies))
            policies = cast("tuple[Policy, ...]", ray.get(listing))
            if any(policy.state is PolicyState.CREATING for policy in policies):
                time.sleep(_POLL_S)
                continue
        return


def drain_engine(config: RatoonConfig) -> None:
    """Refuse new work, and let running operations finish, `limits.drain_s` at most."""
    grace_s = config.limits.drain_s
    asyncio.run(
        _tell(config.ray.namespace, grace_s + _LATE_S, MethodCall.of(Engine.drain, grace_s))
    )


def stop_engine(config: RatoonConfig) -> None:
    """End all processes of the engine, running operations too; the journal stays."""
    asyncio.run(_stop(config.ray.namespace))


async def _stop(namespace: str) -> None:
    await _tell(namespace, _LATE_S, MethodCall.of(Engine.stop_policies))
    await kill_actor(ENGINE_NAME, namespace)


async def _tell(namespace: str, timeout_s: float, call: MethodCall[Awaitable[None]]) -> None:
    """Call a method of the engine, if one runs and answers."""
    found = find_actor(ENGINE_NAME, namespace)
    if found is None:
        return
    engine = cast("ActorProxy[EngineActor]", found)
    with suppress(ActorLostError, TimeoutError):
        async with asyncio.timeout(timeout_s):
            await ask(engine.call.remote(call))
