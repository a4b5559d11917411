"""Scripts of the Tinker API's SDK under kills of the real service: that part of `make faults`."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.tinker_site import NEWEST, are_installed
from tests.faults.venues.scripts import ROLES, run_scripts

pytestmark = pytest.mark.skipif(
    not are_installed([NEWEST]),
    reason="the SDK of the Tinker API is not installed: make env-compat",
)


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(len(ROLES), marks=pytest.mark.more),
        pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(4 * 3600)]),
    ],
)
def test_a_script_under_kills_prints_what_it_prints_without(model_folder: Path, kills: int) -> None:
    """Losses and digests of each step, and the journal's operations, each once."""
    result = run_scripts(model_folder, 23, kills)
    assert (result.verdict.lost, result.verdict.doubled) == ([], [])
    assert set(result.kills) == set(ROLES)
    assert result.kills.total() >= kills
