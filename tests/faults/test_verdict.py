"""What a fault run counts as lost and as doubled, on histories made by hand."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from ratoon.engine.crash_points import CrashPoint
from ratoon.engine.journal.records import JournalState, OperationRecord
from ratoon.engine.types import FailedResult
from ratoon.stream.files import make_folder, write_atomic
from ratoon_proto.types import OperationKind, PhaseSeconds, StepReport
from tests.engine.harness import life_record
from tests.faults.judge.calls import Call, Kind, in_any_order, segments
from tests.faults.judge.history import Ack, Told, judge_acks, plain
from tests.faults.judge.oracle import judge_served
from tests.faults.venues import crashes, live
from tests.faults.venues.power import cut_power, record_syncs

CALL = Call(number=1, kind=Kind.UPDATE)


def record(
    name: str, state: JournalState = JournalState.APPLIED, **fields: object
) -> OperationRecord:
    made = life_record("p", name, OperationKind.UPDATE)
    return replace(made, seq=1, state=state, version=1, **fields)


def ack(*names: str) -> Ack:
    return Ack(call=CALL, operation_ids=frozenset(names))


def told(end: str, version: int | None = 1) -> dict[str, Told]:
    return {"a": Told(operation_id="a", end=end, version=version)}


def test_a_call_that_ended_as_its_caller_was_told_is_neither() -> None:
    verdict, entries = judge_acks([ack("a")], told("done"), [record("a")])
    assert verdict.is_good
    assert [entry.end for entry in entries] == ["done"]


def test_an_acknowledged_call_that_the_journal_does_not_have_is_lost() -> None:
    verdict, _ = judge_acks([ack("a")], {}, [])
    assert (len(verdict.lost), len(verdict.doubled)) == (1, 0)


@pytest.mark.parametrize("seen", [told("WORKER_LOST"), told("done", version=2), told("cancelled")])
def test_another_end_than_its_caller_was_told_is_lost(seen: dict[str, Told]) -> None:
    verdict, _ = judge_acks([ack("a")], seen, [record("a")])
    assert (len(verdict.lost), len(verdict.doubled)) == (1, 0)


def test_an_end_that_was_taken_back_is_lost() -> None:
    failed = FailedResult(error={"code": "WORKER_LOST"})
    rolled_back = record("a", JournalState.FAILED, result=failed)
    verdict, _ = judge_acks([ack("a")], told("done"), [rolled_back])
    assert len(verdict.lost) == 1


def test_one_call_that_is_two_operations_is_doubled() -> None:
    verdict, _ = judge_acks([ack("a", "b")], told("done"), [record("a"), record("b")])
    assert (len(verdict.lost), len(verdict.doubled)) == (0, 1)


def test_an_operation_that_nobody_asked_for_is_doubled() -> None:
    verdict, _ = judge_acks([ack("a")], told("done"), [record("a"), record("b")])
    assert (len(verdict.lost), len(verdict.doubled)) == (0, 1)


def test_results_are_compared_without_their_times() -> None:
    slow = StepReport(loss=1.5, seconds=PhaseSeconds(forward=9.0), tokens_per_second=2.0)
    assert plain(slow) == plain(StepReport(loss=1.5))
    assert plain(slow) != plain(StepReport(loss=1.5000000000000002))
    nan = StepReport(loss=float("nan"))
    assert plain(nan) == plain(StepReport(loss=float("nan")))


DIGESTS = {0: "zero", 1: "one", 2: "two"}


@pytest.mark.parametrize("served", [["zero", "two"], ["two"], ["zero", "one", "two"]])
def test_versions_may_be_left_out(served: list[str]) -> None:
    assert judge_served(served, DIGESTS).is_good


@pytest.mark.parametrize(
    ("served", "problem"),
    [
        (["one", "half", "two"], "weights half were served, after version 1: no version's"),
        (["one", "two", "one", "two"], "version 1 was served after version 2"),
        (["zero", "one"], "version 1 is served, of 2"),
        ([], "version -1 is served, of 2"),
    ],
)
def test_half_a_version_an_older_one_and_no_newest_are_lost(
    served: list[str], problem: str
) -> None:
    assert judge_served(served, DIGESTS).lost == [problem]


def test_a_power_cut_takes_what_was_not_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", os.fsync)  # Given back after the test.
    data = tmp_path / "data"
    data.mkdir()
    record_syncs(tmp_path)
    make_folder(data / "kept")
    write_atomic(data / "kept" / "whole", b"whole")
    (data / "kept" / "nameless").write_bytes(b"in no synced folder")
    with (data / "kept" / "whole").open("ab") as file:
        file.write(b" and more")
    assert cut_power(tmp_path, data) == 2
    assert [path.name for path in (data / "kept").iterdir()] == ["whole"]
    assert (data / "kept" / "whole").read_bytes() == b"whole"


def test_a_block_of_calls_names_none_of_its_own() -> None:
    for calls, _ in zip(segments(3), range(4), strict=False):
        blocks = list(in_any_order(calls))
        assert [call for block in blocks for call in block] == calls
        for block in blocks:
            numbers = {call.number for call in block}
            assert not any({call.from_forward, *call.includes} & numbers for call in block)


def test_every_crash_point_is_in_a_fault_run() -> None:
    """Those of the wires and of ranks are for a run of the real service."""
    assert sorted((*crashes.POINTS, *live.POINTS)) == sorted(CrashPoint)
