"""Goes on with a policy whose journal has lost operations, as was decided, and deletes nothing.

What the journal will not know is moved to `set-aside/TIME-journal-lost` of the policy's folder, or
of its weights' folder: versions, checkpoints, bodies, and the decision.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from ratoon import metrics
from ratoon.engine.files.losses import (
    Choice,
    FoundCheckpoint,
    JournalLoss,
    find_checkpoints,
    find_versions,
    forget_loss,
)
from ratoon.engine.files.paths import PolicyPaths, move_to, names_in
from ratoon.engine.files.position import Position, read_position
from ratoon.engine.journal.checkpoints import Checkpoint
from ratoon.engine.journal.records import JournalState, PolicyHistory
from ratoon.engine.policy.adoption import agrees
from ratoon.engine.policy.losses import Decided, last_in_turn, refused
from ratoon.engine.policy.replay import RecoveryStoppedError, replay_policy
from ratoon.engine.policy.run import PolicyRun
from ratoon.engine.types import CheckpointInfo, SeqKey
from ratoon.engine.worker.tasks import (
    CheckpointWeights,
    LoadRequest,
    UnusableCheckpointError,
    WorkerStatus,
)
from ratoon.engine.worker.worker import WorkerCore
from ratoon.log import get_logger
from ratoon.stream.files import make_folder
from ratoon.stream.versions import version_folder

_LOG = get_logger("losses")


async def carry_out(
    run: PolicyRun, history: PolicyHistory, status: WorkerStatus, decided: Decided
) -> PolicyHistory:
    """Go on as decided, and set all else aside. Raises `JournalLostError` where that fails.

    Only moves files until the journal has it, so that a crash in between changes nothing.
    """
    journal, policy_id, loss = run.ports.journal, run.policy_id, decided.loss
    is_adopted = decided.choice is Choice.FROM_EVIDENCE
    if is_adopted:
        kept = (await _load_adopted(run, loss),)
    else:
        kept = await _replayed(run, history, status, loss)
    folder = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(run.ports.now())) + "-journal-lost"
    staying = await _set_aside(run, history, folder, kept)
    told = await asyncio.to_thread(read_position, run.paths.position) or Position()
    above = told.count, max(told.version, *loss.versions, 0)
    if is_adopted:
        closed_seq = history.closed.seq if history.closed else 0
        (adopted,), now = kept, run.ports.now()
        await journal.adopt(run.token, policy_id, adopted, closed_seq, above, now)
    else:
        await journal.accept_loss(run.token, policy_id, kept, above)
    run.published = (*history.policy.published, *staying)
    await journal.set_published(run.token, policy_id, run.published)
    place = run.paths.set_aside / folder
    await asyncio.to_thread(forget_loss, run.paths, place)
    _LOG.error(
        "operations lost",
        policy_id=policy_id,
        choice=decided.choice,
        what=loss.text,
        set_aside=str(place),
    )
    run.send([metrics.RECOVERIES.sample(1, "adopted" if is_adopted else "lost")])
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
    needed = await run.ports.journal.bodies_in_use(run.policy_id)
    await run.archive.restore_bodies(needed.values())
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
    for found in await asyncio.to_thread(find_checkpoints, run.paths):
        checkpoint = _to_checkpoint(found, run.ports.now())
        if checkpoint is None or not checkpoint.is_automatic or found.checkpoint_id in known:
            continue
        seq = checkpoint.info.seq
        while 0 < seq <= last_seq:
            record = await run.ports.journal.find_key(run.policy_id, SeqKey(seq=seq))
            if record is None or record.state is JournalState.APPLIED:
                is_same = record is not None and record.weights_digest == checkpoint.weights_digest
                vouched += [checkpoint] if is_same else []
                break
            seq -= 1  # What was not applied has changed no state.
    return tuple(vouched)


async def _load_adopted(run: PolicyRun, loss: JournalLoss) -> Checkpoint:
    """The checkpoint to go on from, once the worker has loaded it: so it is whole."""
    (found,) = await asyncio.to_thread(find_checkpoints, run.paths, [loss.adoptable])
    checkpoint = _to_checkpoint(found, run.ports.now())
    if checkpoint is None:
        raise await refused(run, loss, f". Checkpoint {loss.adoptable} cannot be read")
    info = checkpoint.info
    source = CheckpointWeights(
        folder=str(run.paths.checkpoint(info.checkpoint_id)),
        weights_digest=checkpoint.weights_digest if run.replays else "",
    )
    request = LoadRequest(
        trainer=run.trainer,
        source=source,
        version=info.version,
        last_seq=info.seq,
        digests=run.replays,
    )
    try:
        await run.ports.worker.call(WorkerCore.load, run.token, run.policy_id, request)
    except UnusableCheckpointError as error:
        raise await refused(run, loss, f". --{Choice.FROM_EVIDENCE} failed: {error}") from error
    return checkpoint if run.replays else replace(checkpoint, weights_digest="")


async def _set_aside(
    run: PolicyRun, history: PolicyHistory, name: str, kept: tuple[Checkpoint, ...]
) -> tuple[int, ...]:
    """Move what the journal does not list to folders of this name.

    Returns versions that it does not list and whose states it will have: they stay.
    """
    needed = {*(await run.ports.journal.bodies_in_use(run.policy_id)).values()}
    await run.archive.restore_bodies(await run.archive.body_names() - needed)
    await run.check_newest()
    await run.bodies.set_aside(needed, run.paths.set_aside / name / "bodies")
    states = {(c.info.version, c.weights_digest) for c in kept}
    if history.closed is not None:
        states.add((history.policy.version, history.closed.weights_digest))
    unlisted = [
        found
        for found in await asyncio.to_thread(find_versions, run.paths)
        if found.version not in history.policy.published
    ]
    staying = tuple(
        found.version
        for found in unlisted
        if found.made_by is not None
        and found.made_by.state_digest
        and (found.version, found.made_by.state_digest) in states
    )
    doomed = {found.version for found in unlisted}.difference(staying)
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


def _to_checkpoint(found: FoundCheckpoint, now: float) -> Checkpoint | None:
    """As the journal would have it; None: its manifest cannot be read."""
    saved = found.saved
    if saved is None:
        return None
    info = CheckpointInfo(
        checkpoint_id=found.checkpoint_id,
        version=saved.version,
        seq=saved.as_of.seq,
        replay_from_seq=saved.as_of.replay_from_seq,
        created_at=now,
        size_bytes=saved.size_bytes,
    )
    return Checkpoint(info=info, weights_digest=saved.state_digest)
