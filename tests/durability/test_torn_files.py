"""A file that a disk tore or changed is never taken for what was written, whatever file it is."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from ratoon.engine.types import FailedResult, Operation, PolicySpec
from ratoon_proto.types import PolicyState
from tests.durability import torn
from tests.durability.cuts import DATA, Recording, cuts_at_promises
from tests.durability.disk import write_image
from tests.durability.machine import DurableMachine, commands, digests_of
from tests.durability.torn import Target, TornCounts, tear_all
from tests.engine.local_ports import POLICY

KINDS = {
    *("journal", "journal's log", "keys", "body", "upload part", "result"),
    *("checkpoint's manifest", "checkpoint's tensors", "version's manifest", "version's tensors"),
}
NUM_TORN = 250


@pytest.fixture(scope="module")
def counts(recording: Recording) -> TornCounts:
    return tear_all(recording.root / DATA, 1, NUM_TORN)


def test_no_torn_file_is_loaded(counts: TornCounts) -> None:
    assert not counts.faults
    assert str(counts) == f"{NUM_TORN} torn files, 0 loaded"


def test_every_kind_of_file_is_torn_and_refused(counts: TornCounts) -> None:
    refused = {kind for kind, outcome in counts.counts if outcome == "refused"}
    # A log that was just written back is empty.
    assert KINDS - {"journal's log"} <= refused <= KINDS
    harmless = {kind for kind, outcome in counts.counts if outcome != "refused"}
    # Room that nothing uses, and a last transaction that may have been under way.
    assert harmless <= {"journal", "journal's log"}


def test_tearing_leaves_the_root_as_it_was(recording: Recording) -> None:
    root = recording.root / DATA
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    tear_all(root, 2, 20)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


def test_what_is_loaded_or_refused_without_a_word_is_counted(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A count that cannot rise proves nothing."""

    def blind(_root: Path) -> list[Target]:
        def first_byte(copy: Path) -> int:
            return (copy / "ratoon.sqlite").read_bytes()[0]

        def size(copy: Path) -> int:
            return (copy / "ratoon.sqlite").stat().st_size

        return [
            Target(kind=kind, file="ratoon.sqlite", parts=("ratoon.sqlite",), read=read)
            for kind, read in (("first byte", first_byte), ("size", size))
        ]

    monkeypatch.setattr(torn, "targets_of", blind)
    # Every tear, an empty file among them.
    counts = tear_all(recording.root / DATA, 1, 10_000)
    outcomes = Counter(outcome for _, outcome in counts.counts.elements())
    assert outcomes["loaded"] > 0
    assert outcomes["unnamed"] > 0
    assert counts.num_loaded == outcomes["loaded"] + outcomes["unnamed"] == len(counts.faults)


def change_a_byte(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])


async def recovered(root: Path, spec: PolicySpec, keep: int) -> tuple[str, tuple[str, str]]:
    """Why the policy stopped at its start, "" where it did not; digests of what it holds."""
    machine = DurableMachine(root, spec, creates=False, keep=keep)
    await machine.start()
    digests = digests_of(machine.training.real[-1])
    await machine.abandon(closes=True)
    assert (machine.run.state is PolicyState.READY) == (not machine.run.failure)
    return machine.run.failure, digests


async def lived(root: Path, spec: PolicySpec, keep: int) -> Path:
    """Run a dozen operations; the folder of the newest checkpoint."""
    machine = DurableMachine(root, spec, creates=True, keep=keep)
    await machine.start()
    for seq in range(1, 14):
        command, number = commands()[seq]
        await machine.end(await machine.submit(seq, command, number))
    known = machine.journal.store.checkpoints(POLICY)
    assert len(known) >= keep
    await machine.abandon(closes=False)
    return machine.paths.checkpoint(known[-1].info.checkpoint_id)


@pytest.mark.parametrize("name", ["states-00001-of-00001.safetensors", "checkpoint.json"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    recording: Recording, tmp_path: Path, name: str
) -> None:
    newest = asyncio.run(lived(tmp_path / "root", recording.spec, keep=2))
    change_a_byte(newest / name)
    failure, digests = asyncio.run(recovered(tmp_path / "root", recording.spec, keep=2))
    assert (failure, digests) == ("", recording.oracle[13])


def test_a_policy_stops_by_name_where_its_one_checkpoint_is_damaged(
    recording: Recording, tmp_path: Path
) -> None:
    newest = asyncio.run(lived(tmp_path / "root", recording.spec, keep=1))
    change_a_byte(newest / "states-00001-of-00001.safetensors")
    failure, _ = asyncio.run(recovered(tmp_path / "root", recording.spec, keep=1))
    assert f"{newest.name} is damaged: states-00001-of-00001.safetensors: got digest" in failure


def test_an_operation_whose_body_is_damaged_is_not_run(
    recording: Recording, tmp_path: Path
) -> None:
    cut = next(cut for cut in cuts_at_promises(recording) if cut.promises.made[-1].get("seq") == 4)
    (accepted,) = (mark for mark in cut.promises.of("accepted") if mark["seq"] == 4)
    write_image(cut.image, tmp_path / "root")
    root = tmp_path / "root" / DATA
    (body,) = root.glob(f"policies/p/bodies/{accepted['body']}")
    change_a_byte(body)

    async def run() -> Operation:
        machine = DurableMachine(root, recording.spec, creates=False)
        await machine.start()
        ended = await machine.controller.get_operation(accepted["operation_id"], 20.0)
        await machine.abandon(closes=True)
        return ended

    ended = asyncio.run(run())
    assert isinstance(ended.result, FailedResult)
    assert "body" in str(ended.result.error["message"])
