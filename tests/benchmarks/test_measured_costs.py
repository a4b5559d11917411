"""The planner's costs of an H200 against the committed results measured on one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.step.run import FULL
from ratoon.model.activation_plan import Kept
from ratoon.model.device_costs import (
    H200_RATES,
    device_costs,
    recompute_s,
)
from ratoon.rollout.costs import Work
from tests.model.test_activation_plan import QWEN3_8B

pytestmark = pytest.mark.more

STEP = Path(__file__).parents[2] / "benchmarks/results/h200/step.json"
GIB = 2**30


def _measured_rows() -> list[dict[str, Any]]:
    """Packed steps of the committed result that were warm."""
    result = json.loads(STEP.read_text(encoding="utf-8"))
    rows = [*result["paper"], *result["memory"]]
    ours = [row for row in rows if row["how"] == "cuda" and "error" not in row]
    found = [row for row in ours if row.get("is_warm", True)]
    assert len(found) >= 7, "paper, four lengths and two comparisons"
    return found


def _shape(row: dict[str, Any]) -> tuple[int, tuple[int, ...]]:
    """Tokens of the prompt and of each response."""
    prompt, _, count = row["case"].split()[-1].partition("x")
    if int(prompt) == FULL.paper.prompt:
        return FULL.paper.prompt, FULL.paper.responses
    if row["case"].startswith("many"):
        return int(prompt), FULL.many.responses[: row["responses"]]
    return int(prompt), (1024,) * int(count)


@pytest.mark.parametrize("row", _measured_rows(), ids=lambda row: row["case"])
def test_seconds_of_measured_steps(row: dict[str, Any]) -> None:
    """Whole models, whatever their layers keep; the rates were fitted to eight layers."""
    prompt, responses = _shape(row)
    own = sum(responses)
    pairs = prompt * (prompt + 1) // 2 + sum(prompt * n + n * (n + 1) // 2 for n in responses)
    work = Work(tokens=prompt + own, pairs=pairs, rows=own)
    assert work.tokens == row["packed_tokens"]
    kept = tuple(Kept(kind) for kind, count in row["layers_kept"].items() for _ in range(count))
    again = recompute_s(QWEN3_8B, H200_RATES, kept) * work.tokens
    predicted = device_costs(QWEN3_8B, H200_RATES).packed(work) + again
    assert predicted == pytest.approx(row["seconds"], rel=0.03)
