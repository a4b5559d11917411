"""The loop that runs a policy's operations, one at a time and in seq order.

    own the policy -> [pick a turn or what runs between turns -> execute and conclude it] -> ...

Where there is neither for long, the policy is put away (`policy.idle`). What needs a worker then
makes the loop own the policy again, with one.

Only the loop touches the worker's weights. Forwards without a key, requested publications,
checkpoints and reads of gradients run between turns, alternating with them so that neither starves.
On any error the loop owns the policy again: it trusts only the journal and the worker.

A read of gradients changes nothing: it is not journaled, and a worker that is lost meanwhile fails
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from functools import partial

from ratoon.engine.journal.records import JournalAwayError
from ratoon.engine.policy import telemetry
from ratoon.engine.policy.checkpointer import Checkpointer
from ratoon.engine.policy.executor import Executor
from ratoon.engine.policy.idle import Idle
from ratoon.engine.policy.publisher import Publisher
from ratoon.engine.policy.queue import LiveOperation
from ratoon.engine.policy.recovery import RecoveryStoppedError
from ratoon.engine.policy.run import MAX_LOSSES, NumbersFailedError, PolicyRun, note_end
from ratoon.engine.policy.startup import fence_worker, start_policy
from ratoon.engine.policy.teachers import Teachers
from ratoon.engine.refusals import is_waited_for, not_up, operation_not_found, policy_not_ready
from ratoon.engine.worker.tasks import (
    FencedError,
    GradientRequest,
    NeighbourLostError,
    WorkerLostError,
)
from ratoon.engine.worker.worker import WorkerCore
from ratoon.errors import ErrorCode, RatoonError, described
from ratoon.log import get_logger
from ratoon_proto.types import GradientManifest, PolicyState, WeightFile

_LOG = get_logger("turns")
# More than the number of workers that one operation, or one version, may lose.
_MAX_FAILURES = MAX_LOSSES + 1
_BACKOFF_S = 0.2
_AWAY_S = 1.0
_WAITING_S = 2.0
Step = Callable[[], Awaitable[None]]
_FILE_NAME = "gradients.safetensors"


class TurnLoop:
    """Owns the task that runs the loop."""

    def __init__(
        self,
        run: PolicyRun,
        executor: Executor,
        publisher: Publisher,
        checkpointer: Checkpointer,
        gradients: GradientReads,
        lock: asyncio.Lock,
        on_ended: Callable[[], None],
    ) -> None:
        """`on_ended`: see `Idle`."""
        self._run = run
        self.teachers = Teachers(run, self.wake)
        self._executor = executor
        self._publisher = publisher
        self._checkpointer = checkpointer
        self._gradients = gradients
        self._lock = lock
        self._idle = Idle(run, publisher, checkpointer, lock, self._is_worker_needed, on_ended)
        self._wake = asyncio.Event()
        self._must_restart = False
        # How often a restart was asked for.
        self._restarts = 0
        self._is_paused = False
        self._prefers_between = False
        self._publications: list[asyncio.Future[None]] = []
        # Queued and running counts as last sent to the metrics.
        self._reported: tuple[int, int] | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Own the policy, then run in the background. Raises `RatoonError`.

        Where recovery stops, or the policy failed for its numbers, it is marked failed and runs
        nothing.
        """
        assert self._task is None
        try:
            await self._own()
        except (RecoveryStoppedError, NumbersFailedError) as err:
            await self._give_up(str(err))
            return
        except WorkerLostError as err:
            # The next start takes another worker.
            is_waited, reason = isinstance(err, NeighbourLostError), f"its worker was lost: {err}"
            raise not_up(self._run.policy_id, reason, is_waited=is_waited) from err
        self._task = asyncio.get_running_loop().create_task(self._loop())

    async def stop(self, grace_s: float) -> None:
        """Wait up to `grace_s` seconds for the running operation, then stop."""
        deadline = asyncio.get_running_loop().time() + grace_s
        while any(live.is_started for live in self._run.ledger.open_operations()):
            if asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(0.02)
        await self.teachers.stop()
        await self._publisher.landed(max(0.0, deadline - asyncio.get_running_loop().time()))
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._checkpointer.stop()
        await self._publisher.stop()
        self._run.archive.abandon()
        self._end_requests(policy_not_ready(self._run.policy_id, self._run.state))

    def abandon(self) -> None:
        """Stop at once; the running operation is left where it is."""
        if self._task is not None:
            self._task.cancel()
        self.teachers.abandon()
        self._checkpointer.abandon()
        self._publisher.abandon()
        self._run.archive.abandon()
        self._end_requests(policy_not_ready(self._run.policy_id, self._run.state))

    def wake(self) -> None:
        """Make the loop look for work."""
        self._report()
        self._wake.set()

    def pause(self) -> None:
        """Start nothing more; the running operation finishes, queued ones stay queued."""
        self._is_paused = True

    @property
    def is_known(self) -> bool:
        """Whether memory matches the journal, except for what is running."""
        return not self._must_restart

    def restart(self) -> None:
        """Read the journal again before the next turn, as memory may differ from it."""
        self._must_restart = True
        self._restarts += 1
        self.wake()

    async def given_up(self) -> None:
        """Until the loop of a policy that failed has ended."""
        if self._task is not None:
            await asyncio.wait({self._task})

    def bring_back(self) -> None:
        """Start a policy that has `given_up` again: the journal has a LoadCheckpoint for it."""
        self._run.enter(PolicyState.CREATING)
        self._must_restart = True
        self._task = asyncio.get_running_loop().create_task(self._loop())

    def collect(self) -> None:
        """Delete checkpoints and versions that nothing needs, between two turns."""
        self._checkpointer.must_collect = True
        self.wake()

    async def publish(self) -> None:
        """Begin to publish the current version between two turns."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._publications.append(future)
        self.wake()
        await future

    async def release(self) -> None:
        """See `Idle.put_away`."""
        await self._idle.put_away(self.wake)

    async def fail(self, failure: str) -> None:
        """Journal why the policy failed, and end its worker, unless both are another controller's.

        A later start tries again.
        """
        run = self._run
        try:
            await run.journal.fail(run.token, run.policy_id, failure)
        except FencedError:
            return  # The worker belongs to the other controller.
        except Exception as err:  # noqa: BLE001 - the journal does not answer
            _LOG.warning("failure not journaled", policy_id=run.policy_id, reason=str(err))
        try:
            await run.worker.release()
        except Exception as err:  # noqa: BLE001 - Ray does not end it; deleting the policy does
            _LOG.error("worker not released", policy_id=run.policy_id, reason=str(err))

    async def _loop(self) -> None:
        """Take turns until the policy fails or another controller owns it."""
        failures, failure, last = 0, "", ""
        while failures < _MAX_FAILURES:
            try:
                if self._must_restart and await self._own():
                    failures = 0
                if self._run.state is not PolicyState.ENDED and await self._take_one():
                    failures = 0
                if self._run.state is PolicyState.ENDED:
                    self._idle.tell_end()
                    return
            except FencedError as err:
                # Another controller owns the policy, which is fine.
                _LOG.warning("fenced", policy_id=self._run.policy_id, reason=str(err))
                await self._give_up("")
                return
            except (RecoveryStoppedError, NumbersFailedError) as err:
                failure = str(err)
                break
            except JournalAwayError as err:
                # The policy is fine: it continues once the journal answers.
                _LOG.warning("journal away", policy_id=self._run.policy_id, reason=str(err))
                self._must_restart = True
                await asyncio.sleep(_AWAY_S)
            except (Exception, asyncio.CancelledError) as err:
                # The loop restarts from the journal and the worker, whatever the error.
                if is_cancelled():
                    raise
                if is_waited_for(err) or isinstance(err, NeighbourLostError):
                    # The policy is fine: it continues once disk space or a GPU is free, or the
                    # process that another policy's call was lost with is replaced.
                    _LOG.error("waiting", policy_id=self._run.policy_id, reason=str(err))
                    self._must_restart = True
                    await asyncio.sleep(_WAITING_S)
                    continue
                _LOG.exception("turn failed", policy_id=self._run.policy_id, failures=failures)
                self._must_restart, failures = True, failures + 1
                last = described(err)
                await asyncio.sleep(_BACKOFF_S * 2**failures)
        in_a_row = f"its controller failed {failures} times in a row, the last time with {last}"
        await self._give_up(failure or in_a_row)

    async def _own(self) -> bool:
        """Start from journal and worker; returns whether that has ended a stopped publication."""
        if self._run.state is PolicyState.RELEASED and self._is_worker_needed():
            # Readers need not wait for a GPU, nor for a process that imports torch.
            await fence_worker(self._run)
        async with self._lock:
            await self._checkpointer.stop()
            await self._publisher.stop()
            was_stopped = self._publisher.is_stopped
            restarts = self._restarts
            await start_policy(
                self._run,
                self._executor,
                self._publisher,
                self._checkpointer,
                is_worker_needed=self._is_worker_needed(),
            )
            # The version that the start began to publish may have stopped by now.
            self._must_restart = self._restarts != restarts
            return was_stopped and not self._publisher.is_stopped

    async def _take_one(self) -> bool:
        """Run one thing, or wait for a wake-up; returns whether anything ran."""
        self._wake.clear()
        async with self._lock:
            if not self._is_paused:
                self.teachers.follow()
            is_needed = self._is_worker_needed()
            if is_needed and not self._is_paused and self._run.state is PolicyState.RELEASED:
                self._must_restart = True
            if self._must_restart:
                return False
            self._idle.note(is_needed=is_needed)
            between = None if self._is_paused else self._pick_between()
            turn = None if self._is_paused else self._pick_turn()
            steps = [between, turn] if self._prefers_between else [turn, between]
            step = next((step for step in steps if step is not None), None)
            if step is None and not self._is_paused and not is_needed:
                leave = self._idle.pick(self.wake)
                step = None if leave is None else (None, leave)
            if step is not None:
                self._prefers_between = step is turn
                live = step[0]
                if live is not None:
                    live.is_started = True
        self._report()
        if step is None:
            waits = () if self._is_paused else (self._checkpointer.wait_s(), self._idle.wait_s())
            wait_s = min((wait for wait in waits if wait is not None), default=None)
            with contextlib.suppress(TimeoutError):
                # `asyncio.wait_for` of Python 3.11 loses a cancel that comes with the wake-up.
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            return False
        await step[1]()
        return True

    def _is_worker_needed(self) -> bool:
        """Whether anything waits that only a worker can do."""
        return (
            bool(self._publications)
            or self._gradients.is_waiting
            or (self._run.sequencer.peek() is not None and not self._run.awaits_teachers)
            or any(live.record.seq == 0 for live in self._run.ledger.open_operations())
        )

    def _pick_turn(self) -> tuple[LiveOperation | None, Step] | None:
        run = self._run
        turn = run.sequencer.peek()
        if turn is None:
            return None
        if turn.is_consumed:
            return None, partial(self._pass_over, turn.operation_id)
        live = run.turn
        assert live is not None, "a queued operation is in memory"
        if live.awaits_teachers:
            return None
        return live, partial(self._run_sequenced, live)

    def _pick_between(self) -> tuple[LiveOperation | None, Step] | None:
        if self._publications:
            return None, self._publish
        if self._checkpointer.wait_s() == 0.0:
            return None, partial(self._checkpointer.take, self.wake)
        # The outcome of a LoadCheckpoint that is not journaled yet says what must stay.
        if self._checkpointer.must_collect and self._run.stored_outcome is None:
            return None, self._collect
        if self._gradients.is_waiting:
            return None, self._gradients.run_next
        for live in self._run.ledger.open_operations():
            if live.record.seq == 0:
                return live, partial(self._executor.run_forward, live)
        return None

    async def _collect(self) -> None:
        """Delete checkpoints and versions that nothing needs any more."""
        await self._checkpointer.collect()
        await self._publisher.collect()

    async def _run_sequenced(self, live: LiveOperation) -> None:
        """Take the turn of a queued operation."""
        started = time.perf_counter()
        await self._executor.run_sequenced(live)
        operation_s = time.perf_counter() - started
        self._run.sequencer.advance()
        async with self._lock:
            await note_end(self._run, live.record)
        await self._publisher.get_ahead(operation_s)

    async def _pass_over(self, operation_id: str) -> None:
        """Take the turn of an operation that ended while it was queued."""
        record = await self._run.journal.find_operation(operation_id)
        if record is None:
            raise operation_not_found(operation_id)
        await self._executor.pass_over(record)
        self._run.sequencer.advance()
        async with self._lock:
            await note_end(self._run, record)  # It may have been to bring a failed policy back.

    async def _publish(self) -> None:
        """Publish the current version for all readers that wait for it."""
        waiting, self._publications = self._publications, []
        try:
            await self._publisher.publish()
        except RatoonError as error:
            _fail(waiting, error)
        except BaseException:
            _fail(waiting, RatoonError(ErrorCode.WORKER_LOST, "the worker was lost; ask again"))
            raise
        else:
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    async def _give_up(self, failure: str) -> None:
        """Fail the policy here and release its worker, until its controller is started again.

        The journal and the checkpoints have all that recovery needs.
        """
        run = self._run
        _LOG.error("policy stopped", policy_id=run.policy_id, reason=failure)
        await self.teachers.stop()
        await self._checkpointer.stop()
        await self._publisher.stop()
        # Another controller may need the files that are not deleted by now.
        run.archive.abandon()
        run.enter(PolicyState.FAILED, failure)
        self._end_requests(policy_not_ready(run.policy_id, run.state, failure))
        self._publisher.wake()
        await self.fail(failure)

    def _end_requests(self, error: RatoonError) -> None:
        """Fail all publications and reads of gradients that callers wait for."""
        _fail(self._publications, error)
        self._publications = []
        self._gradients.end(error)
        self._idle.answer(error)

    def _report(self) -> None:
        """Send the numbers of queued and running operations to the metrics, if they changed."""
        num_running = sum(live.is_started for live in self._run.ledger.open_operations())
        counts = (self._run.ledger.num_open - num_running, num_running)
        if counts != self._reported:
            self._reported = counts
            self._run.send(telemetry.open_operations(self._run.policy_id, *counts))


def is_cancelled() -> bool:
    """Whether this task itself is cancelled, rather than something it awaited."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _fail(futures: list[asyncio.Future[None]], error: RatoonError) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error)


