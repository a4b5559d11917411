"""Watches the ranks of a policy while they are created, from a thread of its own.

Ranks wait for one another at every step of their creation, some of them in libraries that know no
bound. So if one rank raises, is lost or stops making progress, all others are ended at once and the
creation fails for that reason, even while rank 0, which lives in this process, hangs in its step.
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
# Seconds that a rank may be behind the first one that has finished a step. Reading the model has no
# such bound.
BEHIND_S = 600.0
# Seconds to look for the rank that failed first, once another one fails because it waited for it.
_REASON_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A rank's newest call. `number` 0: none yet; 1: to load the model; others: `Rank`'s methods.

    `is_awaited`: rank 0 has finished its own part, and waits for this rank.
    """

    number: int
    is_over: bool
    is_awaited: bool


class WatchedPeer(Protocol):
    """A rank in another process: `ray_peer.RayPeer`."""

    def step(self) -> Step: ...

    def failure(self) -> Exception | None:
        """The error that it is known to have raised, or its loss; None: neither. Does not wait."""
        ...

    def end(self) -> None:
        """End its process. Ranks that wait for it notice by their connections."""
        ...


class Creation:
    """States: open; over, with or without a failure."""

    def __init__(self, name: str, peers: Callable[[], Sequence[WatchedPeer]]) -> None:
        """`name`: rank 0's, in messages. `peers`: returns the ranks from 1 on that exist by now."""
        self._name = name
        self._peers = peers
        self._is_over = threading.Event()
        self._failure: Exception | None = None
        # All ranks have met.
        self.has_joined = False

    def failure(self) -> RatoonError | WorkerLostError | None:
        """Why the creation has failed; rank 0 may still be in it. None: it has not."""
        match self._failure:
            case None | RatoonError() | WorkerLostError():
                return self._failure
            case CopyFailedError() if not is_out_of_memory(self._failure):
                return WorkerLostError(str(self._failure))
            case _:
                return unexpected(self._failure)

    @contextmanager
    def watched(self) -> Generator[None, None, None]:
        """Watch while the block creates the ranks. Raises `failure`, that of the first rank."""
        thread = threading.Thread(target=self._watch, name="ratoon-creation", daemon=True)
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
