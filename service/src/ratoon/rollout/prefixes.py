"""Sequences in trie order, each with the number of tokens it shares with the one before it.

Any two sequences share the minimum of the counts between them; tokens are compared by id, never by
hash. Prompts form a trie of stems, and every sequence hangs on the longest prompt that it begins
with, so a prompt is read once however many responses follow it.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ratoon.rollout.batch import RolloutBatch, group_of_sequence
from ratoon.rollout.routes import split_by_routes

_TOKEN_BYTES = 4
_FIRST_WINDOW = 16
_MAX_WINDOW = 4096
# Tokens compared at a time: bounds the scratch memory.
_MAX_BLOCK = 2**20


@dataclass(slots=True, kw_only=True)
class _Items:
    """What hangs on stems. Item s < S is sequence s, item S + k is stem k; stem 0 is the empty one.

    An item's *tail* is what follows, in it, the stem that it hangs on.
    """

    num_sequences: int
    # Per stem: its length in tokens and the items on it. No stem's tail is a prefix of another tail
    # beside it.
    stem_length: list[int]
    on_stem: list[list[int]]
    # Per item: its tail's place in the prompts' and responses' tokens, and the tail as big-endian
    # bytes, which compare as the non-negative ids do.
    start: list[int]
    tail: list[bytes]


def trie_events(batch: RolloutBatch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sequences and stems of `batch` in depth-first, lexicographic order, temperatures aside.

    Returns the events, int64 [E]: s < S is sequence s, others are stems; and how many tokens each
    shares with the event before it, int64 [E]. Two events share the minimum over what lies between
    them. Equal sequences are in request order.
    """
    tokens = np.concatenate([batch.prompt_tokens, batch.response_tokens])
    data = tokens.astype(">i4").tobytes()
    items, stem_of_group = _hang_stems(batch, data)
    _hang_sequences(batch, data, items, stem_of_group)
    for below in items.on_stem:
        below.sort(key=items.tail.__getitem__)
    return _walk(items, tokens)


