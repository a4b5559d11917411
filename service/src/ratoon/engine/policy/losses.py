"""Whether the journal has lost what callers were told, found before anything is deleted.

A crash of any process, or a power cut that the disk survives as it promises, leaves the journal
ahead of everything else: a write is committed before a caller is told of it, before the version is
published and before a file is deleted. So whatever is ahead of the journal proves a loss. Only two
things may be ahead, for an operation that is accepted and has not ended: the worker's stored
outcome, and the folder of the checkpoint that it saves.

A policy with a loss is refused, unless the operator has decided how it goes on, or the database was
failed over to a server that may lack commits, which the deployment chose to allow.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from ratoon import metrics
from ratoon.engine.files.losses import (
    Choice,
    Facts,
    FoundCheckpoint,
    FoundVersion,
    JournalLoss,
    find_checkpoints,
    find_versions,
    forget_loss,
    read_decision,
    write_loss,
)
from ratoon.engine.files.paths import PolicyPaths, names_in
from ratoon.engine.files.position import Position, read_position, write_position
from ratoon.engine.journal.records import OperationRecord, PolicyHistory
from ratoon.engine.journal.tokens import is_promoted_since
from ratoon.engine.policy.replay import RecoveryStoppedError
from ratoon.engine.policy.run import PolicyRun
from ratoon.engine.worker.tasks import WorkerStatus
from ratoon.errors import RatoonError
from ratoon.log import get_logger
from ratoon_proto.types import OperationKind, Sequencing

_LOG = get_logger("losses")


class JournalLostError(RecoveryStoppedError):
    """The journal has lost operations, and nobody has decided how to go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """What is lost, and how to go on."""

    loss: JournalLoss
    choice: Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What lies beside the journal. `told` None: no position file."""

    told: Position | None
    versions: tuple[FoundVersion, ...]
    checkpoints: tuple[FoundCheckpoint, ...]


def look(paths: PolicyPaths) -> Found:
    """Read all that names an operation."""
    return Found(
        told=read_position(paths.position),
        versions=tuple(find_versions(paths)),
        checkpoints=tuple(find_checkpoints(paths)),
    )


def judge(history: PolicyHistory, found: Found, sequencing: Sequencing) -> JournalLoss | None:
    """What the journal has lost, None: nothing. Pure."""
    policy, last_seq = history.policy, last_in_turn(history)
    told = found.told
    is_behind = told is not None and told.count > policy.position
    versions = tuple(
        v.version
        for v in found.versions
        if v.version > policy.max_version or (v.made_by is not None and v.made_by.seq > last_seq)
    )
    known = {checkpoint.info.checkpoint_id for checkpoint in history.checkpoints}
    ahead = [
        c
        for c in found.checkpoints
        if c.checkpoint_id not in known and _is_ahead(c, history, last_seq)
    ]
    if not (is_behind or versions or ahead):
        return None
    adoptable, obstacle = _adoptable(history, ahead, last_seq, sequencing)
    max_seq = max((r.seq for r in history.records), default=last_seq)
    left = Facts(last_seq=last_seq, max_seq=max_seq, version=policy.version)
    return JournalLoss(
        journal=left,
        position=policy.position,
        told=_facts(told) if told is not None and is_behind else None,
        versions=versions,
        checkpoints=tuple(c.checkpoint_id for c in ahead),
        adoptable=adoptable,
        obstacle=obstacle,
    )


def last_in_turn(history: PolicyHistory) -> int:
    """The highest seq that has ended, as have all before it. Pure."""
    last_seq = history.closed.seq if history.closed else 0
    for record in history.records:
        if record.seq != last_seq + 1 or not record.state.is_final:
            break
        last_seq = record.seq
    return last_seq


def is_worker_ahead(history: PolicyHistory, status: WorkerStatus) -> bool:
    """Whether the worker has run what the journal never accepted. Pure."""
    last_seq = last_in_turn(history)
    if not status.is_loaded or status.last_seq <= last_seq:
        return False
    record, outcome = _record_of(history, status.last_seq), status.last_outcome
    if record is None or status.last_seq != last_seq + 1:
        return True
    return outcome is not None and outcome.operation_id != record.operation_id


async def find_loss(run: PolicyRun, history: PolicyHistory) -> Decided | None:
    """Look at all that lies beside the journal; None: nothing is lost.

    Raises `JournalLostError` where nobody has decided how to go on, and `FencedError`.
    """
    await _fetch_archived(run, history)
    found = await asyncio.to_thread(look, run.paths)
    loss = judge(history, found, run.spec.sequencing)
    if loss is None:
        await asyncio.to_thread(forget_loss, run.paths)
        return None
    await run.check_newest()  # What a newer controller has made is ahead of this history.
    token = run.position.token
    if token and is_promoted_since(token, run.token):
        choice = Choice.ACCEPT_LOSS
    else:
        choice = await asyncio.to_thread(read_decision, run.paths, loss)
    if choice is None:
        raise await refused(run, loss)
    return Decided(loss=loss, choice=choice)


async def find_worker_loss(
    run: PolicyRun, history: PolicyHistory, status: WorkerStatus
) -> Decided | None:
    """Look at a worker that is ahead of the journal; None: nothing is lost.

    What it has run is noted first, as a refused policy's worker ends. Raises as `find_loss` does.
    """
    if not is_worker_ahead(history, status):
        return None
    before = run.position
    run.position = Position(
        count=max(history.policy.position, before.count) + 1,
        token=before.token,
        max_seq=max(status.last_seq, before.max_seq),
        last_seq=max(status.last_seq, before.last_seq),
        version=max(status.version, before.version),
    )
    await asyncio.to_thread(write_position, run.paths.position, run.position)
    return await find_loss(run, history)


async def refused(run: PolicyRun, loss: JournalLoss, reason: str = "") -> JournalLostError:
    """The error to raise. Readers keep what they had: a version is whole by itself."""
    await asyncio.to_thread(write_loss, run.paths, loss)
    run.published = (*run.published, *(v for v in loss.versions if v not in run.published))
    run.send([metrics.RECOVERIES.sample(1, "stopped")])
    return JournalLostError(loss.text + reason)


async def _fetch_archived(run: PolicyRun, history: PolicyHistory) -> None:
    """Get unknown checkpoints that only the archive has: their manifests are to be looked at."""
    try:
        run.archived = await run.archive.checkpoint_names()
        here = set(await asyncio.to_thread(_checkpoint_names, run.paths.checkpoints))
        known = {checkpoint.info.checkpoint_id for checkpoint in history.checkpoints}
        for name in sorted(run.archived - here - known):
            await run.archive.restore_checkpoint(name)
    except RatoonError as error:
        # What could not be looked at is not deleted: `run.archived` says what was.
        run.archived = frozenset()
        _LOG.warning("archive not looked at", policy_id=run.policy_id, error=error.message)


def _checkpoint_names(folder: Path) -> list[str]:
    return names_in(folder) if folder.is_dir() else []


def _is_ahead(found: FoundCheckpoint, history: PolicyHistory, last_seq: int) -> bool:
    """Whether no crash explains an unknown checkpoint; a damaged one says nothing."""
    if found.saved is None or (seq := found.saved.as_of.seq) <= last_seq:
        return False
    record = _record_of(history, seq)
    is_being_saved = record is not None and record.kind is OperationKind.SAVE_CHECKPOINT
    return not (is_being_saved and seq == last_seq + 1)


def _adoptable(
    history: PolicyHistory, ahead: list[FoundCheckpoint], last_seq: int, sequencing: Sequencing
) -> tuple[str, str]:
    """The checkpoint to go on from, and "", or "" and why there is none."""
    states = [(c.saved.as_of.seq, c.checkpoint_id) for c in ahead if c.saved is not None]
    if not states:
        return "", "there is no checkpoint of what was lost"
    seq, checkpoint_id = max(states)
    recorded = {record.seq for record in history.records}
    missing = [s for s in range(last_seq + 1, seq + 1) if s not in recorded]
    if missing and sequencing is Sequencing.SERVER:
        return "", (
            f"the request ids of seq {missing[0]} to {missing[-1]} are lost, so that a caller who "
            "asks again would have them applied twice"
        )
    return checkpoint_id, ""


def _record_of(history: PolicyHistory, seq: int) -> OperationRecord | None:
    return next((record for record in history.records if record.seq == seq), None)


def _facts(told: Position) -> Facts:
    return Facts(last_seq=told.last_seq, max_seq=told.max_seq, version=told.version)
