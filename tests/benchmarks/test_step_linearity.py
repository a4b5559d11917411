"""Drift and linear time, from numbers made by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from benchmarks.step_drift import drift
from benchmarks.step_linearity import linear_time, run_flops
from benchmarks.step_sizes import TINY, StepWork, step_flops


def _step(product: float, attention: float, seconds: float, how: str = "cuda") -> dict[str, Any]:
    return {
        "how": how,
        "product_flops": product,
        "attention_flops": attention,
        "seconds": seconds,
    }


def _steps(**slower: float) -> list[dict[str, Any]]:
    """0.1 s, products at 500 and attention at 600 TFLOP/s; times what is said of each."""
    flops = ((5e14, 1e13), (1e15, 4e14), (2e15, 9e14), (4e15, 6e15), (8e15, 3e16))
    return [
        _step(x, y, (0.1 + x / 500e12 + y / 600e12) * slower.get(f"step_{i}", 1.0))
        for i, (x, y) in enumerate(flops)
    ]


def test_a_linear_time_is_found_with_its_rates() -> None:
    fit = linear_time(_steps())
    assert fit is not None
    assert fit.constant_s == pytest.approx(0.1)
    assert fit.product_rate == pytest.approx(500e12)
    assert fit.attention_rate == pytest.approx(600e12)
    assert fit.worst < 1e-9


def test_a_step_off_the_line_is_the_worst() -> None:
    fit = linear_time(_steps(step_2=1.3))
    assert fit is not None
    assert 0.05 < fit.worst < 0.3


def test_too_few_steps_and_those_in_waves_are_not_fitted() -> None:
    assert linear_time(_steps()[:4]) is None
    streamed = _step(1e15, 1e14, 99.0, how="cuda-waves-of-8")
    assert linear_time([*_steps()[:4], streamed]) is None
    fit = linear_time([*_steps(), streamed, {"how": "cuda", "error": "no room"}])
    assert fit is not None
    assert fit.worst < 1e-9


def test_products_that_run_again_count_for_time() -> None:
    """Two layers of 32 wide, 4 and 2 heads of 8, 48 features: what each kind leaves out."""
    work = StepWork(tokens=10, rows=3, pairs=25)
    kept = run_flops(TINY, work, {"products": 2})
    head = 67 * 32 * 3
    assert (
        kept["product_flops"] == step_flops(TINY, StepWork(tokens=10, rows=3, pairs=0)) + 2 * head
    )
    assert kept["attention_flops"] == 14 * 8 * 4 * 2 * 25
    narrow = run_flops(TINY, work, {"narrow": 1, "products": 1})
    gate_up = 2 * 32 * 48
    assert narrow["product_flops"] - kept["product_flops"] == 2 * gate_up * 10
    least = run_flops(TINY, work, {"host": 1, "attention": 1})
    projections = 2 * 32 * 32 + 2 * 32 * 16
    assert least["product_flops"] - kept["product_flops"] == 2 * 2 * (gate_up + projections) * 10


def test_drift_is_that_of_two_distributions() -> None:
    """Tokens drawn from `other` in their true shares: the estimate is the divergence itself."""
    other, got = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25])
    tokens = torch.tensor([0, 0, 1, 2])
    found = drift(got.log()[tokens], other.log()[tokens])
    assert found["max_abs"] == pytest.approx(math.log(2))
    assert found["mean_abs"] == pytest.approx(0.75 * math.log(2))
    divergence = float((other * (other.log() - got.log())).sum())
    assert found["k3"] == pytest.approx(divergence)
    same = drift(other.log(), other.log())
    assert set(same.values()) == {0.0}
