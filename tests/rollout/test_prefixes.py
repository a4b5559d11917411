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


def _num_shared(batch: RolloutBatch, a: int, b: int) -> int:
    return len(set(oracle.prefixes(batch, a)) & set(oracle.prefixes(batch, b)))


@CHECKED
@given(batch=batches())
def test_sort_sequences_is_by_temperature_tokens_and_request(batch: RolloutBatch) -> None:
    prefixes = sort_sequences(batch)
    tokens = oracle.sequences(batch)
    keys = [(float(batch.temperature[s]), tokens[s], s) for s in range(batch.num_sequences)]
    assert prefixes.order.tolist() == sorted(range(batch.num_sequences), key=keys.__getitem__)
    assert prefixes.rank[prefixes.order].tolist() == list(range(batch.num_sequences))


@CHECKED
@given(batch=batches())
def test_lcp_is_what_neighbours_share(batch: RolloutBatch) -> None:
    prefixes = sort_sequences(batch)
    order = prefixes.order.tolist()
    expected = [0] + [_num_shared(batch, a, b) for a, b in pairwise(order)]
    assert prefixes.lcp.tolist() == expected


@CHECKED
@given(batch=batches())
def test_shared_with_previous_of_every_second_sequence(batch: RolloutBatch) -> None:
    prefixes = sort_sequences(batch)
    places = np.arange(0, batch.num_sequences, 2)
    order = prefixes.order[places].tolist()
    expected = [0] + [_num_shared(batch, a, b) for a, b in pairwise(order)]
    assert shared_with_previous(prefixes.lcp, places).tolist() == expected


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
