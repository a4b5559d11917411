"""Plans of batches by one line, for tests of every room. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ratoon.engine.journal.codec import from_text, to_text
from ratoon.planner.costs import DEFAULT_COSTS, NO_LIMITS, CostModel, TokenLimits
from ratoon.planner.plan import Devices, draft_plan
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.packed import MicroBatch, Stage, UpdatePlan
from ratoon.rollout.prefixes import SortedPrefixes

# No field has its default.
PLAN = UpdatePlan(
    micro_batches=(
        MicroBatch(
            sequences=(0, 2, 3),
            packed_tokens=9,
            stages=(Stage(start=0, stop=4, parent=-1), Stage(start=4, stop=9, parent=0)),
        ),
        MicroBatch(sequences=(1,), packed_tokens=5, rank=2),
    ),
    micro_batch_tokens=8,
    unshared_tokens=20,
    packed_tokens=14,
    replicated_pairs=60,
    packed_pairs=50,
    unshared=(2,),
    rank_gap=0.25,
    sequence_ranks=2,
)


def make_plan(
    batch: RolloutBatch,
    prefixes: SortedPrefixes,
    is_run_S: NDArray[np.bool_],
    tokens: int | Sequence[int],
    costs: CostModel = DEFAULT_COSTS,
    limits: TokenLimits = NO_LIMITS,
    *,
    num_ranks: int = 1,
) -> UpdatePlan:
    """The plan of `draft_plan`; `tokens` of a micro-batch, or several to choose from."""
    candidates = (tokens,) if isinstance(tokens, int) else tuple(tokens)
    devices = Devices(candidates=candidates, costs=costs, limits=limits)
    return draft_plan(batch, prefixes, is_run_S, devices, num_ranks=num_ranks).plan


def journaled(plan: UpdatePlan) -> UpdatePlan:
    """The plan as the journal gives it back."""
    found = from_text(to_text(plan))
    assert isinstance(found, UpdatePlan)
    return found