def _hang_stems(batch: RolloutBatch, data: bytes) -> tuple[_Items, list[int]]:
    """The distinct prompts and the empty stem, hung on each other; and the stem of each group."""
    bounds: list[int] = (batch.prompt_offsets * _TOKEN_BYTES).tolist()
    prompts = [data[start:stop] for start, stop in pairwise(bounds)]
    stems = sorted({b"", *prompts})
    start_of = dict(zip(prompts, batch.prompt_offsets.tolist(), strict=False))
    num_items = batch.num_sequences + len(stems)
    items = _Items(
        num_sequences=batch.num_sequences,
        stem_length=[len(stem) // _TOKEN_BYTES for stem in stems],
        on_stem=[[] for _ in stems],
        start=[0] * num_items,
        tail=[b""] * num_items,
    )
    path = [0]
    for k, stem in enumerate(stems[1:], start=1):
        while not stem.startswith(stems[path[-1]]):
            path.pop()
        parent = path[-1]
        item = batch.num_sequences + k
        items.tail[item] = stem[len(stems[parent]) :]
        items.start[item] = start_of[stem] + items.stem_length[parent]
        items.on_stem[parent].append(item)
        path.append(k)
    number = {stem: k for k, stem in enumerate(stems)}
    return items, [number[prompt] for prompt in prompts]


def _hang_sequences(
    batch: RolloutBatch, data: bytes, items: _Items, stem_of_group: list[int]
) -> None:
    """Hang every sequence on the longest stem that it begins with."""
    stems_on = [list(below) for below in items.on_stem]
    keys_on = [[items.tail[item] for item in below] for below in stems_on]
    bounds: list[int] = (batch.response_offsets + len(batch.prompt_tokens)).tolist()
    groups: list[int] = group_of_sequence(batch).tolist()
    for s, group in enumerate(groups):
        k, start = stem_of_group[group], bounds[s]
        tail = data[start * _TOKEN_BYTES : bounds[s + 1] * _TOKEN_BYTES]
        while keys := keys_on[k]:
            place = bisect_right(keys, tail) - 1
            if place < 0 or not tail.startswith(keys[place]):
                break
            start += len(keys[place]) // _TOKEN_BYTES
            tail = tail[len(keys[place]) :]
            k = stems_on[k][place] - items.num_sequences
        items.start[s], items.tail[s] = start, tail
        items.on_stem[k].append(s)


def _walk(items: _Items, tokens: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Events depth-first. A stem's event comes before the items on it, which share all of it; what
    follows its subtree shares with any part of that what it shares with the stem."""
    events: list[int] = []
    before: list[int] = []
    depth: list[int] = []
    stack = [(0, 0)]
    while stack:
        k, place = stack.pop()
        below = items.on_stem[k]
        while place < len(below):
            item = below[place]
            events.append(item)
            before.append(below[place - 1] if place else item)
            depth.append(items.stem_length[k])
            place += 1
            if item >= items.num_sequences:
                stack += [(k, place), (item - items.num_sequences, 0)]
                break
    event_E, before_E = np.array(events, np.int64), np.array(before, np.int64)
    start, length = np.array(items.start, np.int64), _tail_lengths(items)
    limit_E = np.minimum(length[before_E], length[event_E])
    limit_E[before_E == event_E] = 0
    shared_E = shared_lengths(tokens, start[before_E], start[event_E], limit_E)
    return event_E, shared_E + np.array(depth, np.int64)


def _tail_lengths(items: _Items) -> NDArray[np.int64]:
    return np.array([len(tail) for tail in items.tail], np.int64) // _TOKEN_BYTES


def shared_lengths(
    tokens: NDArray[np.int32],
    left: NDArray[np.int64],
    right: NDArray[np.int64],
    limit: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Equal tokens from left[i] and right[i] on in `tokens`, at most limit[i]; int64 [n].

    Windows grow as long as a pair still agrees, so the work is within a constant of the answer.
    """
    shared = limit.copy()
    last = len(tokens) - 1
    active = np.flatnonzero(limit > 0)
    offset, width = 0, _FIRST_WINDOW
    while len(active):
        span = np.arange(offset, offset + width)
        agreeing: list[NDArray[np.int64]] = []
        for block in np.array_split(active, -(-len(active) * width // _MAX_BLOCK)):
            left_tokens = tokens[np.minimum(left[block, None] + span, last)]
            right_tokens = tokens[np.minimum(right[block, None] + span, last)]
            ends = (left_tokens != right_tokens) | (span >= limit[block, None])
            first = ends.argmax(axis=1)
            is_found = ends[np.arange(len(block)), first]
            shared[block[is_found]] = offset + first[is_found]
            agreeing.append(block[~is_found])
        active = np.concatenate(agreeing)
        offset, width = offset + width, min(4 * width, _MAX_WINDOW)
    return shared


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedPrefixes:
    """All S sequences by temperature, then lexicographic by token id, ties in request order.

    Of a batch with recorded routes, those of equal tokens and routes beside each other.
    """

    # int64 [S]: sequence indexes; int64 [S]: their inverse, place of each sequence.
    order: NDArray[np.int64]
    rank: NDArray[np.int64]
    # int64 [S]: tokens that order[i] shares with order[i - 1]; 0 for the first of a temperature.
    lcp: NDArray[np.int64]
    # The prefixes by tokens only, if the batch has routes.
    by_tokens: SortedPrefixes | None = None


def sort_sequences(batch: RolloutBatch) -> SortedPrefixes:
    """Sort the sequences of `batch`. Sequences of different temperature share nothing."""
    events, event_lcp = trie_events(batch)
    places = np.flatnonzero(events < batch.num_sequences)
    # A stable sort leaves the sequences of one temperature in trie order.
    places = places[np.argsort(batch.temperature[events[places]], kind="stable")]
    order = events[places]
    lcp = np.empty(len(order), np.int64)
    first = np.flatnonzero(np.diff(batch.temperature[order], prepend=np.float32(np.nan)))
    for start, stop in pairwise([*first, len(order)]):
        lcp[start:stop] = shared_with_previous(event_lcp, places[start:stop])
    by_tokens = _ranked(order, lcp)
    if batch.routed_experts is None:
        return by_tokens
    return _ranked(*split_by_routes(batch, order, lcp), by_tokens)


def route_conflicts(prefixes: SortedPrefixes, sequences: NDArray[np.int64]) -> int:
    """Tokens that `sequences` would share more, packed together, if all routes agreed."""

    def shared(found: SortedPrefixes) -> int:
        places = np.sort(found.rank[sequences])
        return int(shared_with_previous(found.lcp, places).sum())

    return 0 if prefixes.by_tokens is None else shared(prefixes.by_tokens) - shared(prefixes)


def _ranked(
    order: NDArray[np.int64], lcp: NDArray[np.int64], by_tokens: SortedPrefixes | None = None
) -> SortedPrefixes:
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return SortedPrefixes(order=order, rank=rank, lcp=lcp, by_tokens=by_tokens)


def shared_with_previous(lcp: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens that each of some sorted sequences shares with the one before it of them, int64 [n].

    `places` int64 [n], ascending, index `lcp`, each place's count of what it shares with the place
    before. The first gets 0.
    """
    shared = np.zeros(len(places), np.int64)
    if len(places) > 1:
        shared[1:] = np.minimum.reduceat(lcp[: places[-1] + 1], places[:-1] + 1)
    return shared
