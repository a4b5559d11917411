"""The engine's actor as an object: how every other process calls the engine."""

# Ray's decorators are only partly typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar, cast

from ray import ObjectRef

from ratoon.engine.client import EngineClient
from ratoon.engine.cluster.ray_calls import ActorLostError, ask, find_actor
from ratoon.engine.journal.records import JournalAwayError
from ratoon.engine.settings import ENGINE_NAME
from ratoon.errors import ErrorCode, RatoonError, described
from ratoon.log import get_logger

if TYPE_CHECKING:
    from ray.actor import ActorProxy

    from ratoon.engine.cluster.engine_actor import EngineActor
    from ratoon.engine.engine import Engine

_LOG = get_logger("client")
T = TypeVar("T")


async def connect(namespace: str) -> EngineClient:
    """A client, in a process connected to Ray. Raises UNAVAILABLE where no engine runs."""
    found = find_actor(ENGINE_NAME, namespace)
    if found is None:
        raise RatoonError(ErrorCode.UNAVAILABLE, f"no engine runs as {namespace}")
    engine = cast("Engine", _RemoteEngine(cast("ActorProxy[EngineActor]", found)))
    return EngineClient(engine, await engine.settings())


class _RemoteEngine:
    """Forwards the engine's methods by name to its process."""

    def __init__(self, actor: ActorProxy[EngineActor]) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Callable[..., Awaitable[object]]:
        async def call(*args: object) -> object:
            return await _answer(self._actor.call.remote(name, *args))

        return call


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
