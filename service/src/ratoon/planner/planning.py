"""The plans of one policy's updates: what its device holds, and what running costs there.

No batch is refused for its size where another way to cut it fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from ratoon.errors import invalid
from ratoon.planner.activation_plan import NO_LOAD, DecoderSizes, HeadLoad
from ratoon.planner.costs import DEFAULT_COSTS, DEFAULT_EXCHANGE, measure
from ratoon.planner.device_costs import (
    DeviceRates,
    candidate_tokens,
    device_costs,
    token_limits,
    with_recompute,
)
from ratoon.planner.plan import Devices, DraftedPlan, draft_plan
from ratoon.rollout.batch import RolloutBatch, group_of_sequence
from ratoon.rollout.packed import UpdatePlan
from ratoon.rollout.prefixes import SortedPrefixes
from ratoon_proto.types import ParallelLayout

# Packed tokens of a micro-batch on a CPU, unless others are asked for.
CPU_TOKENS = 16_384
# More ranks run a micro-batch together only if the longest rank is above the mean by this share.
_IDLE = 0.02
# One whole micro-batch is preferred if its modelled cost is at most this share higher: the model is
# no more exact than that.
_WHOLE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Makes the plans of one policy's updates.

    Attributes:
        num_ranks: Ranks that share an update, each with a device like the others'.
        devices: What the devices hold and cost, by how many ranks run a micro-batch together,
            fewest first. Later ones are tried where a plan does not fit or leaves ranks idle.
        only: The same for a window's single backward, when no gradient sums occupy memory; empty:
            as `devices`.
        of_load: Makes the planner for batches of a load; None: memory is not limited.
    """

    devices: tuple[Devices, ...]
    num_ranks: int = 1
    only: tuple[Devices, ...] = ()
    of_load: Callable[[HeadLoad], Planner] | None = None

    def carrying(self, load: HeadLoad) -> Planner:
        """This planner, for batches of this load."""
        if self.of_load is None or load == NO_LOAD:
            return self
        planner = self.of_load(load)
        return planner if self.only else planner.beside_sums()

    def with_only(self, only: Planner) -> Planner:
        """This planner, with the devices of `only` for a window's single backward."""
        assert len(only.devices) == len(self.devices)
        return replace(self, only=only.devices)

    def beside_sums(self) -> Planner:
        """This planner, for a window that holds gradient sums already."""
        return replace(self, only=())

    def plan(
        self, batch: RolloutBatch, prefixes: SortedPrefixes, is_run_S: NDArray[np.bool_]
    ) -> UpdatePlan:
        """Choose how the sequences `is_run_S`, bool [S], are cut into micro-batches."""
        draft = partial(draft_plan, batch, prefixes, is_run_S, num_ranks=self.num_ranks)
        best: DraftedPlan | None = None
        for devices, only in zip_longest(self.devices, self.only):
            found = _better(draft(devices), None if only is None else draft(only))
            best = found if best is None else min(best, found, key=_badness)
            if best.fits and best.plan.rank_gap <= _IDLE:
                break
        assert best is not None
        return best.plan


def _badness(draft: DraftedPlan) -> tuple[bool, float]:
    return not draft.fits, draft.cost


def _better(draft: DraftedPlan, only: DraftedPlan | None) -> DraftedPlan:
    """The plan of a single backward, if it is one that fits and costs hardly more."""
    if only is None or not (only.fits and only.plan.is_one_backward):
        return draft
    is_good = not draft.fits or only.cost <= (1 + _WHOLE) * draft.cost
    return only if is_good else draft


def head_load(batch: RolloutBatch, prefixes: SortedPrefixes, *, num_targets: int = 0) -> HeadLoad:
    """The load of a batch whose trained tokens have `num_targets` targets beside their own.

    Each path has its own targets and masks at a token that paths share. It is counted as if all of
    the batch were like the group that shares most, rounded up to quarters of a path: an upper
    bound, as paths of equal masks share their rows.
    """
    if not (num_targets or batch.sampling_mask is not None) or not batch.num_sequences:
        return NO_LOAD
    sizes, places = measure(batch, prefixes), np.arange(batch.num_sequences)
    terms = sizes.rows_within(places, sizes.lengths)
    rows = terms - sizes.rows_within(places, sizes.lcp)
    group = group_of_sequence(batch)[prefixes.order]
    terms_G, rows_G = (np.bincount(group, each, batch.num_groups) for each in (terms, rows))
    shared = float((terms_G / np.maximum(rows_G, 1)).max())
    paths = max(1.0, math.ceil(4 * shared) / 4)
    has_masks = batch.sampling_mask is not None
    return HeadLoad(targets=num_targets * paths, rows=paths if has_masks else 1.0)


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
    """Planner without a memory limit; `micro_batch_tokens` None: chosen here."""
    tokens = CPU_TOKENS if micro_batch_tokens is None else micro_batch_tokens
    devices = tuple(
        Devices(
            candidates=(tokens * size,),
            costs=DEFAULT_COSTS if size == 1 else DEFAULT_COSTS.over(size, DEFAULT_EXCHANGE),
            sequence_ranks=size,
        )
        for size in group_sizes
    )
    return Planner(devices=devices, num_ranks=num_ranks)


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
    """Planner within what GPUs lend to activations.

    Args:
        micro_batch_tokens: Packed tokens for each device; None: each plan has the cheapest, between
            keeping all activations and keeping the least that fits.
        sizes: The model's, on one device.
        device_bytes: Bytes that each device lends to activations.
        host_bytes: Bytes that each device's host lends to them.
        rates: Speeds of one device.
        layers_are_trained: Whether layers have gradients of their own weights.
        num_ranks: Ranks that share an update.
        group_sizes: How many of them may run a micro-batch together, fewest first.
        max_tokens: Tokens that attention serves at a time; None: any number.
        is_only: Whether it is for a window's single backward (`Planner.only`).
    """

    def of(sizes: DecoderSizes) -> Devices:
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
        return Devices(
            candidates=candidates,
            costs=with_recompute(costs, sizes, rates, device_bytes, host_bytes),
            limits=limits,
            sequence_ranks=sizes.num_ranks,
        )

    return Planner(devices=tuple(of(sizes.over(size)) for size in group_sizes), num_ranks=num_ranks)
