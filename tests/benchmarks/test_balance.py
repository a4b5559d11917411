"""What the benchmark of balance plans for."""

from __future__ import annotations

import numpy as np

from benchmarks.step.balance import NUM_GROUPS, cases
from ratoon.rollout.prefixes import sort_sequences


def test_batches_are_of_the_said_shapes() -> None:
    batches = dict(cases(range(1)))
    assert list(batches) == [
        *(f"skew {skew}, seed 0" for skew in (0.5, 1.0, 1.5)),
        "giant, seed 0",
        "turns, seed 0",
    ]
    for batch in batches.values():
        responses_G = np.diff(batch.group_offsets)
        assert len(responses_G) == NUM_GROUPS
        assert responses_G.min() >= 8
        assert responses_G.max() <= 32
    turns = batches["turns, seed 0"]
    lcp = sort_sequences(turns).lcp
    prompts = np.diff(turns.prompt_offsets)
    # Random tokens share a few beside those that are said to be shared.
    near = [int((abs(lcp - depth) <= 2).sum()) for depth in (0, 2048)]
    assert near == [1, NUM_GROUPS - 1]
    expected = np.sort(
        np.concatenate(
            [np.repeat(prompts, 3), np.repeat(prompts + 600, 4), np.repeat(prompts + 1200, 8)]
        )
    )
    assert (abs(np.sort(lcp)[NUM_GROUPS:] - expected) <= 2).all()
