"""The plans of one policy's updates: what its device holds, and what running costs there.

No batch is refused for its size where another way to cut it fits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ratoon.model.activation_plan import DecoderSizes
from ratoon.model.device_costs import DeviceRates, device_costs, with_recompute
from ratoon.model.token_limits import candidate_tokens, token_limits
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.costs import DEFAULT_COSTS, CostModel
from ratoon.rollout.limits import NO_LIMITS, TokenLimits
from ratoon.rollout.packed import UpdatePlan
from ratoon.rollout.plan import cheapest_plan
from ratoon.rollout.prefixes import SortedPrefixes

# Packed tokens of a micro-batch on a CPU, unless others are asked for.
CPU_TOKENS = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """`candidates`: tokens of a micro-batch, packed, ascending; a plan has the cheapest of them.

    `num_ranks`: data-parallel ranks, each with a device like the others', that share an update.
    """

    candidates: tuple[int, ...]
    costs: CostModel
    limits: TokenLimits
    num_ranks: int = 1

    def plan(
        self, batch: RolloutBatch, prefixes: SortedPrefixes, is_run_S: NDArray[np.bool_]
    ) -> UpdatePlan:
        """Cuts of the sequences `is_run_S`, bool [S]."""
        return cheapest_plan(
            batch,
            prefixes,
            is_run_S,
            self.candidates,
            self.costs,
            self.limits,
            num_ranks=self.num_ranks,
        )


def cpu_planner(micro_batch_tokens: int | None, *, num_ranks: int = 1) -> Planner:
    """Of a device whose memory nothing counts; `micro_batch_tokens` None: chosen here."""
    tokens = CPU_TOKENS if micro_batch_tokens is None else micro_batch_tokens
    return Planner(candidates=(tokens,), costs=DEFAULT_COSTS, limits=NO_LIMITS, num_ranks=num_ranks)


def device_planner(
    micro_batch_tokens: int | None,
    sizes: DecoderSizes,
    device_bytes: int,
    host_bytes: int,
    *,
    rates: DeviceRates,
    layers_are_trained: bool,
    num_ranks: int = 1,
) -> Planner:
    """Of a device of these `rates` that lends so many bytes to activations, and of its host.

    `micro_batch_tokens` None: each plan has the cheapest, between keeping all and keeping the least
    that fits.
    """
    limits = token_limits(sizes, device_bytes, host_bytes)
    costs = device_costs(sizes, rates, layers_are_trained=layers_are_trained)
    candidates = (
        candidate_tokens(sizes, device_bytes, limits.at_once)
        if micro_batch_tokens is None
        else (min(micro_batch_tokens, max(1, limits.at_once)),)
    )
    return Planner(
        candidates=candidates,
        costs=with_recompute(costs, sizes, rates, device_bytes, host_bytes),
        limits=limits,
        num_ranks=num_ranks,
    )