class GradientReads:
    """Reads that wait, by the names they ask for; equal names, such as a retry's, are read once."""

    def __init__(self, run: PolicyRun) -> None:
        self._run = run
        self._waiting: dict[tuple[str, ...], asyncio.Future[GradientManifest]] = {}

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    def ask(self, names: tuple[str, ...]) -> asyncio.Future[GradientManifest]:
        """The manifest once it is read; callers may share it. Raises as `_read`."""
        if names not in self._waiting:
            self._waiting[names] = asyncio.get_running_loop().create_future()
        return self._waiting[names]

    async def run_next(self) -> None:
        """Read what waits the longest. Propagates what no caller is to blame for."""
        names, future = next(iter(self._waiting.items()))
        del self._waiting[names]
        try:
            future.set_result(await self._read(names))
        except RatoonError as error:
            future.set_exception(error)
        except BaseException:
            lost = "the worker was lost; ask again"
            future.set_exception(RatoonError(ErrorCode.WORKER_LOST, lost))
            raise

    def end(self, error: RatoonError) -> None:
        """Fail all that wait."""
        for future in self._waiting.values():
            future.set_exception(error)
        self._waiting.clear()

    async def _read(self, names: tuple[str, ...]) -> GradientManifest:
        """Raises WINDOW_EMPTY, WINDOW_POISONED, and as the worker's `write_gradients`."""
        run = self._run
        seqs = run.window.select(())
        request = GradientRequest(
            names=names,
            folder=str(run.paths.results),
            max_bytes=run.limits.max_gradient_bytes,
            min_free_disk_bytes=run.limits.min_free_disk_bytes,
        )
        written = await run.worker.call(WorkerCore.write_gradients, run.token, request)
        return GradientManifest(
            policy_id=run.policy_id,
            version=run.version,
            file=WeightFile(name=_FILE_NAME, size_bytes=written.size_bytes, digest=written.digest),
            seqs=seqs,
            trained_tokens=written.counters.tokens,
            num_sequences=written.counters.sequences,
            num_groups=written.counters.groups,
        )
