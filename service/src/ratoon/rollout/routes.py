"""Experts that a sampler recorded for tokens (rollout routing replay, arXiv 2510.11370).

A rollout has rows for a run of its tokens, prompt and response; a token without one is routed by
the policy's own router. What a token visits is a set: rows are kept in ascending order of experts.
Where recorded routes differ, equal tokens are not the same, and a shared prefix ends there.

N rows, L layers with experts, C experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import numpy as np
from numpy.typing import NDArray

from ratoon.errors import invalid
from ratoon.rollout.batch import RolloutBatch, offsets_of
from ratoon.rollout.packed import Forest
from ratoon.rollout.raw import RawRollout, RequestFields, first_true

NAME = "routed_experts"
_FIRST_ROWS = 64
_MOST_ROWS = 4096
_Shared = tuple[NDArray[np.int64], NDArray[np.int64]]


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
        given, start = rollout.routed_experts, rollout.routed_experts_start
        if given is None and not start:
            counts.append(0)
            continue
        path = f"{fields.sequence(s)}.{NAME}"
        if given is None:
            raise invalid(f"{path}_start", start, f"0: there is no {NAME}")
        rows, length = _of_form(given, path, sizes), int(length_S[s])
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


def split_by_routes(
    batch: RolloutBatch, order: NDArray[np.int64], lcp: NDArray[np.int64]
) -> _Shared:
    """Sorted sequences and the tokens that each shares with the one before, by tokens alone, to
    the same by tokens and routes; int64 [S] each."""
    routes = _Rows(batch)
    sorted_S, lcp_S = order.tolist(), lcp.tolist()
    is_split = np.zeros(len(order), np.bool_)
    for i in np.flatnonzero(lcp).tolist():
        pair = sorted_S[i - 1], sorted_S[i]
        is_split[i] = routes.agreement(*pair, 0, lcp_S[i]) < lcp_S[i]
    roots = [*np.flatnonzero(lcp == 0).tolist(), len(order)]
    order, found = order.copy(), lcp.copy()
    for start, stop in pairwise(roots):
        if is_split[start:stop].any():
            tree = slice(start, stop)
            order[tree], found[tree] = _regrown(routes, sorted_S[tree], lcp[tree])
    return order, found


def _regrown(routes: _Rows, sequences: list[int], lcp: NDArray[np.int64]) -> _Shared:
    """Order and shared tokens of the sequences of one tree."""
    order: list[int] = []
    shared: list[int] = []
    # Places that agree up to a depth, and what the first of them shares with what comes before.
    stack = [(list(range(len(sequences))), 0, 0)]
    while stack:
        places, depth, before = stack.pop()
        if len(places) == 1:
            order.append(sequences[places[0]])
            shared.append(before)
            continue
        # Tokens that each place has in common with the next.
        common = np.minimum.reduceat(lcp[: places[-1] + 1], np.array(places[:-1]) + 1)
        stop = int(common.min())
        left = _leavers(routes, sequences, places, depth, stop)
        if len(left) == 1:
            bounds = [0, *(np.flatnonzero(common == stop) + 1).tolist(), len(places)]
            parts = [(places[i:j], stop) for i, j in pairwise(bounds)]
        else:
            # The nearer to the first place one leaves, the later it comes.
            parts = [(part, at) for (at, _), part in sorted(left.items(), key=_latest_first)]
        firsts = [before, *(at for _, at in parts[1:])]
        stack += reversed([(part, at, f) for (part, at), f in zip(parts, firsts, strict=True)])
    return np.array(order, np.int64), np.array(shared, np.int64)


def _latest_first(item: tuple[tuple[int, bytes], list[int]]) -> tuple[int, bytes]:
    (depth, row), _ = item
    return -depth, row


def _leavers(
    routes: _Rows, sequences: list[int], places: list[int], depth: int, stop: int
) -> dict[tuple[int, bytes], list[int]]:
    """Places by where their routes leave the first one's, at most `stop`, and by the row there."""
    found: dict[tuple[int, bytes], list[int]] = {(stop, b""): []}
    head = sequences[places[0]]
    for place in places:
        at = routes.agreement(head, sequences[place], depth, stop)
        row = b"" if at == stop else routes.row(sequences[place], at)
        found.setdefault((at, row), []).append(place)
    return found


class _Rows:
    """The routes of a batch, a row of bytes a token."""

    def __init__(self, batch: RolloutBatch) -> None:
        assert batch.routed_experts is not None
        assert batch.route_first is not None
        assert batch.route_offsets is not None
        rows = batch.routed_experts
        self._rows_NB = rows.view(np.uint8).reshape(len(rows), -1)
        start = batch.route_offsets[:-1]
        self._first: list[int] = batch.route_first.tolist()
        self._stop: list[int] = (batch.route_first + np.diff(batch.route_offsets)).tolist()
        self._shift: list[int] = (start - batch.route_first).tolist()

    def agreement(self, a: int, b: int, start: int, stop: int) -> int:
        """The first token in [start, stop) whose routes differ in two sequences, else `stop`."""
        if a == b:
            return stop
        edges = {self._first[a], self._stop[a], self._first[b], self._stop[b]}
        bounds = sorted({start, stop, *(edge for edge in edges if start < edge < stop)})
        for first, last in pairwise(bounds):
            has_row = self._has(a, first)
            if has_row is not self._has(b, first):
                return first
            at = self._compare(a, b, first, last) if has_row else last
            if at < last:
                return at
        return stop

    def row(self, sequence: int, token: int) -> bytes:
        """b"" where there is none."""
        if not self._has(sequence, token):
            return b""
        return self._rows_NB[self._shift[sequence] + token].tobytes()

    def _has(self, sequence: int, token: int) -> bool:
        return self._first[sequence] <= token < self._stop[sequence]

    def _compare(self, a: int, b: int, start: int, stop: int) -> int:
        size = _FIRST_ROWS
        while start < stop:
            end = min(start + size, stop)
            ours, theirs = (
                self._rows_NB[self._shift[s] + start : self._shift[s] + end] for s in (a, b)
            )
            if not np.array_equal(ours, theirs):
                return start + int((ours != theirs).any(1).argmax())
            start, size = end, min(4 * size, _MOST_ROWS)
        return stop
