"""Which prefixes are not shared because sharing them would cost more than it saves.

Sharing runs a prefix once less. But attention goes by tiles: beside those that are full of keys
that it needs, a token reads one for each prefix above its own tokens that begins or ends within it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ratoon.rollout.costs import CostModel, SequenceSizes
from ratoon.rollout.prefixes import SortedPrefixes, shared_with_previous


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
    pairs = shared * (shared + 1) // 2
    saved = costs.token * shared + costs.pair * pairs + costs.row * rows
    price = costs.pair * costs.fork * (lengths - shared)
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
