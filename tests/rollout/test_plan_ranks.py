"""Plans of several ranks: still partitions, evenly loaded; groups are split where that pays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratoon.planner import spread
from ratoon.planner.costs import DEFAULT_COSTS, NO_LIMITS, CostModel, SequenceSizes, measure
from ratoon.planner.plan import share_as_planned
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.forest import build_forest
from ratoon.rollout.packed import UpdatePlan
from ratoon.rollout.prefixes import sort_sequences
from ratoon.rollout.validate import validate_groups
from tests.builders import group, limits, rollout
from tests.plans import journaled, make_plan
from tests.rollout import oracle
from tests.rollout.strategies import CHECKED, batches, kept_masks

# Tokens alone cost anything.
TOKENS = CostModel(pair=0.0, row=0.0, call=0.0, resident=0.0)
COSTS = CostModel(pair=0.01, row=0.1, call=2.0, resident=0.1)
GATED = replace(COSTS, fork=3.0)
WHOLE = 10**6


def _plan(
    batch: RolloutBatch, num_ranks: int, costs: CostModel = TOKENS, budget: int = WHOLE
) -> UpdatePlan:
    kept_S = np.ones(batch.num_sequences, np.bool_)
    return make_plan(batch, sort_sequences(batch), kept_S, budget, costs, num_ranks=num_ranks)


def _rank_costs(
    batch: RolloutBatch, plan: UpdatePlan, num_ranks: int, costs: CostModel
) -> list[float]:
    prefixes = share_as_planned(sort_sequences(batch), plan.unshared)
    sizes: SequenceSizes = measure(batch, prefixes)
    loads = [0.0] * num_ranks
    for part in plan.micro_batches:
        work = sizes.work(np.sort(prefixes.rank[list(part.sequences)]))
        loads[part.rank] += costs.streamed(work, part.stages) if part.stages else costs.packed(work)
    return loads


def _groups(*shapes: tuple[int, list[int]]) -> RolloutBatch:
    """Groups with no common token, of prompt and response lengths."""
    vocab = sum(1 + len(responses) for _, responses in shapes)
    ids = iter(range(vocab))
    groups = [
        group([next(ids)] * prompt, [rollout([next(ids)] * n) for n in responses], f"group-{g}")
        for g, (prompt, responses) in enumerate(shapes)
    ]
    return validate_groups(groups, limits(vocab_size=vocab, max_sequence_tokens=10**6))


def _ranks_of_groups(batch: RolloutBatch, plan: UpdatePlan) -> list[set[int]]:
    return [
        {
            part.rank
            for part in plan.micro_batches
            for s in part.sequences
            if oracle.group_of(batch, s) == g
        }
        for g in range(batch.num_groups)
    ]


@CHECKED
@given(
    data=st.data(),
    num_ranks=st.integers(1, 9),
    budget=st.integers(1, 60),
    costs=st.sampled_from([TOKENS, COSTS, GATED]),
)
def test_ranks_run_each_sequence_once(
    data: st.DataObject, num_ranks: int, budget: int, costs: CostModel
) -> None:
    batch = data.draw(batches())
    kept_S = data.draw(kept_masks(batch))
    prefixes = sort_sequences(batch)
    candidates = (budget, 2 * budget)
    plan = make_plan(batch, prefixes, kept_S, candidates, costs, NO_LIMITS, num_ranks=num_ranks)
    run = sorted(s for part in plan.micro_batches for s in part.sequences)
    assert run == [s for s in np.flatnonzero(kept_S).tolist() if len(batch.sequence_tokens(s))]
    ranks = [part.rank for part in plan.micro_batches]
    assert ranks == sorted(ranks)
    assert set(ranks) <= set(range(num_ranks))
    planned = share_as_planned(prefixes, plan.unshared)
    for part in plan.micro_batches:
        forest = build_forest(batch, planned, np.array(part.sequences))
        assert forest.num_tokens == part.packed_tokens
    assert plan.packed_tokens == sum(part.packed_tokens for part in plan.micro_batches)
    assert journaled(plan) == plan
    again = make_plan(batch, prefixes, kept_S, candidates, costs, NO_LIMITS, num_ranks=num_ranks)
    assert again == plan

    one = make_plan(batch, prefixes, kept_S, candidates, costs, NO_LIMITS)
    loads = _rank_costs(batch, plan, num_ranks, costs)
    assert max(loads) <= sum(_rank_costs(batch, one, 1, costs)) * (1 + 1e-9)
    assert plan.unshared == one.unshared
    assert plan.unshared_tokens == one.unshared_tokens
    if run:
        gap = max(loads) / (sum(loads) / num_ranks) - 1
        assert plan.rank_gap == pytest.approx(gap, abs=1e-9)
    if num_ranks == 1:
        assert plan == one


@CHECKED
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 20), st.lists(st.integers(1, 40), min_size=1, max_size=4)),
        min_size=1,
        max_size=12,
    ),
    num_ranks=st.integers(2, 6),
)
def test_the_longest_rank_is_no_longer_than_costliest_first(
    shapes: list[tuple[int, list[int]]], num_ranks: int
) -> None:
    batch = _groups(*shapes)
    plan = _plan(batch, num_ranks)
    tokens = sorted((prompt + sum(responses) for prompt, responses in shapes), reverse=True)
    greedy = [0] * num_ranks
    for count in tokens:
        greedy[greedy.index(min(greedy))] += count
    loads = _rank_costs(batch, plan, num_ranks, TOKENS)
    # Runs that are even enough are not compared with it.
    assert max(loads) <= max(*greedy, sum(loads) / num_ranks * 1.002) + 1e-6


def test_a_lone_group_is_split_evenly() -> None:
    batch = _groups((100, [50] * 32))
    plan = _plan(batch, 4)
    assert [part.packed_tokens for part in plan.micro_batches] == [100 + 8 * 50] * 4
    assert [part.rank for part in plan.micro_batches] == [0, 1, 2, 3]
    assert plan.rank_gap == 0.0
    assert plan.packed_tokens == 4 * 100 + 32 * 50
    assert plan.unshared_tokens == 32 * 150


def test_a_group_that_is_nearly_all_prompt_stays_whole() -> None:
    plan = _plan(_groups((1000, [2] * 4)), 4)
    assert [part.rank for part in plan.micro_batches] == [0]
    assert plan.packed_tokens == 1008
    assert plan.rank_gap == pytest.approx(3.0)


def test_a_giant_group_is_split_beside_small_ones() -> None:
    batch = _groups((100, [100] * 32), *[(20, [20] * 4)] * 8)
    plan = _plan(batch, 4)
    giant, *small = _ranks_of_groups(batch, plan)
    assert len(giant) > 1
    assert all(len(ranks) == 1 for ranks in small)
    loads = _rank_costs(batch, plan, 4, TOKENS)
    # 4,100 tokens in all, and a prompt of 100 again on three ranks.
    assert max(loads) <= 1.05 * (4100 + 300) / 4


def test_groups_that_can_be_even_are_not_split() -> None:
    batch = _groups(*[(10, [30] * 4)] * 8)
    plan = _plan(batch, 4)
    assert all(len(ranks) == 1 for ranks in _ranks_of_groups(batch, plan))
    assert plan.rank_gap == 0.0
    assert plan.packed_tokens == _plan(batch, 1).packed_tokens


def test_a_group_is_split_at_the_cheapest_fork() -> None:
    """Two turns of 60 tokens, each with three answers of 20, below a prompt of 3: split between the
    turns, 3 tokens are repeated; anywhere else 63."""
    answers = [[turn] * 60 + [leaf] * 20 for turn in (2, 3) for leaf in (4, 5, 6)]
    batch = validate_groups([group([1] * 3, [rollout(r) for r in answers])], limits())
    plan = _plan(batch, 2)
    assert [part.sequences for part in plan.micro_batches] == [(0, 1, 2), (3, 4, 5)]
    assert plan.packed_tokens == 2 * (3 + 60 + 3 * 20)


def test_groups_that_share_a_prompt_stay_together_where_loads_are_even() -> None:
    prompts = [[k] * 40 for k in (1, 2, 1, 2)]
    batch = validate_groups(
        [
            group([*prompt, 3 + g], [rollout([4] * 9), rollout([5] * 9)], f"group-{g}")
            for g, prompt in enumerate(prompts)
        ],
        limits(),
    )
    plan = _plan(batch, 2)
    assert [part.sequences for part in plan.micro_batches] == [(0, 1, 4, 5), (2, 3, 6, 7)]


def test_uneven_responses_of_one_group_are_evened_out() -> None:
    """In sorted order the long ones are neighbours."""
    batch = _groups((10, [90, 90, 90, 90, 10, 10, 10, 10]))
    loads = _rank_costs(batch, _plan(batch, 4), 4, TOKENS)
    assert loads == [110.0] * 4


def test_more_ranks_than_sequences_leaves_some_without_work() -> None:
    batch = _groups((1, [50, 50]))
    plan = _plan(batch, 5)
    assert [part.rank for part in plan.micro_batches] == [0, 1]
    assert plan.of_rank(1).micro_batches == plan.micro_batches[1:]
    assert plan.of_rank(4).micro_batches == ()
    assert plan.of_rank(4).packed_tokens == plan.packed_tokens == 102
    assert plan.rank_gap == pytest.approx(1.5)


def test_nothing_to_run_is_a_plan_of_nothing_on_all_ranks() -> None:
    batch = _groups((1, [5]), (1, [5]))
    kept_S = np.zeros(2, np.bool_)
    plan = make_plan(batch, sort_sequences(batch), kept_S, 9, num_ranks=3)
    assert plan.micro_batches == ()
    assert plan.rank_gap == 0.0


@pytest.mark.parametrize("budget", [100, 2000, 100_000])
def test_many_uneven_groups_are_within_two_percent(budget: int) -> None:
    rng = np.random.default_rng(0)
    batch = _groups(
        *(
            (int(prompt), np.maximum(1, rng.lognormal(3, 1, 12)).astype(int).tolist())
            for prompt in rng.lognormal(4, 1, 32)
        )
    )
    plan = _plan(batch, 4, replace(DEFAULT_COSTS, call=5.0), budget)
    assert plan.rank_gap < 0.02
    assert plan.packed_tokens < 1.05 * _plan(batch, 1, DEFAULT_COSTS, budget).packed_tokens


def _uneven(num_groups: int) -> RolloutBatch:
    rng = np.random.default_rng(0)
    prompts = rng.lognormal(4, 1, num_groups)
    lengths = [np.maximum(1, rng.lognormal(3, 1, 12)).astype(int).tolist() for _ in prompts]
    return _groups(*((int(p), each) for p, each in zip(prompts, lengths, strict=True)))


@pytest.mark.parametrize(("num_tried", "gap"), [(spread._MAX_ATOMS, 0.003), (16, 0.01)])
def test_moves_are_looked_for_among_as_many_atoms_at_most(
    monkeypatch: pytest.MonkeyPatch, num_tried: int, gap: float
) -> None:
    monkeypatch.setattr(spread, "_MAX_ATOMS", num_tried)
    batch, costs = _uneven(60), replace(DEFAULT_COSTS, call=5.0)
    assert _plan(batch, 8, costs, 2000).rank_gap < gap
    monkeypatch.setattr(spread.Balancer, "_moves", lambda _self, _longest: [])
    assert _plan(batch, 8, costs, 2000).rank_gap > 2 * gap
