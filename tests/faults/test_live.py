"""Kills of the real service's ranks: the short form of that part of `make faults`."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratoon.engine.crash_points import CrashPoint
from tests.faults.venues.live import run_live


@pytest.mark.slow
def test_a_rank_that_is_killed_loses_and_doubles_nothing(model_folder: Path) -> None:
    """At any time, and between its step and its worker's hearing of it."""
    only = ("rank", CrashPoint.RANK_AFTER_STEP)
    result = run_live(model_folder, seed=17, rounds=1, only=only)
    assert (result.verdict.lost, result.verdict.doubled) == ([], [])
    assert (result.kills, result.points) == (2, {CrashPoint.RANK_AFTER_STEP})
