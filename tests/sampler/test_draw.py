"""Drawn tokens against the distribution that they are drawn from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ratoon.sampler.draw import draw, truncated
from ratoon_proto.types import SamplingParams

LOGITS = torch.tensor([2.0, -1.0, 0.5, -torch.inf, 1.0, 0.5])


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(), [0, 1, 2, 4, 5]),
        (SamplingParams(temperature=0.5), [0, 1, 2, 4, 5]),
        (SamplingParams(top_k=2), [0, 4]),
        (SamplingParams(temperature=2.0, top_p=0.5), [0, 4]),
        (SamplingParams(top_p=1e-9), [0]),
        (SamplingParams(top_k=3, top_p=0.9), [0, 4, 2]),
        (SamplingParams(top_k=100), [0, 1, 2, 4, 5]),
        (SamplingParams(temperature=0.0), [0]),
    ],
)
def test_tokens_come_as_often_as_they_are_likely(
    params: SamplingParams, allowed: list[int]
) -> None:
    """A grid of numbers, as even as can be: counts are the probabilities to one of the grid."""
    grid = 4000
    numbers = ((np.arange(grid) + 0.5) / grid).tolist()
    tokens, logprobs = draw(LOGITS.expand(grid, -1), [params] * grid, numbers)
    whole = (LOGITS.double() / (params.temperature or 1.0)).log_softmax(-1)
    expected = torch.zeros(len(LOGITS), dtype=torch.float64)
    expected[allowed] = whole.exp()[allowed]
    counts = np.bincount(tokens, minlength=len(LOGITS))
    assert np.abs(counts / grid - (expected / expected.sum()).numpy()).max() <= 1.5 / grid
    assert np.abs(np.array(logprobs) - whole[tokens].numpy()).max() < 1e-6


def test_every_row_has_its_own_rules() -> None:
    rows = [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=1)]
    tokens, logprobs = draw(LOGITS.expand(3, -1), rows, [0.999, 0.999, 0.999])
    assert tokens == [0, 5, 0]
    assert len({*logprobs}) == 2


def test_the_largest_draw_is_no_impossible_token() -> None:
    largest = 1 - 2.0**-53
    logits = torch.tensor([[0.0, 1.0, -torch.inf]])
    assert draw(logits, [SamplingParams()], [largest])[0] == [1]
    assert draw(logits, [SamplingParams(top_k=1)], [0.0])[0] == [1]


def test_top_p_keeps_the_token_that_reaches_it() -> None:
    probs = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64)
    for top_p, kept in ((0.5, [0.5, 0, 0]), (0.51, [0.5, 0.25, 0]), (0.8, [0.5, 0.25, 0.25])):
        assert truncated(probs, [0], [top_p]).tolist() == [kept]
