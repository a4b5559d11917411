"""How an update is cut into micro-batches under a budget of packed tokens.

Enter a batch, its sorted prefixes and the sequences that are kept; leaves an `UpdatePlan`, also as
plain JSON values for the journal. Invariant: every kept sequence that has tokens is in exactly one
micro-batch, and a group that fits the budget is never cut apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray

from ratoon.errors import invalid
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.packed import MicroBatch, UpdatePlan
from ratoon.rollout.prefixes import SortedPrefixes, shared_with_previous
from ratoon.rollout.ragged import group_of_sequence, sequence_lengths

_COUNTS = (
    "micro_batch_tokens",
    "replicated_tokens",
    "packed_tokens",
    "replicated_pairs",
    "packed_pairs",
)


def make_plan(
    batch: RolloutBatch,
    prefixes: SortedPrefixes,
    kept_S: NDArray[np.bool_],
    micro_batch_tokens: int,
) -> UpdatePlan:
    """Fill micro-batches with groups in sorted order, so that those that share prefixes meet.

    A group that alone exceeds `micro_batch_tokens` is cut between sequences in sorted order; a
    sequence that alone exceeds it runs alone. Sequences that are empty or not in `kept_S` (bool
    [S]) are left out.
    """
    length_S = sequence_lengths(batch)
    sorted_length = length_S[prefixes.order]
    is_run = (kept_S & (length_S > 0))[prefixes.order]
    places = np.flatnonzero(is_run)
    groups = _by_group(group_of_sequence(batch)[prefixes.order[places]], places)
    bins = _fill(groups, _Costs(lcp=prefixes.lcp, lengths=sorted_length), micro_batch_tokens)
    micro_batches: list[MicroBatch] = []
    packed_pairs = 0
    for bin_places in bins:
        lengths = sorted_length[bin_places]
        shared = shared_with_previous(prefixes.lcp, bin_places)
        packed_pairs += _num_pairs(lengths) - _num_pairs(shared)
        sequences = np.sort(prefixes.order[bin_places])
        micro_batches.append(
            MicroBatch(
                sequences=tuple(sequences.tolist()), packed_tokens=int((lengths - shared).sum())
            )
        )
    return UpdatePlan(
        micro_batches=tuple(micro_batches),
        micro_batch_tokens=micro_batch_tokens,
        replicated_tokens=int(sorted_length[places].sum()),
        packed_tokens=sum(part.packed_tokens for part in micro_batches),
        replicated_pairs=_num_pairs(sorted_length[places]),
        packed_pairs=packed_pairs,
    )


def _by_group(group: NDArray[np.int64], places: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Places of each group, ascending; groups by their first place."""
    by_group = np.argsort(group, kind="stable")
    bounds = np.flatnonzero(np.diff(group[by_group])) + 1
    parts = np.split(places[by_group], bounds) if len(places) else []
    return sorted(parts, key=lambda part: int(part[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Costs:
    """Length and shared tokens of each place in the sorted order, int64 [S] each."""

    lcp: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def packed_tokens(self, places: NDArray[np.int64]) -> int:
        """Packed tokens of the sequences at `places`, ascending."""
        return int((self.lengths[places] - shared_with_previous(self.lcp, places)).sum())


@dataclass(slots=True, kw_only=True)
class _OpenBin:
    """The micro-batch that groups still join: their places, packed tokens and the last place."""

    parts: list[NDArray[np.int64]] = field(default_factory=list[NDArray[np.int64]])
    tokens: int = 0
    last: int = -1

    def tokens_with(self, group: NDArray[np.int64], costs: _Costs) -> int:
        """Packed tokens after `group` joined."""
        if not self.parts:
            return costs.packed_tokens(group)
        first = int(group[0])
        if first > self.last:
            shared = int(costs.lcp[self.last + 1 : first + 1].min())
            return self.tokens + costs.packed_tokens(group) - shared
        return costs.packed_tokens(np.sort(np.concatenate([*self.parts, group])))

    def join(self, group: NDArray[np.int64], tokens: int) -> None:
        self.parts.append(group)
        self.tokens = tokens
        self.last = max(self.last, int(group[-1]))

    def places(self) -> NDArray[np.int64]:
        return np.sort(np.concatenate(self.parts))


def _fill(
    groups: Sequence[NDArray[np.int64]], costs: _Costs, budget: int
) -> list[NDArray[np.int64]]:
    """Places of each micro-batch, ascending: groups join the open one, or else open the next."""
    bins: list[NDArray[np.int64]] = []
    current = _OpenBin()
    for group in groups:
        for part in _cut(group, costs, budget):
            tokens = current.tokens_with(part, costs)
            if current.parts and tokens > budget:
                bins.append(current.places())
                current = _OpenBin()
                tokens = costs.packed_tokens(part)
            current.join(part, tokens)
    if current.parts:
        bins.append(current.places())
    return bins


def _cut(group: NDArray[np.int64], costs: _Costs, budget: int) -> list[NDArray[np.int64]]:
    """Runs of `group`'s places of at most `budget` packed tokens, or of one place."""
    if costs.packed_tokens(group) <= budget:
        return [group]
    lengths = costs.lengths[group].tolist()
    shared = shared_with_previous(costs.lcp, group).tolist()
    cuts: list[int] = []
    tokens = lengths[0]
    for i in range(1, len(group)):
        tokens += lengths[i] - shared[i]
        if tokens > budget:
            cuts.append(i)
            tokens = lengths[i]
    return np.split(group, cuts)


def _num_pairs(lengths: NDArray[np.int64]) -> int:
    """Causal (query, key) pairs of runs from the root of the given lengths."""
    return int((lengths * (lengths + 1) // 2).sum())


def plan_to_dict(plan: UpdatePlan) -> dict[str, object]:
    """JSON values of a plan."""
    return {
        "micro_batches": [
            {"sequences": list(part.sequences), "packed_tokens": part.packed_tokens}
            for part in plan.micro_batches
        ],
        **{name: getattr(plan, name) for name in _COUNTS},
    }


def plan_from_dict(data: Mapping[str, object]) -> UpdatePlan:
    """Inverse of `plan_to_dict`; raises `RatoonError` INVALID_ARGUMENT on anything else."""
    counts = {name: _count(data, name, "plan") for name in _COUNTS}
    parts = data.get("micro_batches")
    if not isinstance(parts, list):
        raise invalid("plan.micro_batches", type(parts).__name__, "a list")
    return UpdatePlan(
        micro_batches=tuple(
            _micro_batch(part, f"plan.micro_batches[{i}]")
            for i, part in enumerate(cast("list[object]", parts))
        ),
        **counts,
    )


def _micro_batch(part: object, path: str) -> MicroBatch:
    if not isinstance(part, Mapping):
        raise invalid(path, type(part).__name__, "an object")
    fields = cast("Mapping[str, object]", part)
    sequences = fields.get("sequences")
    if not isinstance(sequences, list):
        raise invalid(f"{path}.sequences", type(sequences).__name__, "a list")
    indexes = cast("list[object]", sequences)
    return MicroBatch(
        sequences=tuple(_index(index, f"{path}.sequences[{i}]") for i, index in enumerate(indexes)),
        packed_tokens=_count(fields, "packed_tokens", path),
    )


def _count(data: Mapping[str, object], name: str, path: str) -> int:
    return _index(data.get(name), f"{path}.{name}")


def _index(value: object, path: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise invalid(path, repr(value), "an integer >= 0")
    return value
