"""In which order gradients of layers go to their owners, so that no rank waits for long."""

from __future__ import annotations

from itertools import pairwise
from operator import mul

import numpy as np
import pytest

from ratoon.rollout.packed import MicroBatch, Stage, UpdatePlan
from ratoon.train.ranks.exchange import Turn, turns_of

_LAYERS = 36


def _plan(*tokens_by_rank: tuple[int, ...], stages: tuple[Stage, ...] = ()) -> UpdatePlan:
    """Micro-batches of so many packed tokens, of each rank; the first of rank 0 in `stages`."""
    parts = [
        MicroBatch(sequences=(), packed_tokens=tokens, rank=rank)
        for rank, own in enumerate(tokens_by_rank)
        for tokens in own
    ]
    if stages:
        parts[0] = MicroBatch(sequences=(), packed_tokens=parts[0].packed_tokens, stages=stages)
    counts = dict.fromkeys(("unshared_tokens", "packed_tokens", "replicated_pairs"), 0)
    return UpdatePlan(micro_batches=tuple(parts), micro_batch_tokens=1, packed_pairs=0, **counts)


def _slots(steps: list[tuple[Turn, ...]], rank: int) -> list[int]:
    return [turn.slot for step in steps for turn in step if turn.rank == rank]


@pytest.mark.parametrize("tokens", [((5,), (7, 3), ()), ((1, 1, 1, 9), (2,)), ((4,),), ((), ())])
def test_every_rank_takes_its_layers_in_order_and_one_at_a_time(
    tokens: tuple[tuple[int, ...], ...],
) -> None:
    steps = turns_of(_plan(*tokens), len(tokens), 3)
    for rank, own in enumerate(tokens):
        assert _slots(steps, rank) == list(range(3 * len(own)))
    for step in steps:
        ranks = [turn.rank for turn in step]
        assert ranks == sorted(set(ranks))
        assert all(turn.layer == 2 - turn.slot % 3 for turn in step)


def test_ranks_with_much_the_same_take_all_turns_together() -> None:
    steps = turns_of(_plan((100, 90), (98, 95), (101, 88)), 3, 4)
    assert [len(step) for step in steps] == [3] * 8


def test_a_rank_of_short_micro_batches_does_not_wait_for_the_other_s_long_one() -> None:
    """Four of them are through before the long one's backward begins, but for their last."""
    steps = turns_of(_plan((10, 10, 10, 10), (40,)), 2, 2)
    before = [step for step in steps if all(turn.rank == 0 for turn in step)]
    assert len(before) >= 6
    # When a rank gets to a slot, in tokens times layers: no turn comes after a later one.
    reached = {0: [10 * 2 + 20, 60, 100, 120, 160, 180, 220, 240], 1: [160, 240]}
    first = [min(reached[turn.rank][turn.slot] for turn in step) for step in steps]
    assert all(one <= two for one, two in pairwise(first))


def _seconds(
    steps: list[tuple[Turn, ...]], tokens: list[list[int]], speeds: list[list[float]]
) -> float:
    """Until all turns are taken, over the longest rank's own time: backwards of `_LAYERS` layers
    that may be two layers ahead, and an exchange that takes no time but waits for all in it."""
    taken: list[list[float]] = [[] for _ in tokens]
    reached, clock = [0.0] * len(tokens), 0.0
    for step in steps:
        for turn in step:
            rank, (part, layer) = turn.rank, divmod(turn.slot, _LAYERS)
            work = tokens[rank][part] * speeds[rank][part]
            waits = taken[rank][turn.slot - 3] if turn.slot > 2 else 0.0
            forward = 0.0 if layer else work * _LAYERS
            reached[rank] = max(reached[rank], waits) + forward + 2 * work
        clock = max(clock, *(reached[turn.rank] for turn in step))
        for turn in step:
            taken[turn.rank].append(clock)
    alone = [3 * _LAYERS * sum(map(mul, *each)) for each in zip(tokens, speeds, strict=True)]
    return clock / max(alone)


@pytest.mark.parametrize(("spread", "most"), [(0.0, 1.001), (0.05, 1.08)])
def test_eight_ranks_of_unequal_micro_batches_hardly_wait(spread: float, most: float) -> None:
    """Each rank has four micro-batches, with equal sums; in rounds they would wait for half as long
    as they run. `spread`: how far a micro-batch's time is from its tokens."""
    rng = np.random.default_rng(0)
    tokens: list[list[int]] = [[] for _ in range(8)]
    for size in sorted(rng.lognormal(0.0, 0.5, 32) * 20_000, reverse=True):
        min(tokens, key=sum).append(int(size))
    for own in tokens:
        rng.shuffle(own)
    speeds = [rng.normal(1.0, spread, len(own)).tolist() for own in tokens]
    plan = _plan(*(tuple(own) for own in tokens))
    assert _seconds(turns_of(plan, 8, _LAYERS), tokens, speeds) < most
    rounds = [
        tuple(
            Turn(rank=rank, slot=slot, layer=_LAYERS - 1 - slot % _LAYERS)
            for rank, own in enumerate(tokens)
            if slot < _LAYERS * len(own)
        )
        for slot in range(_LAYERS * max(map(len, tokens)))
    ]
    assert _seconds(rounds, tokens, speeds) > 1.5


def test_a_streamed_micro_batch_has_a_backward_per_stage_and_its_prefix_the_last() -> None:
    """0 -> (1, 2), beside a rank that is through with its own before the second wave ends."""
    stages = (
        Stage(start=0, stop=10, parent=-1),
        Stage(start=10, stop=15, parent=0),
        Stage(start=15, stop=20, parent=0),
    )
    steps = turns_of(_plan((20,), (5,), stages=stages), 2, 1)
    assert _slots(steps, 0) == [0, 1, 2]
    # Rank 1 is through at 15 tokens, rank 0 at 25, 40 and 60.
    assert [turn.rank for step in steps for turn in step] == [0, 1, 0, 0]
