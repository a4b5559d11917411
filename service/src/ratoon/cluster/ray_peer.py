"""Ranks in other processes, as rank 0's process calls them, and the watch while they wait for one
another.

`RayPeer` is the `ranks.group.Peer` of rank 0's process, over an actor. A rank that was lost once
stays lost, so every later call fails at once.

Ranks wait for one another at every step of their creation, and whenever they copy in a step, a load
or an import, some of them in libraries that know no bound. So if one rank raises, is lost or stops
making progress, all others are ended at once and what they do fails for that reason, even while
rank 0, which lives in this process, hangs in its part. A thread of its own watches for that.
"""

# Ray's decorators are only partly typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol, cast

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from ratoon.cluster.ray_calls import ASKED_TIMES
from ratoon.engine.refusals import is_out_of_memory, unexpected
from ratoon.engine.worker.tasks import WorkerLostError
from ratoon.errors import CopyFailedError, RatoonError
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

_LOOK_S = 0.5
# Seconds that a rank may be behind the first one that has finished a step. Reading the model has no
# such bound.
BEHIND_S = 600.0
# Seconds to look for the rank that failed first, once another one fails because it waited for it.
_REASON_S = 3.0
# Concurrency groups of the `Rank` methods that run beside others, each on a thread of its own.
_BESIDE = {
    Rank.write_states.__name__: "files",
    Rank.write_weights.__name__: "versions",
    Rank.write_delta.__name__: "versions",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A rank's newest call. `number` 0: none yet; 1: to load the model; others: `Rank`'s methods.

    `is_awaited`: rank 0 has finished its own part, and waits for this rank.
    """

    number: int
    is_over: bool
    is_awaited: bool


class WatchedPeer(Protocol):
    """A rank in another process: `RayPeer`."""

    def step(self) -> Step: ...

    def failure(self) -> Exception | None:
        """The error that it is known to have raised, or its loss; None: neither. Does not wait."""
        ...

    def end(self) -> None:
        """End its process. Ranks that wait for it notice by their connections."""
        ...


class Watch:
    """Watches all ranks through one thing that they do together.

    States: open; over, with or without a failure.
    """

    def __init__(
        self,
        name: str,
        peers: Callable[[], Sequence[WatchedPeer]],
        *,
        is_creation: bool = True,
    ) -> None:
        """`name`: rank 0's, in messages. `peers`: returns the ranks from 1 on that exist by now.

        `is_creation`: there is nothing yet that a failure would lose.
        """
        self._name = name
        self._peers = peers
        self._is_creation = is_creation
        self._is_over = threading.Event()
        self._failure: Exception | None = None
        # All ranks have met.
        self.has_joined = not is_creation

    def failure(self) -> RatoonError | WorkerLostError | None:
        """Why it has failed; rank 0 may still be in it. None: it has not."""
        match self._failure:
            case None | WorkerLostError():
                return self._failure
            case CopyFailedError() if not is_out_of_memory(self._failure):
                return WorkerLostError(str(self._failure))
            case _:
                error = unexpected(self._failure)
                return error if self._is_creation else WorkerLostError(error.message)

    @contextmanager
    def watched(self) -> Generator[None, None, None]:
        """Watch while the block runs all ranks. Raises `failure`, that of the first rank."""
        thread = threading.Thread(target=self._watch, name="ratoon-watch", daemon=True)
        thread.start()
        try:
            yield
        except Exception as err:  # noqa: BLE001 - raised below, or what it follows from
            self._is_over.set()
            thread.join()
            # Other ranks may have failed only because this one has no memory.
            is_later = isinstance(self._failure, CopyFailedError) and is_out_of_memory(err)
            if self._failure is None or is_later:
                err.add_note(self._name)
                self._fail(self._reason(err))
        finally:
            self._is_over.set()
            thread.join()
        if failure := self.failure():
            raise failure

    def _watch(self) -> None:
        before, since = None, time.monotonic()
        while not self._is_over.wait(_LOOK_S):
            peers = self._peers()
            failure = next(filter(None, (peer.failure() for peer in peers)), None)
            steps = [peer.step() for peer in peers]
            if (steps, self.has_joined) != before or self._may_read(steps):
                before, since = (steps, self.has_joined), time.monotonic()
            # Copies have a bound of their own, each.
            is_behind = self._is_creation and time.monotonic() - since > BEHIND_S
            if failure is None and is_behind:
                failure = WorkerLostError(self._behind(steps))
            if failure is not None:
                self._fail(self._reason(failure))
                return

    def _fail(self, failure: Exception) -> None:
        self._failure = failure
        for peer in self._peers():
            peer.end()

    def _reason(self, failure: Exception) -> Exception:
        """The failure that caused this one, if another rank reports it in time."""
        deadline = time.monotonic() + _REASON_S
        while not _is_reason(failure) and time.monotonic() < deadline:
            others = filter(None, (peer.failure() for peer in self._peers()))
            found = next(filter(_is_reason, others), None)
            if found is not None:
                return found
            time.sleep(_LOOK_S)
        return failure

    def _may_read(self, steps: Sequence[Step]) -> bool:
        """Whether every rank may still be reading the model."""
        return self.has_joined and all(step.number == 1 and not step.is_over for step in steps)

    def _behind(self, steps: Sequence[Step]) -> str:
        awaited = [rank for rank, step in enumerate(steps, 1) if step.is_awaited]
        behind = [rank for rank, step in enumerate(steps, 1) if not step.is_over]
        ranks = awaited or [0, *behind]
        return f"of ranks {ranks} one has not gone on for {BEHIND_S:g} s"


def _is_reason(failure: Exception) -> bool:
    """Whether a failure is a cause of its own, not just another rank's failure seen from here."""
    return not isinstance(failure, CopyFailedError) or is_out_of_memory(failure)


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
        # Why it is lost, as whoever noticed first saw it; None: it is not, as far as is known.
        self._loss: str | None = None
        # The ping of `is_lost` that is under way, if any, and since when there is this one or none.
        self._asked: ObjectRef[Any] | None = None
        self._since = time.monotonic()
        self._numbers = count(1)
        self._load: _Pending | None = None
        self._last = 0
        # The rank's name in messages, with its device once that is known.
        self._name = f"rank {number}"
        # Its newest call that is watched, and the number of such calls so far.
        self._newest: _Pending | None = None
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

    def forget(self) -> None:
        """Drop the newest call, which ended before what is watched next."""
        self._newest = None

    def wait(self, reference: ObjectRef[object]) -> object:
        """A call's result. Raises what the call raised, and `WorkerLostError`."""
        self._is_awaited = True
        while self._loss is None and not _is_over(reference, self._max_silence_s / ASKED_TIMES):
            self._get(self._actor.ping.remote(), self._max_silence_s)
        self._is_awaited = False
        return self._get(reference, self._max_silence_s)

    def is_lost(self) -> bool:
        """Whether the rank is known to be lost. Pings it every so often, and never waits."""
        silent_s = time.monotonic() - self._since
        is_asked_enough = self._asked is None and silent_s < self._max_silence_s / ASKED_TIMES
        if self._loss is not None or is_asked_enough:
            return self._loss is not None
        if self._asked is None:
            self._asked = self._actor.ping.remote()
        elif _is_over(self._asked, 0.0) or silent_s > self._max_silence_s:
            asked, self._asked = self._asked, None
            with suppress(WorkerLostError):
                self._get(asked, 0.0)
        else:
            return False
        self._since = time.monotonic()
        return self._loss is not None

    def start(self, call: MethodCall[Any]) -> _Pending:
        """See `ranks.group.Peer.start`. Raises `WorkerLostError`, and what `load` raised."""
        if self._loss is not None:
            raise WorkerLostError(f"{self._name} is lost")
        if group := _BESIDE.get(call.name):
            beside = cast("Any", self._actor.call_beside).options(concurrency_group=group)
            return _Pending(self, beside.remote(call))
        self._num_asked += 1
        if self._load is not None:
            self._load.result()
            self._load = None
        self._last = next(self._numbers)
        pending = _Pending(self, self._actor.call.remote(self._last, call))
        self._newest = pending
        return pending

    def stop(self) -> None:
        self._actor.stop.remote(self._last)

    def end(self) -> None:
        ray.kill(cast("Any", self._actor))

    def _get(self, reference: ObjectRef[Any], timeout_s: float) -> object:
        try:
            return ray.get(reference, timeout=0.0 if self._loss else timeout_s)
        except RayTaskError as err:
            cause = err.cause
            assert isinstance(cause, BaseException)
            cause.add_note(self._name)
            raise cause from None
        except GetTimeoutError:
            silent_s = max(timeout_s, self._max_silence_s)
            self._loss = self._loss or f"{self._name} did not answer for {silent_s:g} s"
            # Ranks that wait for it in a pass are told by its connections.
            self.end()
            raise WorkerLostError(self._loss) from None
        except RayError as err:
            # The actor of a silent process has died by `end`, which is not why it is lost.
            self._loss = self._loss or f"{self._name} is lost: {err}"
            raise WorkerLostError(self._loss) from err


def _is_over(reference: ObjectRef[object], wait_s: float) -> bool:
    return bool(cast("Any", ray).wait([reference], timeout=wait_s)[0])
