"""Where each response token of a forest's sequences lies in packed order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.packed import Forest
from ratoon.rollout.ragged import ragged_arange


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTokens:
    """Response tokens of the sequences of a forest, in request order."""

    # int64 [n]: index in the batch's columns (0 .. J - 1).
    column: NDArray[np.int64]
    # int64 [n]: packed index.
    packed: NDArray[np.int64]
    # int64 [S of the forest]: response tokens of each sequence.
    lengths: NDArray[np.int64]


def response_tokens(batch: RolloutBatch, forest: Forest) -> ResponseTokens:
    """Follow every sequence's path from its last token back to its prompt."""
    start = batch.response_offsets[forest.sequences]
    lengths = batch.response_offsets[forest.sequences + 1] - start
    node_parent = forest.node_parent.tolist()
    node_depth = forest.node_depth.tolist()
    # Packed index of depth 0 if the node's run went on above it.
    node_origin = (forest.node_start - forest.node_depth).tolist()
    piece_start: list[int] = []
    piece_length: list[int] = []
    # Backwards over sequences and nodes, so that all pieces can be turned round at the end.
    for node, stop, num_tokens in zip(
        forest.sequence_node[::-1].tolist(),
        forest.sequence_length[::-1].tolist(),
        lengths[::-1].tolist(),
        strict=True,
    ):
        prompt_stop = stop - num_tokens
        while stop > prompt_stop:
            depth = max(node_depth[node], prompt_stop)
            piece_start.append(node_origin[node] + depth)
            piece_length.append(stop - depth)
            stop, node = depth, node_parent[node]
    return ResponseTokens(
        column=ragged_arange(start, lengths),
        packed=ragged_arange(
            np.array(piece_start[::-1], np.int64), np.array(piece_length[::-1], np.int64)
        ),
        lengths=lengths,
    )


def predecessors(forest: Forest) -> NDArray[np.int64]:
    """Packed index of the token before each packed token on its path, int64 [T]; -1: none."""
    before = np.arange(-1, forest.num_tokens - 1)
    parent_stop = np.append(forest.node_stop, 0)[forest.node_parent]
    before[forest.node_start] = parent_stop - 1
    return before
