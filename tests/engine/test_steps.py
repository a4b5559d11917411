"""Steps in the journal and as curves: the bits of the reports, whatever the number of points."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
from numpy.typing import NDArray
from sqlalchemy import text

from ratoon.engine.journal import store as store_module
from ratoon.engine.journal.fenced import FencedStore
from ratoon.engine.journal.records import JournalState, RollBack
from ratoon.engine.journal.steps import FIGURES, Curves, StepRow, pack, unpack
from ratoon.engine.journal.tables import open_database
from ratoon.engine.types import CheckpointInfo, OperationFilter
from ratoon.errors import ErrorCode
from ratoon.warning_kinds import WarningKind
from ratoon_proto.types import (
    OperationKind,
    OperationState,
    PhaseSeconds,
    SkipReason,
    StepHistory,
    StepReport,
    StepResult,
)
from tests.engine.harness import life_record, policy_spec
from tests.engine.refusals import raises
from tests.engine.stores import Stores, assert_steps_are_reports, record_of

EVERYTHING = OperationFilter(policy_id="", kinds=(), states=(), seq=0)
SPECIAL = (0.0, -0.0, 1.0, -1.5, math.inf, -math.inf, math.nan, 5e-324, 2.0**53, None)


def bits(values: Sequence[float | None]) -> list[bytes]:
    return [b"" if value is None else struct.pack("<d", value) for value in values]


def test_figures_come_back_to_the_bit() -> None:
    names = list(FIGURES)
    for shift in range(len(SPECIAL)):
        given = {name: SPECIAL[(i + shift) % len(SPECIAL)] for i, name in enumerate(names)}
        (back,) = unpack([pack(given)], names)
        absent = [math.nan if value is None else value for value in given.values()]
        assert bits(list(back)) == bits(absent)


def test_every_number_of_a_report_is_a_figure() -> None:
    """A field that is added to the report is one without another line of code."""
    numbers = {f.name for f in fields(StepReport) if f.type in _NUMBERS}
    phases = {f"seconds.{f.name}" for f in fields(PhaseSeconds)}
    assert set(FIGURES) == numbers | phases
    assert len(set(FIGURES.values())) == len(FIGURES)


_NUMBERS = ("float", "int", "float | None", "int | None")


def rows_of(values_NF: NDArray[np.float64], names: Sequence[str]) -> list[StepRow]:
    return [
        StepRow(
            seq=2 * index + 1,
            version=index + 1,
            # The clock is set back once.
            finished_at=float(index if index < 20 else index - 15),
            kind=OperationKind.UPDATE,
            figures=pack({n: None if np.isnan(v) else v for n, v in zip(names, row, strict=True)}),
            warnings=(),
            skip_reason=None,
        )
        for index, row in enumerate(values_NF)
    ]


def curves_of(
    rows: Sequence[StepRow], names: Sequence[str], most: int, portion: int
) -> StepHistory:
    curves = Curves(names, most)
    for start in range(0, len(rows), portion):
        curves.add(rows[start : start + portion])
    return curves.history()


@pytest.mark.parametrize("portion", [1, 7, 64])
@pytest.mark.parametrize("most", [1, 5, 50, 101])
def test_points_are_those_of_neighbouring_steps(most: int, portion: int) -> None:
    names, rng = ("loss", "kl", "seconds.forward"), np.random.default_rng(3)
    values_NF = rng.normal(size=(101, 3))
    values_NF[rng.random((101, 3)) < 0.3] = np.nan
    values_NF[16:32, 1] = np.nan
    rows = rows_of(values_NF, names)
    history = curves_of(rows, names, most, portion)
    stride = 1
    while math.ceil(101 / stride) > most:
        stride *= 2
    bins = [range(start, min(start + stride, 101)) for start in range(0, 101, stride)]
    assert history.num_steps == 101
    assert history.seq == tuple(rows[each[-1]].seq for each in bins)
    assert history.version == tuple(rows[each[-1]].version for each in bins)
    assert history.finished_at == tuple(rows[each[-1]].finished_at for each in bins)
    for column, series in enumerate(history.series):
        assert series.figure == names[column]
        there = [values_NF[each, column][~np.isnan(values_NF[each, column])] for each in bins]
        mean = [float(np.mean(one)) if len(one) else math.nan for one in there]
        np.testing.assert_allclose(series.mean, mean, rtol=1e-12)
        if stride == 1:
            assert bits(series.mean) == bits(list(values_NF[:, column]))
            assert (series.low, series.high) == ((), ())
            continue
        low = [min(one, default=math.nan) for one in there]
        high = [max(one, default=math.nan) for one in there]
        assert (bits(series.low), bits(series.high)) == (bits(low), bits(high))


def test_without_names_a_curve_is_there_for_what_any_step_has() -> None:
    rows = rows_of(np.array([[1.0, np.nan], [2.0, np.nan]]), ("loss", "kl"))
    assert [series.figure for series in curves_of(rows, (), 10, 1).series] == ["loss"]
    named = curves_of([], ("kl", "kl"), 10, 1)
    assert [(series.figure, series.mean) for series in named.series] == [("kl", ())]
    with raises(ErrorCode.INVALID_ARGUMENT, match="nothing such") as caught:
        Curves(("loss", "nothing such"), 10)
    assert caught.value.field == "figures[1]"


def test_marks_of_one_point_that_say_the_same_are_one() -> None:
    rows = rows_of(np.zeros((8, 1)), ("loss",))
    rows[0] = replace(rows[0], warnings=("lag",))
    rows[1] = replace(rows[1], warnings=("length", "lag"))
    rows[2] = replace(rows[2], skip_reason=SkipReason.NO_TOKENS)
    loaded = replace(rows[5], seq=10, version=2, kind=OperationKind.LOAD_CHECKPOINT, figures=None)
    rows.insert(5, loaded)
    fine = curves_of(rows, (), 100, 3)
    said = [(mark.seq, mark.kind, mark.warnings, mark.skip_reason) for mark in fine.marks]
    update, load = OperationKind.UPDATE, OperationKind.LOAD_CHECKPOINT
    assert said == [
        (1, update, ("lag",), None),
        (3, update, ("length", "lag"), None),
        (5, update, (), SkipReason.NO_TOKENS),
        (10, load, (), None),
    ]
    assert (fine.num_steps, fine.marks[-1].version) == (8, 2)
    coarse = curves_of(rows, (), 1, 2)
    said = [(mark.seq, mark.kind, mark.warnings, mark.skip_reason) for mark in coarse.marks]
    assert said == [(3, update, ("lag", "length"), None), *said[1:]]
    assert [entry[0] for entry in said] == [3, 5, 10]


def test_a_hundred_thousand_steps_are_drawn_in_a_second() -> None:
    names = tuple(FIGURES)[:40]
    (row,) = rows_of(np.random.default_rng(1).normal(size=(1, 40)), names)
    begin = time.process_time()
    curves = Curves(names, 1000)
    for _ in range(100):
        curves.add([row] * 1000)
    history = curves.history()
    assert time.process_time() - begin < 1.0
    assert (history.num_steps, len(history.seq)) == (100_000, 782)


def fill(stores: Stores, num_steps: int) -> None:
    """Steps with reports that differ, every third skipped, and a checkpoint loaded at the end."""
    for seq in range(1, num_steps + 1):
        stores.accept(seq)
        report = StepReport(loss=1.0 / seq, num_groups=seq, seconds=PhaseSeconds(forward=0.1 * seq))
        if seq % 3 == 0:
            report = replace(report, skipped=True, skip_reason=SkipReason.NON_FINITE_LOSS)
        stores.end(seq, seq, result=StepResult(version=seq, report=report), finished_at=50.0 - seq)
    stores.accept(num_steps + 1, OperationKind.LOAD_CHECKPOINT)
    info = CheckpointInfo(
        checkpoint_id="c", version=1, seq=1, replay_from_seq=2, created_at=3.0, size_bytes=8
    )
    stores.end(num_steps + 1, 1, result=info)


def steps_of(stores: Stores) -> tuple[StepRow, ...]:
    return stores.store.steps("p", 0, 0, 1000)


def test_a_step_is_written_with_its_end(database_url: str) -> None:
    stores = Stores(database_url).with_policy()
    fill(stores, 7)
    stores.accept(9, OperationKind.FORWARD_BACKWARD)
    stores.end(9, 1)
    stores.accept(10)
    stores.end(10, 1, state=JournalState.CANCELLED)
    stores.accept(11)
    stores.end(11, 2)
    stores.end(11, 2)
    assert [row.seq for row in steps_of(stores)] == [*range(1, 9), 11]
    assert stores.store.steps("p", 3, 0, 2) == steps_of(stores)[3:5]
    assert_steps_are_reports(stores.store, "p")
    history = curves_of(steps_of(stores), ("loss",), 100, 3)
    assert history.series[0].mean == (*(1.0 / seq for seq in range(1, 8)), 0.5)
    load = history.marks[-1]
    assert (load.seq, load.version, load.kind) == (8, 1, OperationKind.LOAD_CHECKPOINT)
    stores.store.remove_policy("p", keep_operation_id="p.1")
    assert steps_of(stores) == ()
    stores.engine.dispose()


def test_the_steps_of_the_last_seqs_are_kept(database_url: str) -> None:
    stores = Stores(database_url).with_policy()
    stores.fenced = FencedStore(stores.engine, 5)
    fill(stores, 9)
    assert [row.seq for row in steps_of(stores)] == [6, 7, 8, 9, 10]
    stores.engine.dispose()


def test_a_step_that_was_rolled_back_is_a_mark(database_url: str) -> None:
    stores = Stores(database_url).with_policy()
    fill(stores, 4)
    back = RollBack(seq=2, replay_from_seq=3, version=2, checkpoint_id="auto", finished_at=99.0)
    stores.fenced.roll_back(stores.token, "p", back)
    history = curves_of(steps_of(stores), ("loss",), 100, 3)
    assert (history.seq, history.num_steps) == ((1, 2), 2)
    marks = [(mark.seq, mark.version, mark.warnings) for mark in history.marks]
    assert marks == [(seq, 2, (WarningKind.ROLLED_BACK,)) for seq in (4, 5)]
    assert all(mark.skip_reason is None for mark in history.marks)
    assert_steps_are_reports(stores.store, "p")
    stores.engine.dispose()


def test_an_upgrade_fills_in_the_steps_that_there_are(database_url: str) -> None:
    stores = Stores(database_url).with_policy()
    fill(stores, 7)
    before = steps_of(stores)
    with stores.engine.begin() as connection:
        for statement in (
            "DROP TABLE steps",
            "DROP TABLE named_versions",
            *(f"ALTER TABLE checkpoints DROP {name}" for name in ("name", "pinned", "expires_at")),
            "DROP INDEX operations_by_time",
            "DROP INDEX operations_of_policy_by_time",
            "UPDATE alembic_version SET version_num = '0002'",
        ):
            connection.execute(text(statement))
    stores.engine.dispose()
    stores = Stores(database_url)
    assert steps_of(stores) == before
    assert len(before) == 8
    stores.engine.dispose()


def listed(
    stores: Stores, asked: OperationFilter = EVERYTHING, most: int = 4, **options: object
) -> list[str]:
    """Ids over all pages."""
    policies, after, ids = options.get("policies"), None, list[str]()
    while True:
        found, after = stores.store.list_operations(asked, policies, after, most)  # pyright: ignore[reportArgumentType]
        assert len(found) <= most
        ids += [record.operation_id for record in found]
        if after is None:
            return ids


def test_operations_are_listed_newest_first_in_pages(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rare ones too, though no page reads more than some rows: it may be empty then."""
    monkeypatch.setattr(store_module, "_SCANNED", 6)
    stores = Stores(database_url).with_policy()
    stores.store.insert_policy(policy_spec(policy_id="q"), life_record("q", "q.create"))
    # A clock that stands still for a while, and is set back once.
    times = [100.0 + (seq // 5 if seq < 15 else seq // 5 - 2) for seq in range(1, 21)]
    for seq, created_at in enumerate(times, 1):
        kind = OperationKind.OPTIM_STEP if seq == 2 else OperationKind.UPDATE
        record = replace(record_of(seq, kind), created_at=created_at)
        stores.fenced.accept(stores.token, record, seq + 1)
        if seq < 19:
            stores.end(seq, seq)
    own = sorted(range(1, 21), key=lambda seq: (times[seq - 1], f"p.{seq}"), reverse=True)
    expected = [f"p.{seq}" for seq in own]
    created = ["q.create", "p.create"]
    everything = listed(stores)
    assert [one for one in everything if one not in created] == expected
    assert sorted(set(everything) & set(created)) == sorted(created)
    of_policy = replace(EVERYTHING, policy_id="p")
    assert [one for one in listed(stores, of_policy) if one not in created] == expected
    assert listed(stores, policies=("q",)) == ["q.create"]
    assert listed(stores, policies=()) == []
    assert listed(stores, replace(of_policy, kinds=(OperationKind.OPTIM_STEP,))) == ["p.2"]
    waiting = replace(of_policy, states=(OperationState.RUNNING,))
    assert set(listed(stores, waiting)) == {"p.19", "p.20", "p.create"}
    assert listed(stores, replace(of_policy, seq=7)) == ["p.7"]
    assert listed(stores, replace(of_policy, policy_id="r")) == []
    stores.engine.dispose()
    open_database(database_url).dispose()
