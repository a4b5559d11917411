"""The planner's costs of known devices against the committed results measured on them."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.step.run import FULL
from benchmarks.step.workload import Group, make_batch
from ratoon.planner.activation_plan import Kept
from ratoon.planner.costs import Work, measure
from ratoon.planner.device_costs import (
    H200_RATES,
    KNOWN_RATES,
    device_costs,
    recompute_s,
)
from ratoon.planner.planning import device_planner
from ratoon.rollout.packed import MicroBatch
from ratoon.rollout.prefixes import sort_sequences
from tests.model.test_activation_plan import QWEN3_8B

pytestmark = pytest.mark.more

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
STEP = RESULTS / "h200/step.json"
_H100_RESULT: dict[str, Any] = json.loads(
    (RESULTS / "h100/streams.json").read_text(encoding="utf-8")
)
GIB = 2**30
_LAYER_GRADIENT_BYTES = 2 * 6_945_767_424 // 36


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


def _on_an_h100(host_gib: int) -> tuple[MicroBatch, float]:
    """The recorded group as the planner cuts it there for a window's only backward, and the seconds
    that it counts on: in 45 of 79.2 GiB, beside an 8B model and its 8-bit moments.
    """
    group = _H100_RESULT["plan"]["group"]
    batch = make_batch((Group(prompt=group["prompt"], responses=group["responses"]),), 151_936, 0)
    planner = device_planner(
        None,
        replace(QWEN3_8B, layer_gradient_bytes=_LAYER_GRADIENT_BYTES),
        45 * GIB,
        host_gib * GIB,
        rates=KNOWN_RATES[_H100_RESULT["gpu"]],
        layers_are_trained=True,
        is_only=True,
    )
    prefixes = sort_sequences(batch)
    (part,) = planner.plan(batch, prefixes, np.ones(batch.num_sequences, np.bool_)).micro_batches
    work = measure(batch, prefixes).work(np.arange(batch.num_sequences))
    costs = planner.devices[0].costs
    return part, costs.streamed(work, part.stages) if part.stages else costs.packed(work)


def test_seconds_of_an_h100s_updates() -> None:
    """Forward and backward of the recorded group, without memory of the host.

    The updates were of deterministic mode, whose attention is slower than the rates', and each ran
    beside a publication.
    """
    part, predicted = _on_an_h100(0)
    assert not part.stages, "fits at once"
    measured = [row["forward_s"] + row["backward_s"] for row in _H100_RESULT["updates"]]
    assert predicted == pytest.approx(statistics.median(measured), rel=0.1)
    assert predicted < min(measured)


def test_what_the_hosts_memory_is_worth_to_an_h100() -> None:
    """As docs/performance.md has it. Copies cost nothing here, as they run beside the layers."""
    (update,) = json.loads((RESULTS / "h100/step.json").read_text(encoding="utf-8"))["updates"]
    part, predicted = _on_an_h100(int(update["host_gib"]))
    assert not part.stages
    assert [_on_an_h100(0)[1], predicted] == pytest.approx([4.45, 4.21], abs=0.05)
    measured = update["forward_s"] + update["backward_s"]
    assert predicted == pytest.approx(measured, rel=0.1)
    assert predicted < measured
