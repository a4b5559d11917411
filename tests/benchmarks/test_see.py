"""What it costs that a run can be seen: the parts of the benchmark that need no service."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.service import see
from benchmarks.step.workload import Group
from harness.environment import describe
from ratoon.train.verdicts import pass_warnings

HOUR_S = 3600.0


def test_the_time_of_what_finds_figures_is_a_share_of_each_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Warnings about a pass take an hour by the clock of the benchmark."""
    hours: list[float] = []
    find = pass_warnings

    def slow(*args: Any, **options: Any) -> Any:
        hours.append(HOUR_S)
        return find(*args, **options)

    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + sum(hours))
    monkeypatch.setattr(see, "time", clock)
    monkeypatch.setattr(see, "PRESET", "tiny")
    monkeypatch.setattr(see, "GROUPS", (Group(prompt=8, responses=(4, 4)),) * 2)
    quick = see.measure_figures(updates=1, seed=0)
    monkeypatch.setattr("ratoon.train.report.pass_warnings", slow)
    other = see.measure_figures(updates=1, seed=0)
    assert 0 < quick["share"][0] < 1
    assert 0.9 < other["share"][0] < 1
    assert other["update_s"][0] > HOUR_S > quick["update_s"][0]


def test_figures_are_written_beside_what_is_wanted(tmp_path: Path) -> None:
    figures = dict.fromkeys(see.WHAT, 0.0012)
    result = {**figures, **describe(0), "figures": {"share": [0.0012]}, "history": {"ends": 7}}
    path = tmp_path / "page.md"
    path.write_text(f"before\n{see.BEGIN}\n{see.END}\nafter\n", encoding="utf-8")
    see.write_markdown(result, path, "see.json")
    text = path.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    for name, what in see.WHAT.items():
        assert f"| {what} | 0.0012 | <= {see.TARGETS[name]:g} |" in text
