"""Figures of policies on several devices: what they are made of, and which cases they wait for."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.service.ranks import CASES, WANTED, figures, format_tables


def _row(name: str, trained_s: float, optimizer_s: float, groups: int = 8) -> dict[str, Any]:
    """A case whose first update, which compiles, took far longer."""
    update = {
        "seconds": trained_s + 1.0,
        "trained_s": trained_s,
        "optimizer_s": optimizer_s,
        "peak_gib": 70.0,
    }
    return {"name": name, "groups": groups, "updates": [{**update, "trained_s": 99.0}, update]}


_ROWS = [
    _row("one", 31.0, 0.2),
    _row("states", 15.5, 0.25),
    _row("gradients", 18.0, 0.15),
    _row("long one", 53.0, 0.2, 1),
    _row("long together", 28.0, 0.2, 1),
]


def test_figures_are_of_the_cases_medians() -> None:
    assert figures(_ROWS) == {
        "speedup": 2.0,
        "service_speedup": pytest.approx(32.0 / 16.5),
        "seconds_per_group": pytest.approx(4.5),
        "exposed_ms": pytest.approx(150.0),
        "ulysses_speedup": pytest.approx(53.0 / 28.0),
    }
    assert {row["name"] for row in _ROWS} == {case.name for case in CASES}


def test_figures_wait_for_their_cases() -> None:
    found = figures(_ROWS[:1])
    assert found == dict.fromkeys(WANTED)
    assert "–" in "\n".join(format_tables(_ROWS[:1]))
