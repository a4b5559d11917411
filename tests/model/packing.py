"""Sequences packed as prefix trees, by the book: what the model's tests feed it.

In: token lists. Out: packed tokens, positions, node table, and where each sequence's tokens lie.
Invariant: nothing of the product's packing is used; equal prefixes are merged, nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ratoon_kernels import TreeLayout, build_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    tokens_T: Tensor
    position_T: Tensor
    layout: TreeLayout
    # Packed indexes of each sequence's tokens, in the order of the sequence.
    paths: list[list[int]]


def pack(sequences: list[list[int]], device: str = "cpu") -> Packed:
    """One node a token: the finest forest there is, depth-first, children by first appearance."""
    tokens, positions, parents, ends = [], [], [], []
    paths: list[list[int]] = [[] for _ in sequences]

    def visit(members: list[int], depth: int, parent: int) -> None:
        by_token: dict[int, list[int]] = {}
        for member in members:
            if depth < len(sequences[member]):
                by_token.setdefault(sequences[member][depth], []).append(member)
        for token, sharing in by_token.items():
            index = len(tokens)
            tokens.append(token)
            positions.append(depth)
            parents.append(parent)
            ends.append(0)
            for member in sharing:
                paths[member].append(index)
            visit(sharing, depth + 1, index)
            ends[index] = len(tokens)

    visit(list(range(len(sequences))), 0, -1)
    start = np.arange(len(tokens), dtype=np.int64)
    layout = build_layout(
        node_start=start,
        node_stop=start + 1,
        node_end=np.array(ends, dtype=np.int64),
        node_parent=np.array(parents, dtype=np.int32),
        device=torch.device(device),
    )
    return Packed(
        tokens_T=torch.tensor(tokens, device=device),
        position_T=torch.tensor(positions, device=device),
        layout=layout,
        paths=paths,
    )


def branching_sequences(seed: int, *, vocab_size: int = 60) -> list[list[int]]:
    """Seven sequences that share prefixes down to depth 3, one of them a strict prefix of another,
    two of them equal, and one that shares nothing."""
    rng = np.random.default_rng(seed)

    def some(low: int, high: int) -> list[int]:
        return rng.integers(0, vocab_size, int(rng.integers(low, high))).tolist()

    root, middle, deep = some(4, 9), some(2, 6), some(1, 4)
    leaf = root + middle + deep + some(2, 5)
    return [
        leaf,
        root + middle + deep + some(2, 7),
        root + middle + some(3, 8),
        root + middle,
        leaf,
        root + some(5, 9),
        some(3, 9),
    ]
