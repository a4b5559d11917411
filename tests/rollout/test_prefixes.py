"""`sort_sequences` against sorted Python tuples."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given

from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.prefixes import shared_lengths, shared_with_previous, sort_sequences
from ratoon.rollout.validate import validate_groups
from tests.builders import group, limits, rollout
from tests.rollout import oracle
from tests.rollout.strategies import CHECKED, batches


@CHECKED
@given(batch=batches())
def test_sequences_are_sorted_and_neighbours_compared(batch: RolloutBatch) -> None:
    """By temperature, tokens and request; also where only every second one is asked for."""
    prefixes = sort_sequences(batch)
    tokens = oracle.sequences(batch)
    keys = [(float(batch.temperature[s]), tokens[s], s) for s in range(batch.num_sequences)]
    assert prefixes.order.tolist() == sorted(range(batch.num_sequences), key=keys.__getitem__)
    assert prefixes.rank[prefixes.order].tolist() == list(range(batch.num_sequences))
    assert prefixes.lcp.tolist() == _shared_by_neighbours(batch, prefixes.order.tolist())
    places = np.arange(0, batch.num_sequences, 2)
    expected = _shared_by_neighbours(batch, prefixes.order[places].tolist())
    assert shared_with_previous(prefixes.lcp, places).tolist() == expected


def _shared_by_neighbours(batch: RolloutBatch, order: list[int]) -> list[int]:
    held = [set(oracle.prefixes(batch, s)) for s in order]
    return [0] + [len(a & b) for a, b in pairwise(held)]


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 79, 80, 81, 336, 5_431, 5_432, 20_000])
def test_shared_lengths_across_window_borders(length: int) -> None:
    """Windows start at 0, 16, 80, 336, 1360, 5456, ..: the answer must not depend on them."""
    tokens = np.zeros(3 * length + 10, np.int32)
    tokens[length] = 1  # the first run ends here
    left, right = np.array([0, 0]), np.array([length + 1, length + 1])
    limit = np.array([length + 5, max(length - 3, 0)])
    assert shared_lengths(tokens, left, right, limit).tolist() == [length, max(length - 3, 0)]


def test_nested_prompts_and_responses_that_continue_them() -> None:
    """A response may begin with the rest of another group's longer prompt, and go on inside it."""
    batch = validate_groups(
        [
            group([1], [rollout([2, 3, 4, 5]), rollout([2, 3, 9])], "short"),
            group([1, 2, 3], [rollout([4, 5]), rollout([4, 6])], "long"),
            group([1, 2, 3, 4, 5], [rollout([7])], "longest"),
        ],
        limits(),
    )
    prefixes = sort_sequences(batch)
    # 12345, 12345 again, 123457, 12346, 1239.
    assert prefixes.order.tolist() == [0, 2, 4, 3, 1]
    assert prefixes.lcp.tolist() == [0, 5, 5, 4, 3]


def test_large_token_ids_sort_as_numbers() -> None:
    """Ids of more than one byte: comparing little-endian bytes would put 256 before 1."""
    responses = [[256], [1], [65_536], [255], [2**31 - 2]]
    batch = validate_groups(
        [group([5], [rollout(r) for r in responses])], limits(vocab_size=2**31 - 1)
    )
    assert sort_sequences(batch).order.tolist() == [1, 3, 0, 2, 4]
