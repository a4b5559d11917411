"""The order in which the ranks of a policy send the gradients of decoder layers to their owners.

All ranks compute it from the plan. It decides which rank waits for which, and in which order an
owner adds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ratoon.planner.waves import runs_of
from ratoon.rollout.packed import MicroBatch, UpdatePlan

# Time of a backward, in forwards.
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
    """Steps of turns that are taken together, at most one per rank, ordered by rank.

    Steps are in the order in which backwards would reach them if all ranks processed tokens equally
    fast, so a rank with more micro-batches, or shorter ones, hardly waits for the others. Each
    rank's turns are in the order of slots. A rank that runs fewer backwards than planned (a stage
    that predicts nothing has none) leaves its last turns unused.
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
    """The time at which a rank reaches each slot, in tokens times layers."""
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
    """The tokens of each forward and backward of a micro-batch, in order."""
    if not micro_batch.stages:
        yield micro_batch.packed_tokens, False
        yield micro_batch.packed_tokens, True
    for index, is_backward in runs_of(micro_batch.stages):
        yield micro_batch.stages[index].num_tokens, is_backward
