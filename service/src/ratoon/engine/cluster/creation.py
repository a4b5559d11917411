"""Watches the ranks of a policy while they are created, from a thread of its own.

Ranks wait for one another at every step of it, some of them in libraries that know no bound. So
what one raises, and that one is lost or does not go on, ends the others at once, and is what the
creation fails with: also where rank 0, in whose process this is, does not return from its step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from ratoon.engine.refusals import is_out_of_memory, unexpected
from ratoon.engine.worker.tasks import WorkerLostError
from ratoon.errors import CopyFailedError, RatoonError

_LOOK_S = 0.5
# Ranks may take so much longer for a step than the first that is through it. Models are read for as
# long as it takes.
BEHIND_S = 600.0
# For a rank to be found that failed, where the failure of another is that it waited for it.
_REASON_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a rank was asked last. `number` 0: nothing; 1: to load; others: `Rank`'s methods.

    `is_awaited`: rank 0 is through with its own part, and waits for this rank.
    """

    number: int
    is_over: bool
    is_awaited: bool


class WatchedPeer(Protocol):
    """A rank in another process: `ray_peer.RayPeer`."""

    def step(self) -> Step: ...

    def failure(self) -> Exception | None:
        """What it is known by now to have raised, or that it is lost. Does not wait."""
        ...

    def end(self) -> None:
        """End its process, of which all who wait for it are told by their connections."""
        ...


class Creation:
    """States: open; over, with or without a failure."""

    def __init__(self, name: str, peers: Callable[[], Sequence[WatchedPeer]]) -> None:
        """`name`: of rank 0, in messages. `peers`: those there are by now, ranks 1 and above."""
        self._name = name
        self._peers = peers
        self._is_over = threading.Event()
        self._failure: Exception | None = None
        # All ranks have met.
        self.has_joined = False

    def failure(self) -> RatoonError | WorkerLostError | None:
        """Why the creation has failed, though rank 0 may still be in it."""
        match self._failure:
            case None | RatoonError() | WorkerLostError():
                return self._failure
            case CopyFailedError() if not is_out_of_memory(self._failure):
                return WorkerLostError(str(self._failure))
            case _:
                return unexpected(self._failure)

    @contextmanager
    def watched(self) -> Generator[None, None, None]:
        """Inside, the ranks are created. Raises `failure`, that of the first rank that has one."""
        thread = threading.Thread(target=self._watch, name="ratoon-creation", daemon=True)
        thread.start()
        try:
            yield
        except Exception as err:  # noqa: BLE001 - raised below, or what it follows from
            self._is_over.set()
            thread.join()
            # What the others ran into may be that this rank has no memory.
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
            if failure is None and time.monotonic() - since > BEHIND_S:
                failure = WorkerLostError(self._behind(steps))
            if failure is not None:
                self._fail(self._reason(failure))
                return

    def _fail(self, failure: Exception) -> None:
        self._failure = failure
        for peer in self._peers():
            peer.end()

    def _reason(self, failure: Exception) -> Exception:
        """What a failure follows from, if another rank comes to say so."""
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
    """Whether it need not be what another rank has failed with."""
    return not isinstance(failure, CopyFailedError) or is_out_of_memory(failure)
