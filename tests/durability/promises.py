"""Whether a data root that a crash left keeps what the service had promised by then.

Enters a folder and the marks of `driver.py`, leaves nothing, or `LostError` naming the promise.
Invariant: the folder is judged twice, as it was found and by the service that recovers from it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratoon.auth.keys import KeyFile
from ratoon.engine.commands import (
    DiscardGradientsCommand,
    ForwardCommand,
    PublishVersionCommand,
    SeqKey,
)
from ratoon.engine.files.paths import read_result
from ratoon.engine.files.results import read_old_logprobs
from ratoon.engine.journal.records import OperationRecord
from ratoon.engine.types import FailedResult, NamedVersion, PolicySpec
from ratoon.errors import ErrorCode, RatoonError
from ratoon.stream.files import digest_bytes, digest_file
from ratoon.stream.versions import list_versions, read_manifest, version_folder
from ratoon_proto.types import OperationState, PolicyState, Recovery
from tests.durability.machine import DurableMachine, commands, digests_of
from tests.durability.recorder import Event, Kind
from tests.engine.fake_trainer import number_batch
from tests.engine.harness import POLICY
from tests.engine.stores import assert_steps_are_reports

Mark = Mapping[str, Any]
# Digests of weights and of the window's gradients.
Digests = tuple[str, str]
_RESULT_BYTES = 2**20


class LostError(AssertionError):
    """A promise that the disk does not keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promises:
    """What had been answered by one moment, and what an undisturbed run has after each seq."""

    made: Sequence[Mark]
    oracle: Mapping[int, Digests]

    def of(self, kind: str) -> list[Mark]:
        return [mark for mark in self.made if mark["kind"] == kind]

    def after(self, seq: int) -> Digests:
        """A seq that was not run changed nothing."""
        return self.oracle[max(ran for ran in self.oracle if ran <= seq)]


def parse_marks(events: Sequence[Event]) -> list[Mark]:
    return [json.loads(event.data) for event in events if event.kind is Kind.MARK]


async def check(root: Path, spec: PolicySpec, promises: Promises) -> None:
    """Raises `LostError`; whatever else it raises is a recovery that did not come to its end."""
    _check_keys(root, promises)
    if not promises.of("created"):
        return
    machine = DurableMachine(root, spec, creates=False)
    try:
        _check_journal(machine, promises, is_recovered=False)
        _check_results(machine, promises)
        _check_versions(machine)
        _check_published(machine, promises)
        await machine.start()
        if machine.run.state is not PolicyState.READY:
            raise LostError(f"the policy is {machine.run.state} after recovery")
        await _check_weights(machine, promises)
        await _check_uploads(machine, promises)
        _check_journal(machine, promises, is_recovered=True)
        _check_versions(machine)
        await _check_goes_on(machine)
        _check_checkpoints(machine, promises)
    finally:
        await machine.abandon(closes=True)


def _check_keys(root: Path, promises: Promises) -> None:
    keys = KeyFile(root).keys()
    for mark in promises.of("key"):
        if mark["key_id"] not in keys:
            raise LostError(f"key {mark['key_id']}")
    for mark in promises.of("revoked"):
        if keys[mark["key_id"]].revoked_at is None:
            raise LostError(f"key {mark['key_id']} is revoked no more")


def _check_journal(machine: DurableMachine, promises: Promises, *, is_recovered: bool) -> None:
    """Every operation is there, with its body while it is open, and as it was said to have ended.

    A policy that recovers by failing what was lost may say so of what it had done.
    """
    store = machine.journal.store
    may_fail = machine.spec.recovery is Recovery.FAIL and is_recovered
    records: dict[int, OperationRecord] = {}
    for mark in promises.of("accepted"):
        record = store.find_key(POLICY, SeqKey(seq=mark["seq"]))
        if record is None or record.operation_id != mark["operation_id"]:
            raise LostError(f"operation {mark['seq']}")
        records[record.seq] = record
        if not record.state.is_final and record.body_digest:
            _check_body(machine, record)
    try:
        assert_steps_are_reports(store, POLICY)
    except AssertionError as err:
        raise LostError(f"steps: {err}") from err
    for mark in promises.of("ended"):
        record = records[mark["seq"]]
        if may_fail and _was_rolled_back(record):
            continue
        if record.state.public != mark["state"]:
            raise LostError(f"operation {record.seq} was {mark['state']}, is {record.state}")
        if mark["version"] is not None and record.version != mark["version"]:
            raise LostError(f"version {mark['version']} of operation {record.seq}")


def _check_body(machine: DurableMachine, record: OperationRecord) -> None:
    path = machine.paths.body(record.body_digest)
    if not path.exists():
        raise LostError(f"the body of operation {record.seq}")
    if hashlib.sha256(path.read_bytes()).hexdigest() != record.body_digest:
        raise LostError(f"the bytes of the body of operation {record.seq}")


def _was_rolled_back(record: OperationRecord) -> bool:
    result = record.result
    return isinstance(result, FailedResult) and result.error["code"] == ErrorCode.WORKER_LOST


