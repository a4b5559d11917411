"""In which order the ranks of a policy hand the gradients of decoder layers to their owners.

All ranks know the plan, and so this order: it decides who waits for whom, and in which order an
owner adds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ratoon.rollout.packed import MicroBatch, UpdatePlan
from ratoon.rollout.waves import runs_of

# A backward takes as long as so many forwards.
_BACKWARD_COST = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A rank's gradients of one layer in one of its backwards.

    `slot` counts the layers of all of its backwards, each from the last layer down.
    """

    rank: int
    slot: int
    layer: int


def turns_of(plan: UpdatePlan, num_ranks: int, num_layers: int) -> list[tuple[Turn, ...]]:
    """Turns that are taken together, at most one per rank, by rank; each rank's by their slots.

    In the order in which backwards get there if ranks are as fast as one another, by tokens: so
    whoever has more micro-batches, or shorter ones, hardly waits for the others. A rank that has
    fewer backwards than planned, as a stage that nothing is predicted from has none, leaves turns
    over at its end.
    """
    timed = sorted(
        (time, rank, slot)
        for rank in range(num_ranks)
        for slot, time in enumerate(_times(plan.of_rank(rank).micro_batches, num_layers))
    )
    steps: list[list[Turn]] = [[]]
    for _, rank, slot in timed:
        if any(turn.rank == rank for turn in steps[-1]):
            steps.append([])
        layer = num_layers - 1 - slot % num_layers
        steps[-1].append(Turn(rank=rank, slot=slot, layer=layer))
    return [tuple(sorted(step, key=lambda turn: turn.rank)) for step in steps if step]


def _times(micro_batches: tuple[MicroBatch, ...], num_layers: int) -> Iterator[int]:
    """When a rank gets to each slot, in tokens times layers."""
    now = 0
    for micro_batch in micro_batches:
        for tokens, is_backward in _runs(micro_batch):
            if is_backward:
                for _ in range(num_layers):
                    now += _BACKWARD_COST * tokens
                    yield now
            else:
                now += tokens * num_layers


def _runs(micro_batch: MicroBatch) -> Iterator[tuple[int, bool]]:
    """Tokens of each forward and backward."""
    if not micro_batch.stages:
        yield micro_batch.packed_tokens, False
        yield micro_batch.packed_tokens, True
    for index, is_backward in runs_of(micro_batch.stages):
        yield micro_batch.stages[index].num_tokens, is_backward
