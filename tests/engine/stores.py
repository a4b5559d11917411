"""Both stores over one database, and records and ends of operations to put into them."""

from __future__ import annotations

from dataclasses import replace

from ratoon.engine.journal.fenced import FencedStore
from ratoon.engine.journal.records import (
    Checkpoint,
    JournalState,
    OperationEnd,
    OperationRecord,
    PolicyRow,
)
from ratoon.engine.journal.steps import figures_of, pack, warning_kinds
from ratoon.engine.journal.store import SqlStore
from ratoon.engine.journal.tables import open_database
from ratoon.engine.types import CheckpointInfo
from ratoon.engine.worker.tasks import Choices, Numerics
from ratoon.warning_kinds import WarningKind
from ratoon_proto.types import OperationKind, StepReport, StepResult
from tests.engine.harness import forward_backward, life_record, optim_step, policy_spec, update
from tests.plans import PLAN

NUMERICS = Numerics.of({"device": "fake", "threads": "1"})


def journaled(info: CheckpointInfo) -> Checkpoint:
    return Checkpoint(info=info, weights_digest=f"digest{info.seq}")


class Stores:
    """Both stores over one database, with policy `p` owned by `token`."""

    def __init__(self, url: str) -> None:
        engine = open_database(url)
        self.engine, self.store, self.fenced = engine, SqlStore(engine), FencedStore(engine)

    def with_policy(self) -> Stores:
        self.store.insert_policy(policy_spec(), life_record("p", "p.create"))
        self.token = self.fenced.acquire("p")
        return self

    def record(self, seq: int) -> OperationRecord:
        found = self.store.find_operation(f"p.{seq}")
        assert found is not None
        return found

    @property
    def policy(self) -> PolicyRow:
        found = self.store.policy("p")
        assert found is not None
        return found

    def accept(self, seq: int, kind: OperationKind = OperationKind.UPDATE) -> OperationRecord:
        record = record_of(seq, kind)
        self.fenced.accept(self.token, record, seq + 1)
        return record

    def end(self, seq: int, version: int, **changes: object) -> None:
        self.fenced.end(self.token, "p", end_of(seq, version, **changes))

    def applied(self, seq: int, version: int, kind: OperationKind = OperationKind.UPDATE) -> None:
        self.accept(seq, kind)
        self.end(seq, version, frees_window=kind is not OperationKind.FORWARD_BACKWARD)


def assert_steps_are_reports(store: SqlStore, policy_id: str) -> None:
    """The steps are those of the applied operations that set the weights, to the bit.

    Those that were rolled back are marks.
    """
    steps = {row.seq: row for row in store.steps(policy_id, 0, 0, 10**6)}
    for record in store.records_from(policy_id, 1):
        step, is_applied = steps.pop(record.seq, None), record.state is JournalState.APPLIED
        if not (is_applied and record.effect.changes_weights):
            assert step is None or (step.figures, step.warnings) == (
                None,
                (WarningKind.ROLLED_BACK,),
            )
            continue
        assert step is not None, f"no step of seq {record.seq}"
        assert (step.version, step.finished_at) == (record.version, record.finished_at)
        report = record.result.report if isinstance(record.result, StepResult) else None
        assert (step.figures is None) == (report is None)
        if report is not None and step.figures is not None:
            assert step.figures == pack(figures_of(report))
            assert step.skip_reason == report.skip_reason
            assert step.warnings == warning_kinds(report)
    assert not steps, f"steps of no operation: {sorted(steps)}"


def record_of(seq: int, kind: OperationKind = OperationKind.UPDATE) -> OperationRecord:
    command = {
        OperationKind.FORWARD_BACKWARD: forward_backward(seq),
        OperationKind.OPTIM_STEP: optim_step(),
    }.get(kind, update(seq))
    return replace(
        life_record("p", f"p.{seq}", kind),
        seq=seq,
        payload_hash=f"hash{seq}",
        command=command,
        body_digest=f"body{seq}",
    )


def end_of(seq: int, version: int, **changes: object) -> OperationEnd:
    end = OperationEnd(
        operation_id=f"p.{seq}",
        state=JournalState.APPLIED,
        result=StepResult(version=version, report=StepReport(loss=0.5)),
        version=version,
        started_at=5.0,
        finished_at=9.0,
        choices=Choices(plan=PLAN, next_version=version),
        numerics=NUMERICS,
        frees_window=True,
    )
    return replace(end, **changes)
