"""Drift of log-probs, from numbers made by hand."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.step.drift import drift

pytestmark = pytest.mark.more


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
