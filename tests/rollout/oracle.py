"""Brute force beside `ratoon.rollout`: tries as dictionaries of prefixes, loops for everything.

Enters a `RolloutBatch`, leave sets and lists to compare with. Invariant: nothing of the forest, the
plan or the packing is imported.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ratoon.rollout.batch import RolloutBatch

# A token's place in a trie: the temperature and all tokens up to it.
Prefix = tuple[float, tuple[int, ...]]


def sequences(batch: RolloutBatch) -> list[tuple[int, ...]]:
    """Prompt and response of each sequence."""
    return [tuple(batch.sequence_tokens(s).tolist()) for s in range(batch.num_sequences)]


def prefixes(batch: RolloutBatch, s: int) -> list[Prefix]:
    """Every non-empty prefix of sequence s, shortest first."""
    tokens = tuple(batch.sequence_tokens(s).tolist())
    return [(float(batch.temperature[s]), tokens[: n + 1]) for n in range(len(tokens))]


def holders(batch: RolloutBatch, chosen: Iterable[int]) -> dict[Prefix, set[int]]:
    """The sequences of `chosen` that hold each distinct prefix: packed tokens are its keys."""
    held: dict[Prefix, set[int]] = {}
    for s in chosen:
        for prefix in prefixes(batch, s):
            held.setdefault(prefix, set()).add(s)
    return held


def group_of(batch: RolloutBatch, s: int) -> int:
    return next(g for g in range(batch.num_groups) if s < batch.group_offsets[g + 1])


def response_prefixes(batch: RolloutBatch, s: int) -> list[tuple[int, Prefix]]:
    """(column index j, prefix that ends there) of each response token of sequence s."""
    start, stop = batch.response_offsets[s : s + 2].tolist()
    return list(zip(range(start, stop), prefixes(batch, s)[-(stop - start) :], strict=False))


def owner_mask(batch: RolloutBatch, kept: Iterable[int]) -> NDArray[np.bool_]:
    """Trained tokens of kept sequences, each prefix with the first sequence that trains it only."""
    mask = np.zeros(len(batch.loss_mask), np.bool_)
    seen: set[Prefix] = set()
    for s in sorted(kept):
        for j, prefix in response_prefixes(batch, s):
            if batch.loss_mask[j] and prefix not in seen:
                seen.add(prefix)
                mask[j] = True
    return mask


def num_packed(batch: RolloutBatch, chosen: Iterable[int]) -> int:
    return len(holders(batch, chosen))


def num_packed_pairs(batch: RolloutBatch, chosen: Iterable[int], window: int | None = None) -> int:
    """Each packed token attends to itself and to what is before it on its path, or to the last
    `window` of these."""
    seen = (len(tokens) for _, tokens in holders(batch, chosen))
    return sum(count if window is None else min(count, window) for count in seen)
