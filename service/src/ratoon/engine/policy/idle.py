"""A policy that nobody uses gives up its worker: it is put away, or it ends.

    nothing to run -> its newest state is in a checkpoint -> journaled -> the worker ends

Put away, it is as after the loss of a worker whose state is known to be on disk: its controller
answers what needs no worker, and brings one back for what does. Ended, it has nothing but its
checkpoints and its history, and its controller ends too. What is journaled is repeated by the next
start, so a kill at any moment leaves a policy that is in use, or one without a worker.

All times are the event loop's: a clock that is set puts nothing away.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from ratoon.engine.crash_points import CrashPoint
from ratoon.engine.policy.checkpointer import Checkpointer
from ratoon.engine.policy.publisher import PublicationState, Publisher
from ratoon.engine.policy.run import PolicyRun, cancel_queued
from ratoon.engine.refusals import policy_not_ready
from ratoon.errors import RatoonError
from ratoon.log import get_logger
from ratoon_proto.types import PolicyState

_LOG = get_logger("idle")
# How often the end of a publication is looked for.
_LANDING_S = 0.05


class Idle:
    """Used by the turn loop's coroutine, but for `put_away`.

    `is_needed` says whether anything waits that only a worker can do. `lock` is the controller's.
    `on_ended` is called once the policy has ended.
    """

    def __init__(
        self,
        run: PolicyRun,
        publisher: Publisher,
        checkpointer: Checkpointer,
        lock: asyncio.Lock,
        is_needed: Callable[[], bool],
        on_ended: Callable[[], None],
    ) -> None:
        self._run = run
        self._publisher = publisher
        self._checkpointer = checkpointer
        self._lock = lock
        self._is_needed = is_needed
        self._on_ended = on_ended
        # Since when nothing has waited; None: something does.
        self._since: float | None = None
        # Callers that wait until the policy is put away.
        self._asked: list[asyncio.Future[None]] = []

    def note(self, *, is_needed: bool) -> None:
        """Note whether anything waits now."""
        if is_needed:
            self._since = None
        elif self._since is None:
            self._since = time.monotonic()

    def wait_s(self) -> float | None:
        """Seconds until there is something to do here, if nothing else happens; None: never."""
        due_s = self._due_s()
        if due_s != 0.0 or self._run.state is not PolicyState.READY:
            return due_s
        if self._publisher.state_of(None) is not PublicationState.NONE:
            return _LANDING_S
        return self._checkpointer.wait_s(at_once=True)

    def pick(self, wake: Callable[[], None]) -> Callable[[], Awaitable[None]] | None:
        """The next thing to do here; None: there is none now. `wake` wakes the loop."""
        run = self._run
        if run.state is PolicyState.RELEASED:
            self.answer(None)
        try:
            run.window.check_closed()
        except RatoonError as error:
            self.answer(error)
        if self._due_s() != 0.0:
            return None
        if run.state is PolicyState.READY:
            if self._publisher.state_of(None) is not PublicationState.NONE:
                return None
            if self._checkpointer.wait_s(at_once=True) == 0.0:
                return lambda: self._checkpointer.take(wake)
            if self._checkpointer.is_behind:
                return None
        return self._end if self._is_over else self._put_away

    def answer(self, error: RatoonError | None) -> None:
        """Tell all that wait that the policy is put away, or why it is not."""
        asked, self._asked = self._asked, []
        for future in asked:
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    def tell_end(self) -> None:
        """Tell all that wait that the policy has ended."""
        run = self._run
        self._publisher.wake()
        self.answer(policy_not_ready(run.policy_id, run.state, run.failure))
        self._on_ended()

    @property
    def _is_over(self) -> bool:
        """Whether nobody has called for as long as the policy says."""
        ttl_s = self._run.spec.idle_ttl_s
        if ttl_s is None or self._since is None or self._run.awaits_teachers:
            return False
        return time.monotonic() >= max(self._since, self._run.called_at) + ttl_s

    def _due_s(self) -> float | None:
        """Seconds until the policy is to be put away or to end; None: never."""
        run, spec, since = self._run, self._run.spec, self._since
        if since is None:
            return None
        due: list[float] = []
        if spec.idle_ttl_s is not None and not run.awaits_teachers:
            due.append(max(since, run.called_at) + spec.idle_ttl_s)
        if run.state is PolicyState.READY and not run.window.is_open:
            due += [since] if self._asked else []
            due += [] if spec.idle_release_s is None else [since + spec.idle_release_s]
        return max(0.0, min(due) - time.monotonic()) if due else None

    async def put_away(self, wake: Callable[[], None]) -> None:
        """Wait until the policy is put away, which is to happen as soon as nothing waits.

        Raises WINDOW_OPEN where the window is open then.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked.append(future)
        wake()
        try:
            await future
        finally:
            if future in self._asked:  # The caller waits no longer.
                self._asked.remove(future)

    async def _put_away(self) -> None:
        run = self._run
        run.reach(CrashPoint.ENGINE_BEFORE_PUT_AWAY)
        async with self._lock:
            if self._is_needed() or run.state is not PolicyState.READY:
                return
            await run.journal.set_policy(run.token, run.policy_id, PolicyState.RELEASED, None)
            run.enter(PolicyState.RELEASED)
        run.reach(CrashPoint.ENGINE_AFTER_PUT_AWAY)
        await run.worker.release()
        _LOG.info("policy put away", policy_id=run.policy_id, version=run.version)
        self.answer(None)

    async def _end(self) -> None:
        """End the policy, with what waits behind a seq that nobody has sent."""
        run = self._run
        async with self._lock:
            is_in_use = run.state in (PolicyState.READY, PolicyState.RELEASED)
            if self._is_needed() or not (is_in_use and self._is_over):
                return
            for live in run.ledger.open_operations():
                await cancel_queued(run, live)
            why = f"nobody has called it for {run.spec.idle_ttl_s:g} s"
            failure, position = await run.journal.end_policy(run.token, run.policy_id, why)
            run.has_come_to(position)
            run.enter(PolicyState.ENDED, failure)
        _LOG.warning("policy ended", policy_id=run.policy_id, reason=failure)