async def _check_uploads(machine: DurableMachine, promises: Promises) -> None:
    for mark in promises.of("uploaded"):
        upload_id, part_index = mark["upload"], mark["part"]
        parts = await machine.controller.get_upload_parts(upload_id, part_index + 1)
        if digest_bytes(parts[part_index]) != mark["digest"]:
            raise LostError(f"part {part_index} of upload {upload_id}")


def _check_results(machine: DurableMachine, promises: Promises) -> None:
    """Log-probs can be fetched, and used by a loss where they are a Forward's."""
    for mark in promises.of("result"):
        digest, suffix = mark["digest"], mark["operation_id"].rpartition(".")[2]
        data = read_result(machine.paths, digest, 0, _RESULT_BYTES)
        if data is None or digest_bytes(data) != digest:
            raise LostError(f"the result of operation {mark['seq']}")
        command, number = commands()[mark["seq"]]
        if not isinstance(command, ForwardCommand):
            continue
        read_old_logprobs(machine.paths.results / f"{digest}.{suffix}", number_batch(number))


def _check_versions(machine: DurableMachine) -> None:
    """What readers may fetch is whole."""
    root = machine.paths.weights
    for version in {*list_versions(root), *_published(machine)}:
        try:
            for file in read_manifest(root, version).files:
                if digest_file(version_folder(root, version) / file.name) != file.digest:
                    raise LostError(f"{file.name} of version {version}")
        except (RatoonError, FileNotFoundError) as err:
            # A publication that goes on beside this may have removed an older one.
            if version in {*list_versions(root), *_published(machine)}:
                raise LostError(f"version {version}: {err}") from err


def _check_published(machine: DurableMachine, promises: Promises) -> None:
    """The versions that readers were told of, and nothing that was said to be deleted."""
    deleted = {mark["checkpoint_id"] for mark in promises.of("deleted")}
    named = {each.info.name for each in machine.journal.store.checkpoints(POLICY)}
    if deleted & named:
        raise LostError(f"checkpoints {deleted & named} are there again")
    _check_named(machine, promises)
    told = promises.of("published")
    if told and told[-1]["version"] not in _published(machine):
        raise LostError(f"the published version {told[-1]['version']}")


def _check_named(machine: DurableMachine, promises: Promises) -> None:
    """Each name that was told keeps its version, and none that was taken away is there again."""
    named = {each.name: each.version for each in _named(machine)}
    gone = {mark["name"] for mark in promises.of("unnamed")}
    if gone & named.keys():
        raise LostError(f"the names {gone & named.keys()} are there again")
    for mark in promises.of("ended"):
        command, _ = commands()[mark["seq"]]
        if not isinstance(command, PublishVersionCommand) or command.name in gone:
            continue
        if named.get(command.name) != mark["version"]:
            raise LostError(f"version {mark['version']}, named {command.name}")


def _named(machine: DurableMachine) -> tuple[NamedVersion, ...]:
    return machine.journal.store.history(POLICY).named


def _published(machine: DurableMachine) -> tuple[int, ...]:
    """Versions that can be fetched."""
    policy = machine.journal.store.policy(POLICY)
    if policy is None:
        raise LostError("the policy")
    return (*policy.published, *(each.version for each in _named(machine)))


def _check_checkpoints(machine: DurableMachine, promises: Promises) -> None:
    """Check that the journal's checkpoints can be loaded, and hold the weights that they were made
    of."""
    trainer = machine.training.real[-1]
    for checkpoint in machine.journal.store.checkpoints(POLICY):
        info = checkpoint.info
        try:
            trainer.load_checkpoint(machine.paths.checkpoint(info.checkpoint_id))
        except (RatoonError, OSError) as err:
            # It has been collected beside this, as nothing needs it any more.
            if checkpoint in machine.journal.store.checkpoints(POLICY):
                raise LostError(f"checkpoint {info.checkpoint_id}: {err}") from err
            continue
        if trainer.state_digest() != promises.after(info.seq)[0]:
            raise LostError(f"the weights of checkpoint {info.checkpoint_id}")


async def _check_weights(machine: DurableMachine, promises: Promises) -> None:
    """Replay ends where the undisturbed run was; otherwise the newest checkpoint holds."""
    trainer = machine.training.real[-1]
    if machine.spec.recovery is Recovery.FAIL:
        known = machine.journal.store.checkpoints(POLICY)
        if trainer.state_digest() != promises.after(known[-1].info.seq if known else 0)[0]:
            raise LostError("the weights are those of no checkpoint")
        return
    for live in machine.run.ledger.open_operations():
        ended = await machine.controller.get_operation(live.operation_id, 20.0)
        if not ended.state.is_final:
            raise LostError(f"operation {ended.seq} does not end")
    policy = machine.journal.store.policy(POLICY)
    assert policy is not None
    last = policy.next_seq - 1
    got = await machine.worker._run(lambda: digests_of(machine.training.real[-1]))
    if got != promises.after(last):
        raise LostError(f"the weights after operation {last}")


async def _check_goes_on(machine: DurableMachine) -> None:
    policy = machine.journal.store.policy(POLICY)
    assert policy is not None
    operation = await machine.submit(policy.next_seq, DiscardGradientsCommand(), 0)
    ended = await machine.end(operation)
    if ended.state is not OperationState.DONE:
        raise LostError(f"the next operation is {ended.state}")
