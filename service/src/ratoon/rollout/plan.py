"""How an update is cut into micro-batches under a budget of packed tokens.

A group that fits the budget is never cut apart or streamed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from ratoon.errors import invalid
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.costs import (
    DEFAULT_COSTS,
    CostModel,
    measure,
    num_pairs,
)
from ratoon.rollout.fill import Filled, Filler
from ratoon.rollout.limits import NO_LIMITS, TokenLimits
from ratoon.rollout.packed import MicroBatch, Stage, UpdatePlan
from ratoon.rollout.prefixes import SortedPrefixes
from ratoon.rollout.ragged import group_of_sequence, sequence_lengths
from ratoon.rollout.sharing import share_as_planned, unshared_places
from ratoon.rollout.split import GroupSplitter, KnownWork
from ratoon.rollout.spread import spread
from ratoon.rollout.waves import first_misplaced, peak_tokens

_COUNTS = (
    "micro_batch_tokens",
    "unshared_tokens",
    "packed_tokens",
    "replicated_pairs",
    "packed_pairs",
)
# Start, stop, parent.
_STAGE_FIELDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedPlan:
    """A plan, whether the devices hold all of it, and what its longest rank costs."""

    plan: UpdatePlan
    fits: bool
    cost: float


def make_plan(
    batch: RolloutBatch,
    prefixes: SortedPrefixes,
    kept_S: NDArray[np.bool_],
    micro_batch_tokens: int,
    costs: CostModel = DEFAULT_COSTS,
    limits: TokenLimits = NO_LIMITS,
    *,
    num_ranks: int = 1,
) -> UpdatePlan:
    """Fill micro-batches with groups in sorted order, so that those that share prefixes meet.

    A group that alone exceeds `micro_batch_tokens` is streamed, or cut into several micro-batches,
    subtree by subtree whichever `costs` says is cheaper; a path that alone exceeds it runs alone.
    What the device cannot hold is cut in another way, where there is any. Prefixes that `costs`
    says are not worth it are not shared: forests of the plan are of `share_as_planned`. Sequences
    that are empty or not in `kept_S` (bool [S]) are left out.

    With `num_ranks` above 1 groups are spread over ranks first; each fills micro-batches of its
    own, and runs for itself what it shares with another rank's.
    """
    return cheapest_plan(
        batch, prefixes, kept_S, (micro_batch_tokens,), costs, limits, num_ranks=num_ranks
    )


def cheapest_plan(
    batch: RolloutBatch,
    prefixes: SortedPrefixes,
    kept_S: NDArray[np.bool_],
    candidates: Sequence[int],
    costs: CostModel,
    limits: TokenLimits,
    *,
    num_ranks: int = 1,
) -> UpdatePlan:
    """The cheapest of `make_plan`'s for each of `candidates`, tokens of a micro-batch, ascending.

    The cheapest is that whose longest rank costs least; of equally cheap ones that with the fewest
    tokens at a time.
    """
    draft = draft_plan(batch, prefixes, kept_S, candidates, costs, limits, num_ranks=num_ranks)
    return draft.plan


def draft_plan(
    batch: RolloutBatch,
    prefixes: SortedPrefixes,
    kept_S: NDArray[np.bool_],
    candidates: Sequence[int],
    costs: CostModel,
    limits: TokenLimits,
    *,
    num_ranks: int = 1,
    sequence_ranks: int = 1,
) -> DraftedPlan:
    """`cheapest_plan`, where every `sequence_ranks` of the ranks run their micro-batches together.

    Candidates, costs and limits are of so many.
    """
    sizes = measure(batch, prefixes)
    is_run = (kept_S & (sequence_lengths(batch) > 0))[prefixes.order]
    places = np.flatnonzero(is_run)
    unshared = np.sort(prefixes.order[unshared_places(sizes, places, costs)]).tolist()
    prefixes = share_as_planned(prefixes, unshared)
    sizes = replace(sizes, lcp=prefixes.lcp)
    groups = _by_group(group_of_sequence(batch)[prefixes.order[places]], places)
    most = sizes.packed_tokens(places)
    # From the first that holds everything on they are all alike.
    enough = [tokens for tokens in candidates if tokens >= most][:1]
    known = KnownWork(batch, prefixes, sizes)
    fillers = [
        Filler(GroupSplitter(known, tokens=tokens, costs=costs, limits=limits), tokens)
        for tokens in [*(tokens for tokens in candidates if tokens < most), *enough]
    ]
    filler, loads = spread(groups, num_ranks // sequence_ranks, fillers, sizes)
    works = [part.work for filled in loads.filled for part in filled]
    plan = UpdatePlan(
        micro_batches=tuple(
            MicroBatch(
                sequences=tuple(np.sort(prefixes.order[part.places]).tolist()),
                packed_tokens=part.work.tokens,
                stages=part.stages,
                rank=group * sequence_ranks,
            )
            for group, filled in enumerate(loads.filled)
            for part in filled
        ),
        micro_batch_tokens=filler.micro_batch_tokens,
        unshared_tokens=int(sizes.lengths[places].sum()),
        packed_tokens=sum(work.tokens for work in works),
        replicated_pairs=num_pairs(sizes.lengths[places]),
        packed_pairs=sum(work.pairs for work in works),
        unshared=tuple(unshared),
        rank_gap=loads.gap,
        sequence_ranks=sequence_ranks,
    )
    fits = all(_fits(part, limits) for filled in loads.filled for part in filled)
    return DraftedPlan(plan=plan, fits=fits, cost=loads.longest)


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


def plan_to_dict(plan: UpdatePlan) -> dict[str, object]:
    """JSON values of a plan."""
    data: dict[str, object] = {
        "micro_batches": [_micro_batch_to_dict(part) for part in plan.micro_batches],
        **{name: getattr(plan, name) for name in _COUNTS},
    }
    if plan.unshared:
        data["unshared"] = list(plan.unshared)
    if plan.rank_gap:
        data["rank_gap"] = plan.rank_gap
    if plan.sequence_ranks > 1:
        data["sequence_ranks"] = plan.sequence_ranks
    return data


def _micro_batch_to_dict(part: MicroBatch) -> dict[str, object]:
    data: dict[str, object] = {
        "sequences": list(part.sequences),
        "packed_tokens": part.packed_tokens,
    }
    if part.stages:
        data["stages"] = [[each.start, each.stop, each.parent] for each in part.stages]
    if part.rank:
        data["rank"] = part.rank
    return data


def plan_from_dict(data: Mapping[str, object]) -> UpdatePlan:
    """Inverse of `plan_to_dict`; raises `RatoonError` INVALID_ARGUMENT on anything else."""
    counts = {name: _count(data, name, "plan") for name in _COUNTS}
    parts = data.get("micro_batches")
    if not isinstance(parts, list):
        raise invalid("plan.micro_batches", type(parts).__name__, "a list")
    together = _count(data, "sequence_ranks", "plan") if "sequence_ranks" in data else 1
    micro_batches = tuple(
        _micro_batch(part, f"plan.micro_batches[{i}]")
        for i, part in enumerate(cast("list[object]", parts))
    )
    if together < 1 or any(part.rank % together for part in micro_batches):
        raise invalid("plan.sequence_ranks", together, "a divisor of every rank")
    return UpdatePlan(
        micro_batches=micro_batches,
        # All shared, in all older plans.
        unshared=_indexes(data.get("unshared", []), "plan.unshared"),
        rank_gap=_gap(data.get("rank_gap", 0.0), "plan.rank_gap"),
        sequence_ranks=together,
        **counts,
    )


def _micro_batch(part: object, path: str) -> MicroBatch:
    if not isinstance(part, Mapping):
        raise invalid(path, type(part).__name__, "an object")
    fields = cast("Mapping[str, object]", part)
    packed_tokens = _count(fields, "packed_tokens", path)
    return MicroBatch(
        sequences=_indexes(fields.get("sequences"), f"{path}.sequences"),
        packed_tokens=packed_tokens,
        stages=_stages(fields.get("stages", []), packed_tokens, f"{path}.stages"),
        rank=_index(fields.get("rank", 0), f"{path}.rank"),
    )


def _stages(value: object, packed_tokens: int, path: str) -> tuple[Stage, ...]:
    """Stages of a streamed micro-batch; none where it is run at once, as in all older plans."""
    if not isinstance(value, list):
        raise invalid(path, type(value).__name__, "a list")
    items = cast("list[object]", value)
    stages: list[Stage] = []
    for index, item in enumerate(items):
        fields = cast("list[object]", item) if isinstance(item, list) else []
        numbers = [field for field in fields if type(field) is int]
        if not len(fields) == len(numbers) == _STAGE_FIELDS or numbers[2] < -1:
            raise invalid(f"{path}[{index}]", repr(fields), "start, stop and parent")
        start, stop, parent = numbers
        stages.append(Stage(start=start, stop=stop, parent=parent))
    misplaced = first_misplaced(stages, packed_tokens)
    if misplaced is not None:
        raise invalid(f"{path}[{misplaced}]", repr(items), f"a partition of {packed_tokens} tokens")
    return tuple(stages)


def _count(data: Mapping[str, object], name: str, path: str) -> int:
    return _index(data.get(name), f"{path}.{name}")


def _indexes(value: object, path: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise invalid(path, type(value).__name__, "a list")
    items = cast("list[object]", value)
    return tuple(_index(index, f"{path}[{i}]") for i, index in enumerate(items))


def _index(value: object, path: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise invalid(path, repr(value), "an integer >= 0")
    return value


def _gap(value: object, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise invalid(path, repr(value), "a finite number >= 0")
    return float(value)
