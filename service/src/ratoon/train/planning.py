"""The plans of one policy's updates: what its device holds, and what running costs there.

No batch is refused for its size where another way to cut it fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ratoon.errors import invalid
from ratoon.model.activation_plan import DecoderSizes
from ratoon.model.device_costs import DeviceRates, device_costs, with_recompute
from ratoon.model.token_limits import candidate_tokens, token_limits
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.costs import DEFAULT_COSTS, DEFAULT_EXCHANGE, CostModel
from ratoon.rollout.limits import NO_LIMITS, TokenLimits
from ratoon.rollout.packed import UpdatePlan
from ratoon.rollout.plan import DraftedPlan, draft_plan
from ratoon.rollout.prefixes import SortedPrefixes
from ratoon_proto.types import ParallelLayout

# Packed tokens of a micro-batch on a CPU, unless others are asked for.
CPU_TOKENS = 16_384


# Ranks are put together only where otherwise the longest is above their mean by this share of it.
_IDLE = 0.02
# What is modelled as dearer by less is run whole where it can be: costs are no more exact, and what
# was measured of the recorded group speaks for it.
_WHOLE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """`candidates`: tokens of a micro-batch, packed, ascending; a plan has the cheapest of them.

    `num_ranks`: ranks, each with a device like the others', that share an update. Every
    `sequence_ranks` of them run their micro-batches together; candidates, costs and limits are of
    so many. `wider`: the same of more of them, fewest first, tried where a plan does not fit or
    leaves ranks idle. `only`: of what a device has where it runs one backward, the window's first,
    and has no sums beside it; None: as much.
    """

    candidates: tuple[int, ...]
    costs: CostModel
    limits: TokenLimits
    num_ranks: int = 1
    sequence_ranks: int = 1
    wider: tuple[Planner, ...] = ()
    only: Planner | None = None

    def plan(
        self,
        batch: RolloutBatch,
        prefixes: SortedPrefixes,
        is_run_S: NDArray[np.bool_],
        *,
        is_first: bool = True,
    ) -> UpdatePlan:
        """Cuts of the sequences `is_run_S`, bool [S]. `is_first`: the window has no gradients."""
        best = self._best(batch, prefixes, is_run_S, is_first=is_first)
        for wider in self.wider:
            if best.fits and best.plan.rank_gap <= _IDLE:
                break
            other = wider._best(batch, prefixes, is_run_S, is_first=is_first)
            best = min(best, other, key=lambda draft: (not draft.fits, draft.cost))
        return best.plan

    def with_only(self, only: Planner) -> Planner:
        """With the planners of a window's only backward, of as many ranks together as these."""
        wider = zip(self.wider, only.wider, strict=True)
        return replace(self, only=only, wider=tuple(w.with_only(o) for w, o in wider))

    def _best(
        self,
        batch: RolloutBatch,
        prefixes: SortedPrefixes,
        is_run_S: NDArray[np.bool_],
        *,
        is_first: bool,
    ) -> DraftedPlan:
        best = self._draft(batch, prefixes, is_run_S)
        if self.only is not None and is_first:
            only = self.only._draft(batch, prefixes, is_run_S)
            is_good = not best.fits or only.cost <= (1 + _WHOLE) * best.cost
            if only.fits and only.plan.is_one_backward and is_good:
                return only
        return best

    def _draft(
        self, batch: RolloutBatch, prefixes: SortedPrefixes, is_run_S: NDArray[np.bool_]
    ) -> DraftedPlan:
        return draft_plan(
            batch,
            prefixes,
            is_run_S,
            self.candidates,
            self.costs,
            self.limits,
            num_ranks=self.num_ranks,
            sequence_ranks=self.sequence_ranks,
        )


def group_sizes(parallel: ParallelLayout, num_heads: int) -> tuple[int, ...]:
    """How many ranks may run a micro-batch together, fewest first: what is named, or any number.

    Raises `RatoonError` INVALID_ARGUMENT where it does not divide the model's query heads.
    """
    named = parallel.sequence_ranks
    if named is None:
        sizes = range(1, parallel.num_workers + 1)
        return tuple(n for n in sizes if parallel.num_workers % n == 0 and num_heads % n == 0)
    if num_heads % named:
        share = f"{num_heads} / {named} = {num_heads / named:.3g} on each rank"
        expected = f"a divisor of the model's {num_heads} query heads: {share}"
        raise invalid("parallel.sequence_ranks", named, expected)
    return (named,)


def cpu_planner(
    micro_batch_tokens: int | None, *, num_ranks: int = 1, group_sizes: Sequence[int] = (1,)
) -> Planner:
    """Of a device whose memory nothing counts; `micro_batch_tokens` None: chosen here."""
    tokens = CPU_TOKENS if micro_batch_tokens is None else micro_batch_tokens
    planners = [
        Planner(
            candidates=(tokens * size,),
            costs=DEFAULT_COSTS if size == 1 else DEFAULT_COSTS.over(size, DEFAULT_EXCHANGE),
            limits=NO_LIMITS,
            num_ranks=num_ranks,
            sequence_ranks=size,
        )
        for size in group_sizes
    ]
    return replace(planners[0], wider=tuple(planners[1:]))


def device_planner(
    micro_batch_tokens: int | None,
    sizes: DecoderSizes,
    device_bytes: int,
    host_bytes: int,
    *,
    rates: DeviceRates,
    layers_are_trained: bool,
    num_ranks: int = 1,
    group_sizes: Sequence[int] = (1,),
    max_tokens: int | None = None,
    is_only: bool = False,
) -> Planner:
    """Of a device of these `rates` that lends so many bytes to activations, and of its host.

    `max_tokens`: that attention serves at a time; None: any number. `is_only`: of plans of one
    micro-batch (`Planner.only`).

    `micro_batch_tokens`, of each device; None: each plan has the cheapest, between keeping all and
    keeping the least that fits.
    """

    def of(sizes: DecoderSizes) -> Planner:
        limits = token_limits(sizes, device_bytes, host_bytes).at_most(max_tokens)
        costs = device_costs(
            sizes, rates, layers_are_trained=layers_are_trained, adds_up=not is_only
        )
        candidates = (
            candidate_tokens(sizes, device_bytes, limits.at_once)
            if micro_batch_tokens is None
            else (min(micro_batch_tokens * sizes.num_ranks, max(1, limits.at_once)),)
        )
        if is_only:
            candidates = candidates[-1:]
        if max_tokens is not None:
            candidates = tuple(sorted({min(tokens, max_tokens) for tokens in candidates}))
        return Planner(
            candidates=candidates,
            costs=with_recompute(costs, sizes, rates, device_bytes, host_bytes),
            limits=limits,
            num_ranks=num_ranks,
            sequence_ranks=sizes.num_ranks,
        )

    planners = [of(sizes.over(size)) for size in group_sizes]
    return replace(planners[0], wider=tuple(planners[1:]))
