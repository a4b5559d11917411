"""Experts that a sampler recorded for tokens (rollout routing replay, arXiv 2510.11370).

A rollout has rows for a run of its tokens, prompt and response; a token without one is routed by
the policy's own router. What a token visits is a set: rows are kept in ascending order of experts.

N rows, L layers with experts, C experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from ratoon.errors import invalid
from ratoon.rollout.batch import RolloutBatch, offsets_of
from ratoon.rollout.fields import RequestFields, first_true
from ratoon.rollout.packed import Forest
from ratoon.rollout.raw import RawRollout

NAME = "routed_experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSizes:
    """A policy's layers with experts, experts of each, and experts of a token; 0: it is dense."""

    layers: int = 0
    num_experts: int = 0
    experts_per_token: int = 0


DENSE = RouteSizes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """The columns of a `RolloutBatch`; all None where no rollout has a row."""

    routed_experts: NDArray[np.unsignedinteger] | None = None
    route_first: NDArray[np.int64] | None = None
    route_offsets: NDArray[np.int64] | None = None


def recorded_routes(
    rollouts: Sequence[RawRollout],
    length_S: NDArray[np.int64],
    fields: RequestFields,
    sizes: RouteSizes,
) -> Routes:
    """Check and join what rollouts of `length_S` tokens have. Raises INVALID_ARGUMENT."""
    counts: list[int] = []
    parts: list[NDArray[np.unsignedinteger]] = []
    for s, rollout in enumerate(rollouts):
        path, given = f"{fields.sequence(s)}.{NAME}", rollout.routed_experts
        if given is None:
            if rollout.routed_experts_start:
                got = rollout.routed_experts_start
                raise invalid(f"{path}_start", got, f"0: there is no {NAME}")
            counts.append(0)
            continue
        rows = _of_form(given, path, sizes)
        start, length = rollout.routed_experts_start, int(length_S[s])
        if not 0 <= start <= length - len(rows):
            got = f"{start} + {len(rows)} rows = {start + len(rows)}"
            raise invalid(f"{path}_start", got, f"at most {length}, the tokens of the rollout")
        counts.append(len(rows))
        parts.append(_ascending(rows, path, sizes.num_experts))
    if not sum(counts):
        return Routes()
    return Routes(
        routed_experts=np.concatenate(parts),
        route_first=np.array([rollout.routed_experts_start for rollout in rollouts], np.int64),
        route_offsets=offsets_of(np.array(counts, np.int64)),
    )


def _of_form(
    given: NDArray[np.generic], path: str, sizes: RouteSizes
) -> NDArray[np.unsignedinteger]:
    if not sizes.layers:
        raise invalid(path, "routes", "none: the policy has no experts")
    if given.dtype.kind != "u" or given.dtype.itemsize > 2:
        raise invalid(f"{path}.dtype", given.dtype, "uint8 or uint16")
    expected = (sizes.layers, sizes.experts_per_token)
    if given.ndim != 3 or given.shape[1:] != expected:
        text = f"[tokens, {expected[0]} layers with experts, {expected[1]} experts per token]"
        raise invalid(f"{path}.shape", list(given.shape), text)
    return cast("NDArray[np.unsignedinteger]", given)


def _ascending(
    given: NDArray[np.unsignedinteger], path: str, num_experts: int
) -> NDArray[np.unsignedinteger]:
    bad = first_true((given >= num_experts).ravel())
    if bad is not None:
        token, layer, place = (int(i) for i in np.unravel_index(bad, given.shape))
        at = f"{path}[{token}][{layer}][{place}]"
        raise invalid(at, given[token, layer, place], f"an expert in [0, {num_experts})")
    rows = np.sort(given.astype(np.uint8 if num_experts <= 256 else np.uint16), axis=2)
    twice = first_true((rows[:, :, 1:] == rows[:, :, :-1]).any(2).ravel())
    if twice is not None:
        token, layer = (int(i) for i in np.unravel_index(twice, rows.shape[:2]))
        got = given[token, layer].tolist()
        raise invalid(f"{path}[{token}][{layer}]", got, "each expert once")
    return rows


def packed_routes(batch: RolloutBatch, forest: Forest) -> NDArray[np.int16] | None:
    """int16 [L, T, C]: recorded experts of packed tokens, -1 of those without; None: of none."""
    rows = batch.routed_experts
    if rows is None or batch.route_first is None or batch.route_offsets is None:
        return None
    is_held = forest.sequence_node >= 0
    ends, held = forest.sequence_node[is_held], forest.sequences[is_held]
    by_end = np.argsort(ends, kind="stable")
    # Any sequence through a node will do: the first that ends in its subtree.
    of_node = np.searchsorted(ends[by_end], np.arange(len(forest.node_start)))
    own = forest.node_stop - forest.node_start
    sequence_T = np.repeat(held[by_end][of_node], own)
    depth_T = np.arange(forest.num_tokens) - np.repeat(forest.node_start - forest.node_depth, own)
    place_T = depth_T - batch.route_first[sequence_T]
    start_T = batch.route_offsets[sequence_T]
    has_T = (place_T >= 0) & (place_T < batch.route_offsets[sequence_T + 1] - start_T)
    packed = np.full((rows.shape[1], forest.num_tokens, rows.shape[2]), -1, np.int16)
    packed[:, has_T] = rows[(start_T + place_T)[has_T]].transpose(1, 0, 2)
    return packed
