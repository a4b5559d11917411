"""Which prefixes are shared: those that save more than their forks cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratoon.planner.costs import DEFAULT_COSTS, CostModel, measure
from ratoon.planner.plan import share_as_planned, unshared_places
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.forest import build_forest
from ratoon.rollout.packed import UpdatePlan
from ratoon.rollout.prefixes import sort_sequences
from ratoon.rollout.validate import validate_groups
from tests.builders import group, limits, rollout
from tests.plans import journaled, make_plan
from tests.rollout.strategies import CHECKED, batches

# A token of a sequence costs as much as one of the linear layers for each prefix above it.
DEAR = CostModel(pair=0.5, row=0.0, call=0.0, resident=0.0, fork=2.0)
# Prices of an H200, relative to a token of Qwen3-8B.
H200 = replace(DEFAULT_COSTS, pair=6.4e-5, fork=192.0)


def _plan(batch: RolloutBatch, costs: CostModel, budget: int = 10**9) -> UpdatePlan:
    kept_S = np.ones(batch.num_sequences, np.bool_)
    return make_plan(batch, sort_sequences(batch), kept_S, budget, costs)


def _fan(prompt_tokens: int, responses: list[int]) -> RolloutBatch:
    raws = [rollout([k] * length) for k, length in enumerate(responses, 2)]
    tokens = limits(vocab_size=len(responses) + 2, max_sequence_tokens=10**6)
    return validate_groups([group([1] * prompt_tokens, raws)], tokens)


def test_sharing_stops_where_forks_cost_more_than_the_prefix() -> None:
    """A prompt of 4 saves 4 and 10 pairs (5); responses cost their own tokens."""
    assert _plan(_fan(4, [9, 9, 9]), DEAR).unshared == ()
    assert _plan(_fan(4, [10, 10, 10]), DEAR).unshared == (1, 2)
    assert _plan(_fan(4, [10, 10, 10]), DEAR).packed_tokens == 42
    # If a long and a short one share, the short one comes to the long one.
    plan = _plan(_fan(4, [10, 2, 10, 2]), DEAR)
    assert plan.unshared == (2,)
    assert plan.packed_tokens == 4 + 12 + 4 + 12


def test_beyond_the_window_a_fork_costs_nothing() -> None:
    """As above, with layers all of which have a window: a prompt of 4 saves 4 and its pairs within
    the window, and as many tokens behind it as the window has pay for the fork."""
    near = replace(DEAR, pair=0.0, near_pair=0.5)
    # All 10 pairs, and 9 tokens at most.
    assert _plan(_fan(4, [100] * 3), replace(near, window=9)).unshared == ()
    assert _plan(_fan(4, [100] * 3), replace(near, window=10)).unshared == (1, 2)
    # 7 of the pairs, and 7.5 in all, against 2 tokens, each of which costs 3.7 or 3.8.
    for fork, unshared in ((7.4, ()), (7.6, (1, 2))):
        costs = replace(near, window=2, fork=fork)
        assert _plan(_fan(4, [100] * 3), costs).unshared == unshared


def test_what_is_not_run_does_not_part_what_is() -> None:
    """The long one between two short ones is left out: the others share."""
    batch = _fan(4, [2, 10, 2])
    kept_S = np.array([True, False, True])
    plan = make_plan(batch, sort_sequences(batch), kept_S, 10**9, DEAR)
    assert plan.unshared == ()
    assert plan.packed_tokens == 4 + 2 + 2
    assert _plan(batch, DEAR).unshared == (1,)


def test_every_prefix_above_costs() -> None:
    """The last two share a turn of 3 below a prompt of 4: the second pays for two prefixes."""
    responses = [[9] * 2, [2] * 3 + [3] * 13, [2] * 3 + [4] * 13]
    batch = validate_groups([group([1] * 4, [rollout(r) for r in responses])], limits())
    sizes = measure(batch, sort_sequences(batch))
    assert sizes.lcp.tolist() == [0, 7, 4]
    # 7 tokens and 28 pairs save 21, 13 tokens below one prefix cost 13.
    assert unshared_places(sizes, np.arange(3), DEAR).tolist() == []
    assert unshared_places(sizes, np.arange(3), replace(DEAR, fork=3.2)).tolist() == []
    assert unshared_places(sizes, np.arange(3), replace(DEAR, fork=3.3)).tolist() == [1]


def test_trained_tokens_that_are_shared_save_rows() -> None:
    responses = [[2] * 3 + [3] * 9, [2] * 3 + [4] * 9]
    batch = validate_groups([group([1], [rollout(r) for r in responses])], limits())
    # 4 tokens and 10 pairs save 9, 9 tokens cost 9.9.
    costs = replace(DEAR, fork=2.2)
    assert _plan(batch, costs).unshared == (1,)
    assert _plan(batch, replace(costs, row=0.4)).unshared == ()


@pytest.mark.parametrize("prompt", [64, 200, 1000, 5059])
@pytest.mark.parametrize("response", [16, 200, 1024, 4096])
@pytest.mark.parametrize("count", [2, 8, 32])
def test_usual_groups_are_always_shared(prompt: int, response: int, count: int) -> None:
    plan = _plan(_fan(prompt, [response] * count), H200)
    assert plan.unshared == ()
    assert plan.packed_tokens == prompt + response * count


def test_a_few_tokens_of_long_responses_are_not_shared() -> None:
    plan = _plan(_fan(8, [4096] * 4), H200)
    assert plan.unshared == (1, 2, 3)
    assert plan.packed_tokens == plan.unshared_tokens == 4 * (8 + 4096)
    # On a device without tiles they are.
    assert _plan(_fan(8, [4096] * 4), DEFAULT_COSTS).unshared == ()


@CHECKED
@given(batch=batches(), budget=st.integers(1, 40), fork=st.sampled_from([0.5, 2.0, 50.0]))
def test_a_gated_plan_is_of_what_is_run(batch: RolloutBatch, budget: int, fork: float) -> None:
    plan = _plan(batch, replace(DEAR, fork=fork), budget)
    assert journaled(plan) == plan
    prefixes = share_as_planned(sort_sequences(batch), plan.unshared)
    pairs = 0
    for part in plan.micro_batches:
        forest = build_forest(batch, prefixes, np.array(part.sequences))
        assert forest.num_tokens == part.packed_tokens
        depth = forest.node_depth + forest.node_stop - forest.node_start
        pairs += int((depth * (depth + 1) - forest.node_depth * (forest.node_depth + 1)).sum()) // 2
        for s, node, length in zip(
            part.sequences, forest.sequence_node, forest.sequence_length, strict=True
        ):
            path: list[int] = []
            while node >= 0:
                below = slice(forest.node_start[node], forest.node_stop[node])
                path = forest.tokens[below].tolist() + path
                node = forest.node_parent[node]
            assert path[:length] == batch.sequence_tokens(s).tolist()
    assert pairs == plan.packed_pairs
    assert plan.packed_tokens <= plan.unshared_tokens
    shared = _plan(batch, replace(DEAR, fork=0.0), budget)
    assert shared.unshared == ()
