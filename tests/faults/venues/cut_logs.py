"""The journal's log cut short after a kill, as by a disk that did not keep what it had synced.

A start must serve all that callers were told of, or refuse the policy by name and delete nothing;
then both ways on are tried: the log as it was, and the loss as it is.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from ratoon.engine.files.losses import Choice, read_loss, write_decision
from ratoon.engine.types import Policy
from ratoon.stream.files import digest_file
from ratoon.stream.versions import version_folder
from ratoon_proto.types import PolicyState, StepResult
from tests.durability.cut_log import files_of, log_ends
from tests.faults.judge.calls import Call, Kind
from tests.faults.judge.history import Verdict, end_of, read_journal
from tests.faults.venues.light import POLICY, LightOptions, LightRun, light_run
from tests.faults.venues.rpc import Peer, PeerLostError

SHARES = (0.7, 0.9)
_NUM_SEGMENTS = 3
_NUMBER = 5_000_000
_LOOK_S = 0.05


@dataclass
class CutResult:
    """`cuts`: logs that were cut; `refused`: starts that refused a policy for that."""

    cuts: int = 0
    refused: int = 0
    operations: int = 0
    verdict: Verdict = field(default_factory=Verdict)


def run_cuts(model_folder: Path, seed: int) -> CutResult:
    """A policy for each share that is left of its log."""
    result = CutResult()
    for share in SHARES:
        with light_run(LightOptions(seed=seed, model_folder=model_folder)) as run:
            cut_for_a_while(run, share, result)
            if run.notes.errors:
                result.verdict.lost += run.notes.errors
                continue
            run.play_segment()
            _go_on(run, share, result)
            result.operations += len(run.notes.told)
    return result


def cut_for_a_while(run: LightRun, share: float, result: CutResult | None = None) -> None:
    """Play, kill all, start on the log cut short, and then on the log as it was."""
    for _ in range(_NUM_SEGMENTS):
        run.play_segment()
    whole = _cut(run, share)
    _judge_start(run, share, result or CutResult())
    run.pair.stop()
    _put_back(run, whole)
    run.pair.start()


def _go_on(run: LightRun, share: float, result: CutResult) -> None:
    """Cut once more, accept the loss, or adopt where files that are gone are needed, and go on."""
    verdict, newest = result.verdict, max(told.version or 0 for told in run.notes.told.values())
    _cut(run, share)
    is_refused = _judge_start(run, share, result)
    verdict.lost += run.notes.errors
    if not is_refused:
        return
    evidence = _evidence(run)
    policy = _decide(run)
    if policy.state is not PolicyState.READY:
        verdict.lost.append(f"log cut to {share:.0%}: no way on: {policy.failure}")
        return
    # Bodies that the journal knows go with the checkpoints that cover them.
    known = {record.body_digest for record in read_journal(run.settings.database, POLICY)}
    gone = {name for name, _ in evidence - files_of(run.settings.data_root)} - known
    verdict.lost += [f"log cut to {share:.0%}: {name} was deleted" for name in sorted(gone)]
    version = _step(run, policy.next_seq)
    if version is None or version <= newest:
        verdict.doubled.append(f"log cut to {share:.0%}: version {version} after {newest}")


def _decide(run: LightRun) -> Policy:
    """Accept the loss; where that is not possible, go on from a checkpoint, if there is one."""
    policy = _started(run)
    for choice in Choice:
        loss = read_loss(run.paths)
        if loss is None or (choice is Choice.FROM_EVIDENCE and not loss.adoptable):
            continue
        run.pair.stop()
        write_decision(run.paths, choice)
        run.pair.start()
        policy = _started(run)
        if policy.state is PolicyState.READY:
            break
    return policy


def _cut(run: LightRun, share: float) -> dict[Path, bytes]:
    """Kill all and leave so much of what SQLite reads of its log; gives the files as they were."""
    run.pair.stop()
    database = run.settings.database
    log = database.with_name(f"{database.name}-wal")
    whole = {path: path.read_bytes() for path in (database, log)}
    *_, end = log_ends(whole[log])
    log.write_bytes(whole[log][: int(share * end)])
    database.with_name(f"{database.name}-shm").unlink(missing_ok=True)
    return whole


def _put_back(run: LightRun, whole: dict[Path, bytes]) -> None:
    for path, data in whole.items():
        path.write_bytes(data)
    database = run.settings.database
    database.with_name(f"{database.name}-shm").unlink(missing_ok=True)


def _judge_start(run: LightRun, share: float, result: CutResult) -> bool:
    """Start, and note what is wrong with it; whether the policy is refused."""
    before, is_lost = files_of(run.settings.data_root), _lacks_something(run)
    run.pair.start()
    policy, name = _started(run), f"log cut to {share:.0%}"
    result.cuts += 1
    is_refused = "the journal has lost its end" in policy.failure
    result.refused += is_refused
    if is_lost and not is_refused:
        run.notes.errors.append(f"{name}: {policy.state} at version {policy.version}, silently")
    if is_refused and (gone := before - files_of(run.settings.data_root)):
        run.notes.errors.append(f"{name}: {len(gone)} files deleted, as {min(gone)[0]}")
    return is_refused


def _lacks_something(run: LightRun) -> bool:
    """Whether the journal as it lies there has not all that callers were told."""
    folder = run.root / "look"
    folder.mkdir(exist_ok=True)
    database = run.settings.database
    for path in (database, database.with_name(f"{database.name}-wal")):
        shutil.copy(path, folder)
    records = read_journal(folder / database.name, POLICY)
    shutil.rmtree(folder)
    ends = {record.operation_id: end_of(record) for record in records}
    return any(ends.get(name) != told.end for name, told in run.notes.told.items())


def _started(run: LightRun) -> Policy:
    """The policy, once its start has ended."""
    peer, deadline = Peer(run.settings.socket("engine")), time.monotonic() + run.pair.patience_s
    while True:
        try:
            policy: Policy = peer.call("policy")
        except PeerLostError:
            if time.monotonic() > deadline:
                raise
        else:
            return policy
        time.sleep(_LOOK_S)


def _evidence(run: LightRun) -> set[tuple[str, str]]:
    """Files of what is ahead of the journal, and all bodies; name and digest."""
    loss, paths = read_loss(run.paths), run.paths
    assert loss is not None
    folders = [version_folder(paths.weights, version) for version in loss.versions]
    folders += [paths.checkpoint(checkpoint_id) for checkpoint_id in loss.checkpoints]
    found = [path for folder in (*folders, paths.bodies) for path in folder.iterdir()]
    return {(path.name, digest_file(path)) for path in found}


def _step(run: LightRun, seq: int) -> int | None:
    """Close what window there is, and update; the new version."""
    discard, update = (
        Call(number=_NUMBER, kind=Kind.DISCARD_GRADIENTS),
        Call(number=_NUMBER + 1, kind=Kind.UPDATE),
    )
    run.pair.end(run.pair.submit(run.submission(discard, seq)).operation_id)
    ended = run.pair.end(run.pair.submit(run.submission(update, seq + 1)).operation_id)
    return ended.result.version if isinstance(ended.result, StepResult) else None
