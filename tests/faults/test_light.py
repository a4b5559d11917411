"""Kills of engine and worker processes: the short form of `make faults`."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratoon.engine.crash_points import CrashPoint
from ratoon_proto.types import Sequencing
from tests.faults.judge.history import judge_acks, read_journal
from tests.faults.judge.reference import TOLERANCE, worst_difference
from tests.faults.selftest import find_build
from tests.faults.venues.crashes import (
    AWAITED_POINTS,
    NAME_POINTS,
    Kills,
    crash_at,
    crash_at_imports,
    crash_at_names,
    crash_in_windows,
    lose_store,
)
from tests.faults.venues.cut_logs import SHARES, run_cuts
from tests.faults.venues.deliveries import ROLES, run_deliveries
from tests.faults.venues.light import POLICY, LightOptions, light_run

POINTS = (
    CrashPoint.ENGINE_AFTER_ACCEPT,
    CrashPoint.ENGINE_BEFORE_END,
    CrashPoint.ENGINE_AFTER_END,
    CrashPoint.WORKER_IN_APPLY,
    CrashPoint.WORKER_AFTER_APPLY,
    CrashPoint.ENGINE_IN_REPLAY,
)


@pytest.mark.parametrize(
    ("sequencing", "is_whole"),
    [
        pytest.param(Sequencing.CLIENT, False, marks=pytest.mark.more),
        pytest.param(Sequencing.SERVER, False, marks=pytest.mark.slow),
        pytest.param(Sequencing.CLIENT, True, marks=pytest.mark.slow),
    ],
)
def test_kills_lose_and_double_nothing(
    model_folder: Path, sequencing: Sequencing, is_whole: bool
) -> None:
    """Bit for bit the undisturbed run; and that run in float64 is a plain torch loop's."""
    options = LightOptions(seed=11, model_folder=model_folder, sequencing=sequencing)
    kills = Kills()
    with light_run(options) as run:
        for point in POINTS:
            crash_at(run, kills, point)
        if is_whole:
            crash_in_windows(run, kills)
            crash_at_imports(run, kills)
        verdict = run.finish()
        assert (verdict.lost, verdict.doubled) == ([], [])
        assert kills.missed == set()
        assert run.pair.num_kills >= len(POINTS)
        records = read_journal(run.settings.database, POLICY)
        _, entries = judge_acks(run.notes.acks(), run.notes.told, records)
        folder = run.root / "fp64"
        assert worst_difference(entries, run.trainer, model_folder, 11, folder) <= TOLERANCE


@pytest.mark.more
def test_a_version_is_named_once_whatever_is_killed(model_folder: Path) -> None:
    """Named in the order of operations, with the weights of its place, which stay."""
    kills = Kills()
    with light_run(LightOptions(seed=15, model_folder=model_folder)) as run:
        crash_at_names(run, kills)
        verdict = run.finish()
    assert (verdict.lost, verdict.doubled) == ([], [])
    assert kills.missed == set()
    assert kills.points == {*NAME_POINTS, *AWAITED_POINTS}


@pytest.mark.more
def test_versions_arrive_whole_and_in_order_whatever_is_killed(model_folder: Path) -> None:
    result = run_deliveries(model_folder, seed=13, num_kills=9)
    assert (result.verdict.lost, result.verdict.doubled) == ([], [])
    assert result.kills.keys() == set(ROLES)
    assert result.kills.total() >= 9
    assert result.versions > 3


@pytest.mark.more
def test_a_log_cut_short_is_refused_and_gone_on_from(model_folder: Path) -> None:
    result = run_cuts(model_folder, seed=14)
    assert (result.verdict.lost, result.verdict.doubled) == ([], [])
    assert result.cuts == 2 * len(SHARES)
    assert result.refused > 0


@pytest.mark.more
def test_a_store_that_takes_nothing_fails_saves_and_nothing_else(model_folder: Path) -> None:
    """Red once: a load was told to have failed, and had loaded; a save's name was gone for ever."""
    with light_run(LightOptions(seed=12, model_folder=model_folder, has_store=True)) as run:
        lose_store(run)
        verdict = run.finish()
    assert (verdict.lost, verdict.doubled) == ([], [])
    assert run.pair.num_kills == 2


@pytest.mark.parametrize(
    "build",
    [
        *(
            pytest.param(build, marks=pytest.mark.more)
            for build in ("no dedupe", "commit before apply", "no fsync")
        ),
        *(
            pytest.param(build, marks=pytest.mark.slow)
            for build in ("no fencing", "window not re-run", "lost end unnoticed")
        ),
    ],
)
def test_a_build_that_is_broken_on_purpose_is_found_out(model_folder: Path, build: str) -> None:
    finding = find_build(build, model_folder, seed=5)
    assert (finding.whole.lost, finding.whole.doubled) == ([], [])
    assert finding.broken.lost or finding.broken.doubled
