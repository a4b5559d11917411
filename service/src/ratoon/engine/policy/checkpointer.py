"""Automatic checkpoints of a policy that recovers by replay: when, and what they make superfluous.

Checkpoints of callers that were deleted, have expired or made room for others go here too, between
two turns: a LoadCheckpoint that runs needs the files of the one that it found.

Bodies and older checkpoints are deleted only once the journal says that a checkpoint, which was
read back, covers them. A failure at any step loses nothing and is retried.

    due -> copied between two turns -> written while others run -> journaled -> superseded deleted

After an ImportWeights one is due at once, whatever the settings.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from ratoon import metrics
from ratoon.engine.crash_points import CrashPoint
from ratoon.engine.files.paths import drop_checkpoint_folder, names_in
from ratoon.engine.journal.records import (
    Checkpoint,
    Covered,
    JournalState,
    OperationRecord,
    automatic_id,
)
from ratoon.engine.policy.run import PolicyRun
from ratoon.engine.types import CheckpointInfo
from ratoon.engine.worker.tasks import FencedError
from ratoon.engine.worker.worker import WorkerCore
from ratoon.errors import RatoonError
from ratoon.log import get_logger
from ratoon.train.saved_state import AsOf
from ratoon_proto.types import OperationKind

_LOG = get_logger("checkpointer")
# Delay after a failure.
_RETRY_S = 30.0


@dataclass(slots=True, kw_only=True)
class _Since:
    """Counts of what has ended since the newest checkpoint.

    `first_at`: seconds of the event loop's clock. `has_import`: a replay would need a folder that
    anybody may change.
    """

    num_operations: int = 0
    size_bytes: int = 0
    first_at: float | None = None
    has_import: bool = False


class Checkpointer:
    """Used by the turn loop's coroutine.

    Of a policy with `recovery: fail` it takes one only where the worker is given up.

    `must_collect`: there may be checkpoints that nothing needs any more.
    """

    def __init__(self, run: PolicyRun) -> None:
        self._run = run
        self._since = _Since()
        self._retry_at = 0.0
        self._landing: asyncio.Task[None] | None = None
        self.must_collect = False

    async def start(self) -> None:
        """Count what ended since the newest checkpoint, and free what an earlier run left."""
        run = self._run
        self._since = _Since()
        known = await run.journal.checkpoints(run.policy_id)
        names = {checkpoint.info.checkpoint_id for checkpoint in known}
        if run.stored_outcome is not None:
            # Its record is completed when its turn comes.
            result = run.stored_outcome.result
            names |= {result.checkpoint_id} if isinstance(result, CheckpointInfo) else set()
        await drop_unknown_checkpoints(run, names)
        self.must_collect = True
        newest_seq = known[-1].info.seq if known else 0
        for record in await run.journal.records_from(run.policy_id, newest_seq + 1):
            if record.state.is_final:
                self.note(record)
        if run.replays:
            await self._cover(None)

    async def stop(self) -> None:
        """Stop, and do not journal the checkpoint that is being written."""
        landing, self._landing = self._landing, None
        if landing is not None:
            landing.cancel()
            await asyncio.wait([landing])  # Its cancel is not this task's.

    def abandon(self) -> None:
        """Cancel the checkpoint that is being written without waiting for its end."""
        if self._landing is not None:
            self._landing.cancel()

    def note(self, record: OperationRecord) -> None:
        """Count a sequenced operation that ended."""
        run, since = self._run, self._since
        if record.state is JournalState.APPLIED and record.effect.is_replayed:
            since.num_operations += 1
            since.has_import |= record.kind is OperationKind.IMPORT_WEIGHTS
        for digest in record.bodies:
            with contextlib.suppress(FileNotFoundError):
                since.size_bytes += run.paths.body(digest).stat().st_size
        if since.first_at is None and (since.num_operations or since.size_bytes):
            since.first_at = _clock()

    @property
    def is_behind(self) -> bool:
        """Whether anything has ended that no journaled checkpoint includes."""
        return self._since.first_at is not None or self._is_landing

    @property
    def _is_landing(self) -> bool:
        return self._landing is not None and not self._landing.done()

    def wait_s(self, *, at_once: bool = False) -> float | None:
        """Seconds until a checkpoint is due if nothing else ends; 0: now; None: never.

        `at_once`: it is due as soon as there is anything to save.
        """
        since, config = self._since, self._run.checkpoints
        if since.first_at is None or self._is_landing or not (self._run.replays or at_once):
            return None
        due_at = since.first_at + config.every_s if config.every_s else None
        if (
            at_once
            or since.has_import
            or (config.every_operations and since.num_operations >= config.every_operations)
            or (config.every_bytes and since.size_bytes >= config.every_bytes)
        ):
            due_at = 0.0
        return None if due_at is None else max(0.0, max(due_at, self._retry_at) - _clock())

    async def take(self, on_landed: Callable[[], None]) -> None:
        """Copy the state after the last turn; it is written and journaled in the background.

        Raises `WorkerLostError`. `on_landed` is called then, as another one may be due.
        """
        run, seq = self._run, self._run.sequencer.turn - 1
        info = CheckpointInfo(
            checkpoint_id=automatic_id(seq, run.token),
            version=run.version,
            seq=seq,
            replay_from_seq=run.window.replay_from(seq),
            created_at=run.now(),
            size_bytes=0,
        )
        run.reach(CrashPoint.ENGINE_BEFORE_CHECKPOINT)
        try:
            digest = await run.worker.call(WorkerCore.snapshot, run.token)
        except RatoonError as error:
            self._failed(info, error)
            return
        taken, self._since = self._since, _Since()
        landing = self._land(Checkpoint(info=info, weights_digest=digest), taken)
        self._landing = asyncio.get_running_loop().create_task(landing)
        self._landing.add_done_callback(lambda _: on_landed())

    async def take_now(self) -> None:
        """Take one and wait until it is journaled."""
        await self.take(lambda: None)
        if self._landing is not None:
            await self._landing

    async def cover_saved(self) -> None:
        """A caller's checkpoint is journaled: it covers as much as an automatic one."""
        self._since = _Since()
        self.must_collect = True
        if self._run.replays:
            await self._cover(None)

    async def collect(self) -> None:
        """Delete checkpoints without a name, or that have expired, which no recovery needs.

        Versions' names that have expired go too.
        """
        run, keep = self._run, self._run.checkpoints.keep
        self.must_collect = False
        now = run.now()
        covered = await run.journal.collect(run.token, run.policy_id, keep, now)
        run.has_come_to(covered.position)
        run.named = tuple(each for each in run.named if not is_over(each.expires_at, now))
        run.reach(CrashPoint.ENGINE_AFTER_DROP)
        # A newer controller may save one of that name.
        await run.check_newest()
        await self._collect(covered)

    async def _land(self, checkpoint: Checkpoint, taken: _Since) -> None:
        run, info = self._run, checkpoint.info
        try:
            await self._write(checkpoint)
        except FencedError as err:
            _LOG.warning("fenced", policy_id=run.policy_id, reason=str(err))
        except Exception as err:  # noqa: BLE001 - nothing is lost: the older checkpoint stays
            since = self._since
            self._since = _Since(
                num_operations=taken.num_operations + since.num_operations,
                size_bytes=taken.size_bytes + since.size_bytes,
                first_at=taken.first_at,
                has_import=taken.has_import or since.has_import,
            )
            self._failed(info, err)
        else:
            self.must_collect = True
            _LOG.info("checkpoint", policy_id=run.policy_id, checkpoint_id=info.checkpoint_id)
            run.send([metrics.CHECKPOINTS.sample(1, run.policy_id, "written")])

    async def _write(self, checkpoint: Checkpoint) -> None:
        run, info = self._run, checkpoint.info
        known = await run.journal.checkpoints(run.policy_id)
        if info.checkpoint_id not in {earlier.info.checkpoint_id for earlier in known}:
            folder = run.paths.checkpoint(info.checkpoint_id)
            # An attempt that failed before it was journaled leaves a folder.
            await _drop(run, info.checkpoint_id)
            as_of = AsOf(seq=info.seq, replay_from_seq=info.replay_from_seq)
            size_bytes = await run.worker.call(
                WorkerCore.write_snapshot, run.token, str(folder), as_of
            )
            await run.archive.keep_checkpoint(info.checkpoint_id)
            checkpoint = replace(checkpoint, info=replace(info, size_bytes=size_bytes))
        run.reach(CrashPoint.ENGINE_BEFORE_COVER)
        await self._cover(checkpoint)
        run.reach(CrashPoint.ENGINE_AFTER_COLLECT)

    async def _cover(self, automatic: Checkpoint | None) -> None:
        run, keep = self._run, self._run.checkpoints.keep
        covered = await run.journal.cover(run.token, run.policy_id, automatic, keep)
        run.has_come_to(covered.position)
        run.reach(CrashPoint.ENGINE_AFTER_COVER)
        await self._collect(covered)

    async def _collect(self, covered: Covered) -> None:
        """Delete what the journal no longer needs; after a crash the next start does."""
        run = self._run
        for operation_id, digest in covered.bodies:
            await run.bodies.release(operation_id, digest)
        for checkpoint_id in covered.checkpoint_ids:
            await _drop(run, checkpoint_id)

    def _failed(self, info: CheckpointInfo, error: Exception) -> None:
        run = self._run
        _LOG.error(
            "checkpoint failed",
            policy_id=run.policy_id,
            checkpoint_id=info.checkpoint_id,
            reason=f"{type(error).__name__}: {error}",
        )
        run.send([metrics.CHECKPOINTS.sample(1, run.policy_id, "failed")])
        self._retry_at = _clock() + _RETRY_S


async def drop_unknown_checkpoints(run: PolicyRun, known: Collection[str]) -> None:
    """Delete checkpoints that were never journaled, which frees their names.

    `known`: names that are journaled, or will be. Raises `FencedError` where another controller has
    taken over, since unknown ones may be its own. The names are listed before that check, so those
    it makes later are safe.
    """
    here = await asyncio.to_thread(names_in, run.paths.checkpoints)
    await run.check_newest()
    for name in {*here}.difference(known):
        await asyncio.to_thread(drop_checkpoint_folder, run.paths, name)
    for name in run.archived.difference(known):
        run.archive.drop_checkpoint(name)


async def _drop(run: PolicyRun, checkpoint_id: str) -> None:
    await asyncio.to_thread(drop_checkpoint_folder, run.paths, checkpoint_id)
    run.archive.drop_checkpoint(checkpoint_id)


def is_over(expires_at: float | None, now: float) -> bool:
    """Whether what expires at this time has expired."""
    return expires_at is not None and expires_at <= now


def _clock() -> float:
    return asyncio.get_running_loop().time()
