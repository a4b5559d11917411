"""What the open stages of a forest share: the forest of their tokens, and each layer's stacks.

A stage's place in a stack is the number of tokens before it in its path, so that a path's keys are
one run without a gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ratoon_kernels import Span, TreeLayout, build_layout
from ratoon_kernels.precision import accumulation_dtype


def path_layout(layout: TreeLayout, spans: Sequence[Span]) -> TreeLayout:
    """The forest of the packed tokens in `spans` alone, ranges of whole nodes in packed order.

    Each node's parent is in them. Where `spans` is one that is all, that is the layout itself.
    """
    if list(spans) == [Span(0, layout.num_tokens)]:
        return layout
    start, stop, end, parent = layout.node_table_M4.numpy().T
    is_in = np.zeros(len(start), np.bool_)
    tokens_before = np.zeros((3, len(start)), np.int64)
    for span in spans:
        is_in |= (span.start <= start) & (start < span.stop)
        tokens_before += np.clip(np.stack((start, stop, end)) - span.start, 0, len(span))
    starts, stops, ends = tokens_before[:, is_in]
    index = np.cumsum(is_in) - 1
    parents = parent[is_in]
    return build_layout(
        node_start=starts,
        node_stop=stops,
        node_end=ends,
        node_parent=np.where(parents < 0, -1, index[parents]),
        device=layout.device,
    )


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Keys and values, or the sums of their gradients."""

    k_SKH: Tensor
    v_SKH: Tensor

    def __getitem__(self, tokens: slice) -> KeyPair:
        return KeyPair(self.k_SKH[tokens], self.v_SKH[tokens])


class PathStacks:
    """Keys and values of one layer's open stages, and sums of gradients; as views of two stacks."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._keys: KeyPair | None = None
        self._sums: KeyPair | None = None

    def write(self, own: Span, keys: KeyPair) -> None:
        """Put keys and values in their place."""
        if self._keys is None:
            self._keys = self._room(keys, keys.k_SKH.dtype)
        place = self._keys[own.start : own.stop]
        place.k_SKH.copy_(keys.k_SKH)
        place.v_SKH.copy_(keys.v_SKH)

    def keys(self, stop: int) -> KeyPair:
        """All that were written before `stop`."""
        assert self._keys is not None, "a prefix is forwarded before, and run backward after"
        return self._keys[:stop]

    def sums(self, stop: int) -> KeyPair:
        """Of all before `stop`; what nobody has cleared is of a stage that is over."""
        if self._sums is None:
            keys = self.keys(0)
            self._sums = self._room(keys, accumulation_dtype(keys.k_SKH.dtype))
        return self._sums[:stop]

    def _room(self, like: KeyPair, dtype: torch.dtype) -> KeyPair:
        shape = (self._num_tokens, *like.k_SKH.shape[1:])
        return KeyPair(*(torch.empty(shape, dtype=dtype, device=like.k_SKH.device) for _ in "kv"))
