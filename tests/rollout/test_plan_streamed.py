"""Which groups over the budget a plan streams, and how stages are journaled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratoon.planner.costs import (
    DEFAULT_COSTS,
    NO_LIMITS,
    NOTHING_AGAIN,
    CostModel,
    Recompute,
    TokenLimits,
    Work,
    measure,
)
from ratoon.planner.plan import Devices, draft_plan
from ratoon.planner.waves import fits_forest, peak_tokens
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.forest import build_forest
from ratoon.rollout.packed import Stage, UpdatePlan
from ratoon.rollout.prefixes import sort_sequences
from ratoon.rollout.validate import validate_groups
from tests.builders import group, limits, rollout
from tests.plans import journaled, make_plan
from tests.rollout import oracle
from tests.rollout.strategies import CHECKED, batches

# A forward costs two tokens.
CHEAP = CostModel(pair=0.0, row=0.0, call=2.0, resident=0.0)


def _plan(batch: RolloutBatch, budget: int, costs: CostModel = CHEAP) -> UpdatePlan:
    kept_S = np.ones(batch.num_sequences, np.bool_)
    return make_plan(batch, sort_sequences(batch), kept_S, budget, costs)


def _fan(prompt_tokens: int, num_responses: int, response_tokens: int) -> RolloutBatch:
    responses = [rollout([k] * response_tokens) for k in range(2, 2 + num_responses)]
    return validate_groups([group([1] * prompt_tokens, responses)], limits())


@CHECKED
@given(batch=batches(), budget=st.integers(1, 40), call=st.sampled_from([0.0, 1.0, 3.0]))
def test_a_plan_is_within_the_budget_and_survives_the_journal(
    batch: RolloutBatch, budget: int, call: float
) -> None:
    plan = _plan(batch, budget, replace(CHEAP, call=call))
    prefixes = sort_sequences(batch)
    for part in plan.micro_batches:
        forest = build_forest(batch, prefixes, np.array(part.sequences))
        assert forest.num_tokens == part.packed_tokens
        assert not part.stages or fits_forest(part.stages, forest)
        longest = int(forest.sequence_length.max())
        assert (peak_tokens(part.stages) or part.packed_tokens) <= max(budget, longest)
    held = sorted(s for part in plan.micro_batches for s in part.sequences)
    assert held == [s for s in range(batch.num_sequences) if len(batch.sequence_tokens(s))]
    assert journaled(plan) == plan


@CHECKED
@given(batch=batches(), budget=st.integers(1, 40))
def test_streamed_groups_run_each_of_their_tokens_once(batch: RolloutBatch, budget: int) -> None:
    """Where a forward is free, whatever does not fit is streamed: groups repeat nothing."""
    plan = _plan(batch, budget, replace(CHEAP, call=0.0))
    for g in range(batch.num_groups):
        members = {
            s
            for s in range(batch.num_sequences)
            if oracle.group_of(batch, s) == g and len(batch.sequence_tokens(s))
        }
        holding = [part for part in plan.micro_batches if members & set(part.sequences)]
        own = [oracle.num_packed(batch, members & set(part.sequences)) for part in holding]
        assert sum(own) == oracle.num_packed(batch, members)


def test_a_long_prompt_is_streamed() -> None:
    plan = _plan(_fan(10, 4, 5), 20)
    (part,) = plan.micro_batches
    assert part.stages == (
        Stage(start=0, stop=10, parent=-1),
        Stage(start=10, stop=20, parent=0),
        Stage(start=20, stop=30, parent=0),
    )
    assert plan.packed_tokens == 30
    assert plan.packed_pairs == oracle.num_packed_pairs(_fan(10, 4, 5), range(4))


def test_a_short_prompt_is_repeated() -> None:
    """Cut: two calls and 2 * (1 + 10) tokens; streamed, of 11 at a time: three and 21."""
    plan = _plan(_fan(1, 4, 5), 11)
    assert [part.stages for part in plan.micro_batches] == [(), ()]
    assert plan.packed_tokens == 22


def test_what_prefixes_cost_decides() -> None:
    batch = _fan(10, 4, 5)
    assert _plan(batch, 20).micro_batches[0].stages
    # Streaming saves 10 tokens and costs a call of 2; against 10 resident tokens, twice.
    assert not _plan(batch, 20, replace(CHEAP, resident=0.5)).micro_batches[0].stages
    assert _plan(batch, 20, replace(CHEAP, resident=0.3)).micro_batches[0].stages


def test_subtrees_are_run_each_in_its_own_way() -> None:
    """One token is shared by all; below it one long turn with three answers, and two short ones."""
    long_turn = [[2] * 12 + [k] * 6 for k in (3, 4, 5)]
    batch = validate_groups(
        [group([1], [rollout(r) for r in [*long_turn, [6] * 4, [7] * 4]])], limits()
    )
    # To stay with the shared token as a prefix would cost a call of its own.
    plan = _plan(batch, 26)
    parts = {part.sequences: len(part.stages) for part in plan.micro_batches}
    assert parts == {(0, 1, 2): 3, (3, 4): 0}
    assert plan.packed_tokens == (1 + 12 + 18) + (1 + 8)


def test_a_streamed_group_shares_no_micro_batch() -> None:
    batch = validate_groups(
        [
            group([1] * 10, [rollout([k] * 5) for k in range(2, 6)], "streamed"),
            group([1] * 9 + [7], [rollout([8])], "other"),
        ],
        limits(),
    )
    parts = [(part.sequences, len(part.stages)) for part in _plan(batch, 20).micro_batches]
    assert sorted(parts) == [((0, 1, 2, 3), 3), ((4,), 0)]


def test_work_counts_what_is_packed() -> None:
    raws = [
        rollout([2, 3, 4]),
        rollout([2, 3, 5, 6], loss_mask=np.array([False, True, False, True])),
    ]
    batch = validate_groups([group([1, 1], raws)], limits())
    prefixes = sort_sequences(batch)
    work = measure(batch, prefixes).work(np.arange(2))
    assert work == Work(tokens=7, pairs=oracle.num_packed_pairs(batch, range(2)), rows=4)


@CHECKED
@given(batch=batches(), budget=st.integers(1, 40), window=st.integers(1, 12))
def test_a_plan_costs_the_pairs_within_the_window(
    batch: RolloutBatch, budget: int, window: int
) -> None:
    """A token has what its path has of the window, however its micro-batch came to be: the first
    tokens of short sequences were priced as if they saw a whole window."""
    costs = CostModel(
        pair=0.0, near_pair=1.0, window=window, token=0.5, row=0.0, call=0.0, resident=0.0
    )
    prefixes, kept_S = sort_sequences(batch), np.ones(batch.num_sequences, np.bool_)
    draft = draft_plan(batch, prefixes, kept_S, Devices(candidates=(budget,), costs=costs))
    parts = draft.plan.micro_batches
    pairs = sum(oracle.num_packed_pairs(batch, part.sequences, window) for part in parts)
    assert draft.cost == 0.5 * draft.plan.packed_tokens + pairs


def test_costs_by_hand() -> None:
    work = Work(tokens=100, pairs=1000, rows=50)
    costs = CostModel(pair=0.01, row=0.1, call=7.0, resident=0.5)
    stages = (
        Stage(start=0, stop=10, parent=-1),
        Stage(start=10, stop=30, parent=0),
        Stage(start=30, stop=60, parent=1),
        Stage(start=60, stop=100, parent=0),
    )
    assert costs.packed(work) == 7 + 100 + 10 + 5
    # Resident: 0, 10, 30, 10.
    assert costs.streamed(work, stages) == 4 * 7 + 115 + 0.5 * 50
    assert costs.streamed(work, stages[:1]) == costs.packed(work)


def test_running_again_is_between_what_was_told() -> None:
    again = Recompute(held=(10, 20, 40), cost=(0.0, 1.0, 5.0), stack_share=0.01, host_tokens=0)
    prices = [again.of(tokens, is_streamed=False) for tokens in (1, 10, 15, 20, 30, 40, 99)]
    assert prices == [0, 0, 0.5, 1, 3, 5, 5]
    # With 20 held in stages, a fifth of the memory is their stacks', as if 25 were held.
    assert again.of(20, is_streamed=True) == pytest.approx(2.0)
    assert again.of(100, is_streamed=True) == 5
    assert NOTHING_AGAIN.of(10**9, is_streamed=True) == 0


def test_what_waits_on_the_host_runs_again_and_what_runs_has_the_room() -> None:
    again = Recompute(held=(10, 20, 40), cost=(0.0, 1.0, 5.0), stack_share=0.0, host_tokens=0)
    stages = (
        Stage(start=0, stop=10, parent=-1),
        Stage(start=10, stop=15, parent=0),
        Stage(start=15, stop=30, parent=1),
        Stage(start=30, stop=40, parent=0),
    )
    # 30 are held at a time, of which 15 wait.
    assert [replace(again, host_tokens=n).of_stages(stages) for n in (0, 14)] == [3.0, 3.0]
    # The 15 keep the least; waves of 15 and 10 what the larger one can.
    expected = (15 * 5.0 + 25 * 0.5) / 40
    assert replace(again, host_tokens=15).of_stages(stages) == pytest.approx(expected)
    # As much of the memory as 25 more tokens is the stacks' of the 30.
    share = replace(again, host_tokens=15, stack_share=1 / 60)
    assert share.of_stages(stages) == pytest.approx((15 * 5.0 + 25 * 3.0) / 40)
    # Nothing goes where all is kept.
    assert replace(again, held=(30, 31, 32), host_tokens=15).of_stages(stages) == 0
    assert replace(again, host_tokens=99).of_stages(stages[:1]) == again.of(10, is_streamed=False)


def test_what_runs_again_decides_between_holding_and_streaming() -> None:
    """At once 30 tokens are held and each costs one more; streamed, 20, and two calls of two."""
    batch = _fan(10, 4, 5)
    again = Recompute(held=(20, 30), cost=(0.0, 1.0), stack_share=0.0, host_tokens=0)
    kept_S, prefixes = np.ones(4, np.bool_), sort_sequences(batch)
    for costs, tokens in ((CHEAP, 30), (replace(CHEAP, recompute=again), 20)):
        plan = make_plan(batch, prefixes, kept_S, (20, 30, 50), costs, NO_LIMITS)
        assert plan.micro_batch_tokens == tokens
        assert bool(plan.micro_batches[0].stages) == (tokens == 20)


def test_limits_of_streams_are_kept_where_another_cut_fits() -> None:
    batch = _fan(10, 4, 5)
    kept_S, prefixes = np.ones(4, np.bool_), sort_sequences(batch)
    for streamed, is_streamed in ((15, True), (14, False)):
        limits_of = TokenLimits(at_once=20, streamed=streamed)
        plan = make_plan(batch, prefixes, kept_S, 30, CHEAP, limits_of)
        assert bool(plan.micro_batches[0].stages) == is_streamed
        held = [peak_tokens(part.stages) or part.packed_tokens for part in plan.micro_batches]
        assert max(held) == (15 if is_streamed else 20)


def test_states_that_stages_hand_on_leave_less_room() -> None:
    """The prompt's: with room for 22 tokens, waves of two responses are 20 and a state is 2."""
    batch = _fan(10, 4, 5)
    kept_S, prefixes = np.ones(4, np.bool_), sort_sequences(batch)
    for of_state, held in ((0, 20), (2, 20), (3, 15), (8, 20)):
        limits_of = TokenLimits(at_once=20, streamed=22, of_state=of_state)
        plan = make_plan(batch, prefixes, kept_S, 22, CHEAP, limits_of)
        (stages, *others) = (part.stages for part in plan.micro_batches)
        assert bool(stages) == (of_state < 8)
        found = max(peak_tokens(part.stages) or part.packed_tokens for part in plan.micro_batches)
        assert (found, bool(others)) == (held, of_state == 8)


def test_default_costs_stream_a_large_group_and_not_a_small_one() -> None:
    """32 responses of 100 tokens to a prompt of 500; and of 10 tokens to one of 2."""
    assert _plan(_fan(500, 32, 100), 1000, DEFAULT_COSTS).micro_batches[0].stages
    plan = _plan(_fan(2, 32, 10), 100, DEFAULT_COSTS)
    assert not any(part.stages for part in plan.micro_batches)
