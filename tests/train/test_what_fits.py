"""docs/what-fits.md against the planner's formulas, and these against a run that was measured."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "what-fits.md"
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "what_fits.py"))


def _written(suffix: str = "") -> list[str]:
    page = PAGE.read_text(encoding="utf-8")
    lines = page.split(SCRIPT["BEGIN" + suffix])[1].split(SCRIPT["END" + suffix])[0].split("\n")
    return [line for line in lines if line]


@pytest.mark.more
def test_the_page_has_what_the_formulas_give() -> None:
    assert _written() == [line for line in SCRIPT["table"]() if line]
    assert _written("_TOGETHER") == SCRIPT["table_together"]()


def test_what_was_measured_fits() -> None:
    """The recorded group ran whole on an H200; its cell says that it may."""
    result = json.loads((ROOT / "benchmarks/results/h200/step.json").read_text(encoding="utf-8"))
    updates: list[dict[str, Any]] = result["updates"]
    (measured,) = [one for one in updates if one["case"] == "grpo Qwen3-8B"]
    assert measured["num_micro_batches"] == 1
    start = f"| {measured['model']} | `{measured['optimizer_states']}` |"
    (row,) = [line for line in _written() if line.startswith(start)]
    at_once, streamed = re.findall(r"(\d+)K", row.split("|")[-2])
    least = min(int(at_once), int(streamed)) * 1000
    assert measured["packed_tokens"] <= least
