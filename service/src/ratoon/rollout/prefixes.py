"""Sequences in trie order, each with the number of tokens it shares with the one before it.

Any two sequences share the minimum of the counts between them; tokens are compared by id, never by
hash.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.route_prefixes import split_by_routes
from ratoon.rollout.stems import trie_events


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
    for start, stop in zip(first, [*first[1:], len(order)], strict=True):
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
