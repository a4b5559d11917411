"""Calls a rank in another process: the `ranks.group.Peer` of rank 0's process, over an actor.

A rank that was lost once stays lost, so every later call fails at once.
"""

# Ray's decorators are only partly typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from ratoon.cluster.creation import Step
from ratoon.cluster.ray_calls import ASKED_TIMES
from ratoon.engine.worker.tasks import WorkerLostError
from ratoon.method_call import MethodCall, MethodNames

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorProxy

    from ratoon.cluster.ranks import RankActor
    from ratoon.shards.copies import Meeting
    from ratoon.train.ranks.rank import Rank
    from ratoon.train.spec import TrainerSpec
else:
    # The module of the class imports torch.
    Rank = MethodNames()

# Concurrency groups of the `Rank` methods that run beside others, each on a thread of its own.
_BESIDE = {Rank.write_states.__name__: "files", Rank.write_weights.__name__: "versions"}


@dataclass(frozen=True, slots=True)
class _Pending:
    """A `ranks.group.Pending`: an actor's answer to come."""

    peer: RayPeer
    reference: ObjectRef[object]

    def has_failed(self) -> bool:
        if not _is_over(self.reference, 0.0):
            return self.peer.is_lost()
        try:
            self.result()
        except Exception:  # noqa: BLE001 - which one, `result` says
            return True
        return False

    def result(self) -> object:
        return self.peer.wait(self.reference)


class RayPeer:
    """A `ranks.group.Peer`: an actor, lost once it answers nothing for `max_silence_s`."""

    def __init__(self, actor: ActorProxy[RankActor], number: int, max_silence_s: float) -> None:
        self._actor = actor
        self._number = number
        self._max_silence_s = max_silence_s
        self._is_lost = False
        # The ping of `is_lost` that is under way, if any, and since when there is this one or none.
        self._asked: ObjectRef[Any] | None = None
        self._since = time.monotonic()
        self._numbers = count(1)
        self._load: _Pending | None = None
        self._last = 0
        # The rank's name in messages, with its device once that is known.
        self._name = f"rank {number}"
        # While it is created: its newest call, and the number of calls so far.
        self._newest: _Pending | None = None
        self._is_created = False
        self._num_asked = 0
        self._is_awaited = False

    def await_start(self, timeout_s: float) -> None:
        """Wait until its process is up. Raises `WorkerLostError`."""
        self._name += f" on {self._get(self._actor.ping.remote(), timeout_s)}"

    def place(self) -> tuple[str, str]:
        """The node of its process, and the GPU that it has there. Raises `WorkerLostError`."""
        return cast("tuple[str, str]", self._get(self._actor.place.remote(), self._max_silence_s))

    def see(self, gpus: str) -> None:
        """Make these GPUs visible to its process. Raises `WorkerLostError`."""
        self._get(self._actor.see.remote(gpus), self._max_silence_s)

    def load(self, spec: TrainerSpec, meeting: Meeting) -> None:
        """Begin to load the model. The first call waits for that, and raises what it raised."""
        reference = self._actor.load.remote(spec, meeting, self._number)
        self._load = self._newest = _Pending(self, cast("ObjectRef[object]", reference))
        self._num_asked = 1

    def step(self) -> Step:
        """See `WatchedPeer.step`."""
        newest = self._newest
        return Step(
            number=self._num_asked,
            is_over=newest is None or _is_over(newest.reference, 0.0),
            is_awaited=self._is_awaited,
        )

    def failure(self) -> Exception | None:
        """See `WatchedPeer.failure`."""
        newest = self._newest
        try:
            if newest is not None and newest.has_failed():
                newest.result()
        except Exception as err:  # noqa: BLE001 - whatever it is, it is told
            return err
        return None

    def end_creation(self) -> None:
        """Drop the newest call: it is not watched any more."""
        self._is_created, self._newest = True, None

    def wait(self, reference: ObjectRef[object]) -> object:
        """A call's result. Raises what the call raised, and `WorkerLostError`."""
        self._is_awaited = True
        while not self._is_lost and not _is_over(reference, self._max_silence_s / ASKED_TIMES):
            self._get(self._actor.ping.remote(), self._max_silence_s)
        self._is_awaited = False
        return self._get(reference, self._max_silence_s)

    def is_lost(self) -> bool:
        """Whether the rank is known to be lost. Pings it every so often, and never waits."""
        silent_s = time.monotonic() - self._since
        if self._is_lost or (self._asked is None and silent_s < self._max_silence_s / ASKED_TIMES):
            return self._is_lost
        if self._asked is None:
            self._asked = self._actor.ping.remote()
        elif _is_over(self._asked, 0.0) or silent_s > self._max_silence_s:
            asked, self._asked = self._asked, None
            with suppress(WorkerLostError):
                self._get(asked, 0.0)
        else:
            return False
        self._since = time.monotonic()
        return self._is_lost

    def start(self, call: MethodCall[Any]) -> _Pending:
        """See `ranks.group.Peer.start`. Raises `WorkerLostError`, and what `load` raised."""
        if self._is_lost:
            raise WorkerLostError(f"{self._name} is lost")
        self._num_asked += 1
        if self._load is not None:
            self._load.result()
            self._load = None
        if group := _BESIDE.get(call.name):
            beside = cast("Any", self._actor.call_beside).options(concurrency_group=group)
            reference = beside.remote(call)
        else:
            self._last = next(self._numbers)
            reference = self._actor.call.remote(self._last, call)
        pending = _Pending(self, reference)
        self._newest = None if self._is_created else pending
        return pending

    def stop(self) -> None:
        self._actor.stop.remote(self._last)

    def end(self) -> None:
        ray.kill(cast("Any", self._actor))

    def _get(self, reference: ObjectRef[Any], timeout_s: float) -> object:
        try:
            return ray.get(reference, timeout=0.0 if self._is_lost else timeout_s)
        except RayTaskError as err:
            cause = err.cause
            assert isinstance(cause, BaseException)
            cause.add_note(self._name)
            raise cause from None
        except GetTimeoutError:
            self._is_lost = True
            # Ranks that wait for it in a pass are told by its connections.
            self.end()
            silent_s = max(timeout_s, self._max_silence_s)
            what = f"{self._name} did not answer for {silent_s:g} s"
            raise WorkerLostError(what) from None
        except RayError as err:
            self._is_lost = True
            raise WorkerLostError(f"{self._name} is lost: {err}") from err


def _is_over(reference: ObjectRef[object], wait_s: float) -> bool:
    return bool(cast("Any", ray).wait([reference], timeout=wait_s)[0])
