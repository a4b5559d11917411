"""How an update is cut into micro-batches under a budget of packed tokens.

A group that fits the budget is never cut apart or streamed. A prefix is not shared where sharing
would cost more than it saves: attention goes by tiles, so beside those that are full of keys that
it needs, a token reads one for each prefix above its own tokens that begins or ends within it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from ratoon.errors import ErrorCode, RatoonError
from ratoon.planner.costs import (
    DEFAULT_COSTS,
    NO_LIMITS,
    CostModel,
    SequenceSizes,
    TokenLimits,
    measure,
    num_pairs,
)
from ratoon.planner.fill import Filled, Filler, GroupSplitter, KnownWork
from ratoon.planner.spread import RankLoads, spread
from ratoon.planner.waves import first_misplaced, peak_tokens
from ratoon.rollout.batch import RolloutBatch, group_of_sequence, sequence_lengths
from ratoon.rollout.packed import MicroBatch, UpdatePlan
from ratoon.rollout.prefixes import SortedPrefixes, shared_with_previous

_COUNTS = (
    "micro_batch_tokens",
    "unshared_tokens",
    "packed_tokens",
    "replicated_pairs",
    "packed_pairs",
)


def unshared_places(
    sizes: SequenceSizes, places: NDArray[np.int64], costs: CostModel
) -> NDArray[np.int64]:
    """The `places` (int64, ascending, all that is run) that should share nothing with those before.

    The sequence before is right behind the prefix in either case: only the later ones pay.
    """
    if costs.fork == 0:
        return np.empty(0, np.int64)
    shared, lengths = shared_with_previous(sizes.lcp, places), sizes.lengths[places]
    rows = sizes.rows_within(places, shared)
    saved = costs.token * shared + costs.of_pairs(shared) + costs.row * rows
    own = lengths - shared
    price = costs.pair * costs.fork * own
    if costs.window is not None:
        # Only so many tokens behind a fork see a key before it.
        price = price + costs.near_pair * costs.fork * np.minimum(own, costs.window)
    unshared: list[int] = []
    # Ends of the prefixes above the place.
    forks: list[int] = []
    for i, depth in enumerate(shared.tolist()):
        while forks and forks[-1] > depth:
            forks.pop()
        if depth == 0:
            continue
        is_new = not forks or forks[-1] < depth
        if saved[i] < price[i] * (len(forks) + is_new):
            unshared.append(int(places[i]))
            forks.clear()
        elif is_new:
            forks.append(depth)
    return np.array(unshared, np.int64)


def share_as_planned(prefixes: SortedPrefixes, unshared: Sequence[int]) -> SortedPrefixes:
    """`prefixes` in which the sequences `unshared` share nothing with what is before them."""
    if not unshared:
        return prefixes
    lcp = prefixes.lcp.copy()
    lcp[prefixes.rank[list(unshared)]] = 0
    return replace(prefixes, lcp=lcp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """`sequence_ranks` devices that run each micro-batch together.

    Attributes:
        candidates: Packed tokens of a micro-batch; a plan has the cheapest of them. Ascending.
        costs: What running costs on these devices together.
        limits: Packed tokens that these devices hold together.
        sequence_ranks: How many ranks, each with one device, share a micro-batch.
    """

    candidates: tuple[int, ...]
    costs: CostModel = DEFAULT_COSTS
    limits: TokenLimits = NO_LIMITS
    sequence_ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedPlan:
    """A plan, whether the devices hold all of it, and what its longest rank costs."""

    plan: UpdatePlan
    fits: bool
    cost: float


def draft_plan(
    batch: RolloutBatch,
    prefixes: SortedPrefixes,
    is_run_S: NDArray[np.bool_],
    devices: Devices,
    *,
    num_ranks: int = 1,
) -> DraftedPlan:
    """Fill micro-batches with groups in sorted order, so that those that share prefixes meet.

    A group that alone exceeds a micro-batch's tokens is streamed, or cut into several micro-batches
    subtree by subtree, whichever is modelled as cheaper; a path that alone exceeds them runs alone.
    A group that the devices cannot hold is cut in another way, if there is one. Prefixes whose
    sharing would cost more than it saves are not shared (`share_as_planned`).

    Groups are spread over the ranks first. Each set of `devices.sequence_ranks` ranks fills
    micro-batches of its own, and runs for itself what it shares with another set's.

    Args:
        batch: S sequences.
        prefixes: Its sorted prefixes.
        is_run_S: bool [S]; the other sequences, and empty ones, are left out.
        devices: The devices that run a micro-batch together.
        num_ranks: Ranks that share the update; a multiple of `devices.sequence_ranks`.

    Returns:
        The candidate whose longest rank costs least; among equally cheap ones that with the fewest
        tokens at a time.
    """
    sizes = measure(batch, prefixes, devices.costs.window)
    is_run = (is_run_S & (sequence_lengths(batch) > 0))[prefixes.order]
    places = np.flatnonzero(is_run)
    costs, limits = devices.costs, devices.limits
    unshared = np.sort(prefixes.order[unshared_places(sizes, places, costs)]).tolist()
    prefixes = share_as_planned(prefixes, unshared)
    sizes = replace(sizes, lcp=prefixes.lcp)
    groups = _by_group(group_of_sequence(batch)[prefixes.order[places]], places)
    known = KnownWork(batch, prefixes, sizes)
    fillers = [
        Filler(GroupSplitter(known, tokens=tokens, costs=costs, limits=limits), tokens)
        for tokens in _different(devices.candidates, sizes.packed_tokens(places))
    ]
    filler, loads = spread(groups, num_ranks // devices.sequence_ranks, fillers, sizes)
    works = [part.work for filled in loads.filled for part in filled]
    plan = UpdatePlan(
        micro_batches=_micro_batches(loads, prefixes, devices.sequence_ranks),
        micro_batch_tokens=filler.micro_batch_tokens,
        unshared_tokens=int(sizes.lengths[places].sum()),
        packed_tokens=sum(work.tokens for work in works),
        replicated_pairs=num_pairs(sizes.lengths[places]),
        packed_pairs=sum(work.pairs for work in works),
        unshared=tuple(unshared),
        rank_gap=loads.gap,
        sequence_ranks=devices.sequence_ranks,
    )
    fits = all(_fits(part, limits) for filled in loads.filled for part in filled)
    return DraftedPlan(plan=plan, fits=fits, cost=loads.longest)


def check_plan(plan: UpdatePlan, num_sequences: int, num_ranks: int) -> None:
    """Check that a journaled plan can be run on a batch of so many sequences, by so many ranks.

    Whether its micro-batches are those of this very batch shows when they are packed.

    Raises:
        RatoonError: INTERNAL, if a number is none, sequences are not of the batch or come twice,
            ranks do not exist or do not meet, or stages are no partition of their micro-batch.
    """
    sequences = [index for part in plan.micro_batches for index in part.sequences]
    for indexes in (sequences, plan.unshared):
        if not all(_is_below(index, num_sequences) for index in indexes):
            raise _foreign(f"its sequences are not of a batch of {num_sequences}")
        if len({*indexes}) != len(indexes):
            raise _foreign("a sequence comes twice")
    if not all(_is_below(getattr(plan, name), math.inf) for name in _COUNTS):
        raise _foreign(f"not all of {', '.join(_COUNTS)} are counts")
    if not _is_finite(plan.rank_gap):
        raise _foreign(f"the gap between ranks is {plan.rank_gap!r}")
    together = plan.sequence_ranks
    if not (_is_below(together, num_ranks + 1) and together):
        raise _foreign(f"{together!r} of {num_ranks} ranks run a micro-batch together")
    for index, part in enumerate(plan.micro_batches):
        if not _is_below(part.rank, num_ranks - together + 1) or part.rank % together:
            raise _foreign(f"micro-batch {index} is of rank {part.rank!r} of {num_ranks}")
        _check_stages(part, index)


def _check_stages(part: MicroBatch, index: int) -> None:
    parents = [stage.parent for stage in part.stages if stage.parent != -1]
    bounds = [bound for stage in part.stages for bound in (stage.start, stage.stop)]
    if not all(_is_below(number, math.inf) for number in (part.packed_tokens, *parents, *bounds)):
        raise _foreign(f"not all numbers of micro-batch {index} are counts")
    misplaced = first_misplaced(part.stages, part.packed_tokens)
    if misplaced is not None:
        raise _foreign(f"stage {misplaced} of micro-batch {index} is out of place")


def _is_finite(number: object) -> bool:
    return type(number) in (int, float) and 0 <= cast("float", number) < math.inf


def _is_below(number: object, stop: float) -> bool:
    return type(number) is int and 0 <= number < stop


def _foreign(reason: str) -> RatoonError:
    return RatoonError(ErrorCode.INTERNAL, f"the plan is of another batch: {reason}")


def _micro_batches(
    loads: RankLoads, prefixes: SortedPrefixes, sequence_ranks: int
) -> tuple[MicroBatch, ...]:
    return tuple(
        MicroBatch(
            sequences=tuple(np.sort(prefixes.order[part.places]).tolist()),
            packed_tokens=part.work.tokens,
            stages=part.stages,
            rank=index * sequence_ranks,
        )
        for index, filled in enumerate(loads.filled)
        for part in filled
    )


def _different(candidates: Sequence[int], packed_tokens: int) -> list[int]:
    """The candidates that make different plans: from the first that holds everything on, all do
    the same."""
    enough = [tokens for tokens in candidates if tokens >= packed_tokens][:1]
    return [*(tokens for tokens in candidates if tokens < packed_tokens), *enough]


def _fits(part: Filled, limits: TokenLimits) -> bool:
    if part.stages:
        return peak_tokens(part.stages) <= limits.streamed
    return part.work.tokens <= limits.at_once


def _by_group(group: NDArray[np.int64], places: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Places of each group, ascending; groups by their first place."""
    by_group = np.argsort(group, kind="stable")
    bounds = np.flatnonzero(np.diff(group[by_group])) + 1
    parts = np.split(places[by_group], bounds) if len(places) else []
    return sorted(parts, key=lambda part: int(part[0]))
