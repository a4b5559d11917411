"""Prefixes of equal tokens cut where recorded routes differ: there a token is not the same one.

Sequences that share tokens and routes stay beside each other, whatever sorted between them.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ratoon.rollout.batch import RolloutBatch

_FIRST_ROWS = 64
_MOST_ROWS = 4096
_Shared = tuple[NDArray[np.int64], NDArray[np.int64]]


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
