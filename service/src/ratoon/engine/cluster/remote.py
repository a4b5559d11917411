"""Connects a process to the engine's actor, and maps what can go wrong to `RatoonError`."""

# Ray's decorators are only partly typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ray import ObjectRef

from ratoon.engine.client import Engine, EngineClient
from ratoon.engine.cluster.ray_calls import ActorLostError, ask, find_actor
from ratoon.engine.journal.records import JournalAwayError
from ratoon.engine.settings import ENGINE_NAME
from ratoon.errors import ErrorCode, RatoonError, described
from ratoon.log import get_logger
from ratoon.method_call import MethodCall

if TYPE_CHECKING:
    from ray.actor import ActorProxy

    from ratoon.engine.cluster.engine_actor import EngineActor

_LOG = get_logger("client")
T = TypeVar("T")


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
