"""Finds what the journal has lost of what callers were told, and goes on as was decided.

A crash of any process, or a power cut that the disk survives as it promises, leaves the journal
ahead of everything else: a write is committed before a caller is told of it, before the version is
published and before a file is deleted. So whatever is ahead of the journal proves a loss. Only two
things may be ahead, for an operation that is accepted and has not ended: the worker's stored
outcome, and the folder of the checkpoint that it saves.

A policy with a loss is refused, unless the operator has decided how it goes on, or the database was
failed over to a server that may lack commits, which the deployment chose to allow. Nothing is
deleted: versions, checkpoints, bodies and the decision, which the journal will not know, are moved
to `set-aside/TIME-journal-lost` of the policy's folder, or of its weights' folder.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ratoon import metrics
from ratoon.engine.commands import SeqKey
from ratoon.engine.files.losses import (
    Choice,
    Facts,
    JournalLoss,
    find_checkpoints,
    find_versions,
    forget_loss,
    read_decision,
    write_loss,
)
from ratoon.engine.files.paths import (
    PolicyPaths,
    Position,
    move_to,
    names_in,
    read_position,
    write_position,
)
from ratoon.engine.journal.records import (
    AUTOMATIC_PREFIX,
    Checkpoint,
    JournalState,
    OperationRecord,
    PolicyHistory,
    last_in_turn,
)
from ratoon.engine.journal.tables import is_promoted_since
from ratoon.engine.policy.recovery import (
    RecoveryStoppedError,
    agrees,
    load_state,
    replay_policy,
)
from ratoon.engine.policy.run import PolicyRun
from ratoon.engine.types import CheckpointInfo
from ratoon.engine.worker.tasks import UnusableCheckpointError, WorkerStatus
from ratoon.errors import RatoonError
from ratoon.log import get_logger
from ratoon.stream.files import make_folder
from ratoon.stream.manifest import MadeBy
from ratoon.stream.versions import version_folder
from ratoon.train.saved_state import SavedState
from ratoon_proto.types import OperationKind, Sequencing

_LOG = get_logger("losses")


class JournalLostError(RecoveryStoppedError):
    """The journal has lost operations, and nobody has decided how to go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """A loss, and the decision how to go on."""

    loss: JournalLoss
    choice: Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Files beside the journal that name operations. `told` None: no position file."""

    told: Position | None
    versions: Mapping[int, MadeBy | None]
    checkpoints: Mapping[str, SavedState | None]


def look(paths: PolicyPaths) -> Found:
    """Read all that names an operation."""
    return Found(
        told=read_position(paths.position),
        versions=find_versions(paths),
        checkpoints=find_checkpoints(paths),
    )


def judge(history: PolicyHistory, found: Found, sequencing: Sequencing) -> JournalLoss | None:
    """Find what the journal has lost; None: nothing. Pure."""
    policy, last_seq = history.policy, last_in_turn(history)
    told = found.told
    is_behind = told is not None and told.count > policy.position
    versions = tuple(
        version
        for version, made_by in found.versions.items()
        if version > policy.max_version or (made_by is not None and made_by.seq > last_seq)
    )
    known = {checkpoint.info.checkpoint_id for checkpoint in history.checkpoints}
    # A damaged one says nothing.
    ahead = {
        name: saved.as_of.seq
        for name, saved in found.checkpoints.items()
        if name not in known and saved is not None and _is_ahead(saved.as_of.seq, history, last_seq)
    }
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
        checkpoints=tuple(ahead),
        adoptable=adoptable,
        obstacle=obstacle,
    )


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
    await run.check_newest()  # A newer controller's files would be ahead of this history.
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
    """The error to raise.

    Readers keep what they had, in the order in which it was made: a version is whole by itself. The
    journal may have lost that it was published, and not the operation that made it.
    """
    await asyncio.to_thread(write_loss, run.paths, loss)
    found = await asyncio.to_thread(find_versions, run.paths)
    newest = max(run.published, default=-1)
    later = [
        (made_by.seq if made_by is not None else 0, version)
        for version, made_by in found.items()
        if version not in run.listed and (version > newest or version in loss.versions)
    ]
    run.published = (*run.published, *(version for _, version in sorted(later)))
    run.send([metrics.RECOVERIES.sample(1, run.policy_id, "stopped")])
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
        # `run.archived` names what was looked at; nothing else is deleted.
        run.archived = frozenset()
        _LOG.warning("archive not looked at", policy_id=run.policy_id, error=error.message)


def _checkpoint_names(folder: Path) -> list[str]:
    return names_in(folder) if folder.is_dir() else []


def _is_ahead(seq: int, history: PolicyHistory, last_seq: int) -> bool:
    """Whether no crash explains an unknown checkpoint at this seq."""
    if seq <= last_seq:
        return False
    record = _record_of(history, seq)
    is_being_saved = record is not None and record.kind is OperationKind.SAVE_CHECKPOINT
    return not (is_being_saved and seq == last_seq + 1)


def _adoptable(
    history: PolicyHistory, ahead: Mapping[str, int], last_seq: int, sequencing: Sequencing
) -> tuple[str, str]:
    """The checkpoint to go on from, and "", or "" and why there is none. `ahead`: seqs by id."""
    if not ahead:
        return "", "there is no checkpoint of what was lost"
    seq, checkpoint_id = max((seq, name) for name, seq in ahead.items())
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


async def carry_out(
    run: PolicyRun, history: PolicyHistory, status: WorkerStatus, decided: Decided
) -> PolicyHistory:
    """Go on as decided, and set all else aside. Raises `JournalLostError` where that fails.

    Only moves files until the journal has it, so that a crash in between changes nothing.
    """
    journal, policy_id, loss = run.journal, run.policy_id, decided.loss
    is_adopted = decided.choice is Choice.FROM_EVIDENCE
    if is_adopted:
        kept = (await _load_adopted(run, loss),)
    else:
        kept = await _replayed(run, history, status, loss)
    folder = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(run.now())) + "-journal-lost"
    staying = await _set_aside(run, history, folder, kept)
    told = await asyncio.to_thread(read_position, run.paths.position) or Position()
    above = told.count, max(told.version, *loss.versions, 0)
    if is_adopted:
        closed_seq = history.closed.seq if history.closed else 0
        (adopted,), now = kept, run.now()
        await journal.adopt(run.token, policy_id, adopted, closed_seq, above, now)
    else:
        await journal.accept_loss(run.token, policy_id, kept, above)
    await run.set_published((*history.policy.published, *staying))
    place = run.paths.set_aside / folder
    await asyncio.to_thread(forget_loss, run.paths, place)
    _LOG.error(
        "operations lost",
        policy_id=policy_id,
        choice=decided.choice,
        what=loss.text,
        set_aside=str(place),
    )
    run.send([metrics.RECOVERIES.sample(1, policy_id, "adopted" if is_adopted else "lost")])
    return await journal.history(policy_id)


async def _replayed(
    run: PolicyRun, history: PolicyHistory, status: WorkerStatus, loss: JournalLoss
) -> tuple[Checkpoint, ...]:
    """Run again what is left, before anything is moved: files that it needs may be gone.

    Returns checkpoints that the journal lost and whose states it has.
    """
    kept = await _vouched_for(run, history)
    if not run.replays or (status.is_loaded and agrees(history, status)):
        return kept
    needed = await run.journal.bodies_in_use(run.policy_id)
    await run.archive.restore_bodies({digest for _, digest in needed})
    checkpoints = (*history.checkpoints, *kept)
    in_order = tuple(sorted(checkpoints, key=lambda checkpoint: checkpoint.info.seq))
    try:
        await replay_policy(run, replace(history, checkpoints=in_order))
    except RecoveryStoppedError as error:
        reason = f". --{Choice.ACCEPT_LOSS} is not possible: {error}"
        raise await refused(run, loss, reason) from error
    return kept


async def _vouched_for(run: PolicyRun, history: PolicyHistory) -> tuple[Checkpoint, ...]:
    """Automatic checkpoints that the journal lost, of states whose digests it has."""
    known = {checkpoint.info.checkpoint_id for checkpoint in history.checkpoints}
    last_seq, vouched = last_in_turn(history), list[Checkpoint]()
    found = await asyncio.to_thread(find_checkpoints, run.paths)
    for name, saved in found.items():
        if saved is None or name in known:
            continue
        checkpoint = _to_checkpoint(name, saved, run.now())
        if not checkpoint.is_automatic:
            continue
        seq = checkpoint.info.seq
        while 0 < seq <= last_seq:
            record = await run.journal.find_key(run.policy_id, SeqKey(seq=seq))
            if record is None or record.state is JournalState.APPLIED:
                is_same = record is not None and record.weights_digest == checkpoint.weights_digest
                vouched += [checkpoint] if is_same else []
                break
            seq -= 1  # An operation that was not applied has changed no state.
    return tuple(vouched)


async def _load_adopted(run: PolicyRun, loss: JournalLoss) -> Checkpoint:
    """The checkpoint to go on from, once the worker has loaded it: so it is whole."""
    found = await asyncio.to_thread(find_checkpoints, run.paths, [loss.adoptable])
    saved = found[loss.adoptable]
    if saved is None:
        raise await refused(run, loss, f". Checkpoint {loss.adoptable} cannot be read")
    checkpoint = _to_checkpoint(loss.adoptable, saved, run.now())
    if not run.replays:
        checkpoint = replace(checkpoint, weights_digest="")
    try:
        await load_state(run, checkpoint, checkpoint.info.seq)
    except UnusableCheckpointError as error:
        raise await refused(run, loss, f". --{Choice.FROM_EVIDENCE} failed: {error}") from error
    return checkpoint


async def _set_aside(
    run: PolicyRun, history: PolicyHistory, name: str, kept: tuple[Checkpoint, ...]
) -> tuple[int, ...]:
    """Move what the journal does not list to folders of this name.

    Returns versions that it does not list and whose states it will have: they stay.
    """
    needed = {digest for _, digest in await run.journal.bodies_in_use(run.policy_id)}
    await run.archive.restore_bodies(await run.archive.body_names() - needed)
    await run.check_newest()
    await run.bodies.set_aside(needed, run.paths.set_aside / name / "bodies")
    states = {(c.info.version, c.weights_digest) for c in kept}
    if history.closed is not None:
        states.add((history.policy.version, history.closed.weights_digest))
    found = await asyncio.to_thread(find_versions, run.paths)
    unlisted = {version: found[version] for version in found.keys() - {*run.listed}}
    staying = tuple(
        version
        for version, made_by in sorted(unlisted.items())
        if made_by is not None
        and made_by.state_digest
        and (version, made_by.state_digest) in states
    )
    doomed = unlisted.keys() - {*staying}
    known = {checkpoint.info.checkpoint_id for checkpoint in (*history.checkpoints, *kept)}
    await asyncio.to_thread(_move_folders, run.paths, name, doomed, known)
    return staying


def _move_folders(paths: PolicyPaths, name: str, versions: set[int], known: set[str]) -> None:
    """Move these versions, and checkpoints that are not `known`."""
    folder = paths.set_aside / name
    make_folder(folder)
    names = [n for n in names_in(paths.checkpoints) if n not in known and n[0] != "."]
    move_to(folder / "checkpoints", [paths.checkpoints / n for n in names])
    there = [version_folder(paths.weights, version) for version in versions]
    move_to(paths.weights_set_aside / name, there)


def _to_checkpoint(name: str, saved: SavedState, now: float) -> Checkpoint:
    """The checkpoint as the journal would have it."""
    info = CheckpointInfo(
        checkpoint_id=name,
        name="" if name.startswith(AUTOMATIC_PREFIX) else name,
        version=saved.version,
        seq=saved.as_of.seq,
        replay_from_seq=saved.as_of.replay_from_seq,
        created_at=now,
        size_bytes=saved.size_bytes,
    )
    return Checkpoint(info=info, weights_digest=saved.state_digest)
