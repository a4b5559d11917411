"""`draft_plan`: a partition under a budget, groups whole, counts against brute force."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratoon.errors import ErrorCode, RatoonError
from ratoon.planner.plan import check_plan
from ratoon.planner.waves import peak_tokens
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.packed import MicroBatch, Stage, UpdatePlan
from ratoon.rollout.prefixes import sort_sequences
from ratoon.rollout.validate import validate_groups
from tests.builders import group, limits, random_batch, rollout
from tests.plans import journaled, make_plan
from tests.rollout import oracle
from tests.rollout.strategies import CHECKED, batches, kept_masks


def _plan(batch: RolloutBatch, budget: int) -> UpdatePlan:
    return make_plan(batch, sort_sequences(batch), np.ones(batch.num_sequences, np.bool_), budget)


def _runnable(batch: RolloutBatch, kept: np.ndarray) -> list[int]:
    return [s for s in np.flatnonzero(kept).tolist() if len(batch.sequence_tokens(s))]


@CHECKED
@given(data=st.data(), budget=st.integers(1, 60))
def test_a_plan_is_a_partition_of_what_is_kept_under_the_budget(
    data: st.DataObject, budget: int
) -> None:
    """A group that fits is never cut apart, and counts are those of brute force."""
    batch = data.draw(batches())
    kept = data.draw(kept_masks(batch))
    plan = make_plan(batch, sort_sequences(batch), kept, budget)
    parts = [list(part.sequences) for part in plan.micro_batches]
    runnable = _runnable(batch, kept)
    assert sorted(s for part in parts for s in part) == runnable
    for part, micro_batch in zip(parts, plan.micro_batches, strict=True):
        assert part == sorted(part)
        assert part
        assert micro_batch.packed_tokens == oracle.num_packed(batch, part)
        longest = max(len(batch.sequence_tokens(s)) for s in part)
        held = peak_tokens(micro_batch.stages) or micro_batch.packed_tokens
        assert held <= max(budget, longest)
    for g in range(batch.num_groups):
        members = {s for s in runnable if oracle.group_of(batch, s) == g}
        if members and oracle.num_packed(batch, members) <= budget:
            assert sum(bool(members & set(part)) for part in parts) == 1
    lengths = [len(batch.sequence_tokens(s)) for s in runnable]
    assert plan.micro_batch_tokens == budget
    assert plan.unshared_tokens == sum(lengths)
    assert plan.replicated_pairs == sum(n * (n + 1) // 2 for n in lengths)
    assert plan.packed_tokens == sum(oracle.num_packed(batch, part) for part in parts)
    assert plan.packed_pairs == sum(oracle.num_packed_pairs(batch, part) for part in parts)
    assert journaled(plan) == plan


def test_a_batch_that_fits_is_one_micro_batch() -> None:
    batch = random_batch(np.random.default_rng(3))
    plan = _plan(batch, 1 << 20)
    assert len(plan.micro_batches) == 1
    assert plan.packed_tokens == oracle.num_packed(batch, range(batch.num_sequences))


def test_groups_that_share_a_prompt_meet_in_one_micro_batch() -> None:
    """Sorted neighbours: groups 0 and 2 share 6 tokens, 1 and 3 share 6 others."""
    prompts = [[1] * 6, [2] * 6, [1] * 6, [2] * 6]
    batch = validate_groups(
        [
            group([*prompt, 9 + g], [rollout([1]), rollout([2])], f"group-{g}")
            for g, prompt in enumerate(prompts)
        ],
        limits(),
    )
    parts = [part.sequences for part in _plan(batch, 14).micro_batches]
    assert parts == [(0, 1, 4, 5), (2, 3, 6, 7)]


def test_a_group_over_the_budget_is_cut_where_it_still_shares() -> None:
    """Requests alternate between two subtrees; each micro-batch takes one of them."""
    responses = [[k % 2] * 5 + [k] for k in range(2, 8)]
    batch = validate_groups([group([9, 9], [rollout(r) for r in responses])], limits())
    plan = _plan(batch, 10)
    assert [part.sequences for part in plan.micro_batches] == [(0, 2, 4), (1, 3, 5)]
    assert plan.packed_tokens == 20


def test_interleaved_groups_stay_whole() -> None:
    """Two groups with one prompt whose responses alternate in sorted order."""
    batch = validate_groups(
        [
            group([1, 1], [rollout([2]), rollout([4]), rollout([6])], "even"),
            group([1, 1], [rollout([3]), rollout([5]), rollout([7])], "odd"),
        ],
        limits(),
    )
    assert [part.sequences for part in _plan(batch, 7).micro_batches] == [(0, 1, 2), (3, 4, 5)]
    whole = _plan(batch, 8)
    assert [part.sequences for part in whole.micro_batches] == [(0, 1, 2, 3, 4, 5)]
    assert whole.packed_tokens == 8


def test_a_sequence_over_the_budget_runs_alone() -> None:
    batch = validate_groups([group([1], [rollout([2] * 9), rollout([3])])], limits())
    plan = _plan(batch, 4)
    assert [part.sequences for part in plan.micro_batches] == [(0,), (1,)]
    assert [part.packed_tokens for part in plan.micro_batches] == [10, 2]


def test_every_part_of_a_cut_group_fits() -> None:
    """Each part pays for the prompt again: 12 tokens of prompt, 8 a response, 30 a micro-batch."""
    responses = [[k] * 8 for k in range(20, 30)]
    batch = validate_groups([group([9] * 12, [rollout(r) for r in responses])], limits())
    plan = _plan(batch, 30)
    assert [part.packed_tokens for part in plan.micro_batches] == [28] * 5


def test_what_is_dropped_between_two_groups_is_not_shared_with() -> None:
    """Sequence 1 shares all it has with sequence 2, but is not kept; 0 and 2 share one token."""
    batch = validate_groups(
        [
            group([1, 2], [rollout([3])], "a"),
            group([1, 4], [rollout([5]), rollout([5, 5])], "b"),
        ],
        limits(),
    )
    kept = np.array([True, False, True])
    assert make_plan(batch, sort_sequences(batch), kept, 6).packed_tokens == 6
    assert len(make_plan(batch, sort_sequences(batch), kept, 5).micro_batches) == 2


def test_a_group_inside_of_another_one_ends_before_it() -> None:
    """In sorted order the first group spans the second, and reaches into the third."""
    batch = validate_groups(
        [
            group([1], [rollout([2] * 4), rollout([8] * 4)], "outer"),
            group([1], [rollout([3] * 4)], "inner"),
            group([1], [rollout([8, 8, 8, 7])], "after"),
        ],
        limits(),
    )
    assert len(_plan(batch, 14).micro_batches) == 1
    assert _plan(batch, 14).packed_tokens == oracle.num_packed(batch, range(4)) == 14
    assert len(_plan(batch, 13).micro_batches) == 2


def test_nothing_kept_is_a_plan_of_nothing() -> None:
    batch = random_batch(np.random.default_rng(0))
    plan = make_plan(batch, sort_sequences(batch), np.zeros(batch.num_sequences, np.bool_), 100)
    assert plan.micro_batches == ()
    assert (plan.unshared_tokens, plan.packed_tokens, plan.packed_pairs) == (0, 0, 0)


MANY = 2**62
# What is wrong with a plan of sequences 0 to 9 for two ranks -> what the error says.
UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "no number": ({"sequences": (0, "1")}, "batch of 10"),
    "below all": ({"sequences": (0, -1)}, "batch of 10"),
    "above all": ({"sequences": (0, 10)}, "batch of 10"),
    "twice": ({"sequences": (0, 1, 0)}, "twice"),
    "unshared below": ({"unshared": (-1,)}, "batch of 10"),
    "unshared above": ({"unshared": (10,)}, "batch of 10"),
    "unshared twice": ({"unshared": (1, 1)}, "twice"),
    "text for a count": ({"packed_tokens": "7"}, "are counts"),
    "a truth for a count": ({"packed_pairs": True}, "are counts"),
    **{
        f"gap {gap}": ({"rank_gap": gap}, "gap between ranks")
        for gap in (-0.5, "0", True, math.nan, math.inf, None)
    },
    **{
        f"rank {rank}": ({"rank": rank}, "micro-batch 0 is of rank")
        for rank in (-1, 2, "0", True, 0.5, None)
    },
    "no ranks together": ({"sequence_ranks": 0}, "together"),
    "more than there are": ({"sequence_ranks": 3}, "together"),
    "between two pairs": ({"sequence_ranks": 2, "rank": 1}, "micro-batch 0 is of rank"),
    "no tokens": ({"tokens": None}, "numbers of micro-batch 0"),
    "no stop": ({"stages": ((0, None, -1),)}, "numbers of micro-batch 0"),
    "a truth for a parent": ({"stages": ((0, 10, -1), (10, 30, True))}, "numbers of micro-batch 0"),
    "no such parent": ({"stages": ((0, 10, -2),)}, "numbers of micro-batch 0"),
    "tokens left over": ({"stages": ((0, 10, -1), (10, 20, 0))}, "stage 2 of micro-batch 0"),
    "a gap between stages": ({"stages": ((0, 10, -1), (20, 30, 0))}, "stage 1 of micro-batch 0"),
}


def _damaged(changes: dict[str, Any]) -> UpdatePlan:
    """A plan of one streamed micro-batch of 30 tokens, with some changes."""
    of_part = {"tokens": "packed_tokens", "rank": "rank", "sequences": "sequences"}
    part = {of_part[name]: value for name, value in changes.items() if name in of_part}
    stages = changes.get("stages", ((0, 10, -1), (10, 20, 0), (20, 30, 0)))
    micro_batch: dict[str, Any] = {
        "sequences": (0, 1, 2, 3),
        "packed_tokens": 30,
        "stages": tuple(Stage(start=a, stop=b, parent=c) for a, b, c in stages),
        **part,
    }
    plan: dict[str, Any] = {
        "micro_batches": (MicroBatch(**micro_batch),),
        "micro_batch_tokens": 20,
        "unshared_tokens": 60,
        "packed_tokens": 30,
        "replicated_pairs": MANY,
        "packed_pairs": MANY,
        **{name: value for name, value in changes.items() if name not in (*of_part, "stages")},
    }
    return UpdatePlan(**plan)


@pytest.mark.parametrize(("changes", "match"), UNFIT.values(), ids=UNFIT)
def test_a_plan_that_cannot_be_run_is_refused(changes: dict[str, Any], match: str) -> None:
    """As the journal gives it back, with whatever its text says."""
    check_plan(journaled(_damaged({})), num_sequences=10, num_ranks=2)
    with pytest.raises(RatoonError, match=match) as caught:
        check_plan(journaled(_damaged(changes)), num_sequences=10, num_ranks=2)
    assert caught.value.code is ErrorCode.INTERNAL
