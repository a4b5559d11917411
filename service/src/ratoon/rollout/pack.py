"""A forest and the tokens to train on as the index arrays that a device needs.

The row that predicts a token is the one before it on its path: the last prompt token predicts the
first token of every response.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.forest import predecessors, response_tokens
from ratoon.rollout.packed import Forest, PackedBatch
from ratoon.rollout.routes import packed_routes


def pack(batch: RolloutBatch, forest: Forest, term_mask_J: NDArray[np.bool_]) -> PackedBatch:
    """Pack the forest's sequences; their terms are the response tokens where `term_mask_J` holds.

    `term_mask_J` bool [J] may hold outside of the forest too. It must not hold at the first token
    of a sequence without a prompt (validation refuses such a loss mask).
    """
    own = forest.node_stop - forest.node_start
    response = response_tokens(batch, forest)
    is_term = term_mask_J[response.column]
    sequence = np.repeat(np.arange(len(forest.sequences)), response.lengths)
    term_packed = response.packed[is_term]

    target_packed, term_target = _distinct(term_packed, forest.num_tokens)
    row_of_target = predecessors(forest)[target_packed]
    assert not len(row_of_target) or row_of_target.min() >= 0, "a first token is trained"
    row_index, target_row = _distinct(row_of_target, forest.num_tokens)
    return PackedBatch(
        forest=forest,
        position=np.arange(forest.num_tokens)
        - np.repeat(forest.node_start - forest.node_depth, own),
        end=np.repeat(forest.node_end.astype(np.int32), own),
        copies=np.repeat(_sequences_through(forest), own),
        row_index=row_index,
        row_temperature=_tree_temperature(batch, forest, row_index),
        target_token=forest.tokens[target_packed].astype(np.int64),
        target_row=target_row,
        term_target=term_target,
        term_sequence=sequence[is_term],
        term_token=response.column[is_term],
        routes=packed_routes(batch, forest),
    )


def _sequences_through(forest: Forest) -> NDArray[np.int32]:
    """int32 [M]: sequences that end in each node or below it."""
    held = forest.sequence_node[forest.sequence_node >= 0]
    ended = np.zeros(len(forest.node_start) + 1, np.int32)
    np.cumsum(np.bincount(held, minlength=len(forest.node_start)), out=ended[1:])
    # Nodes are in packed order: those below one follow it, up to its end.
    stop = np.searchsorted(forest.node_start, forest.node_end)
    return ended[stop] - ended[:-1]


def _distinct(index: NDArray[np.int64], size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Distinct values of `index` (each in [0, size)), ascending, and each value's place in them."""
    is_used = np.zeros(size, np.bool_)
    is_used[index] = True
    # Packed indexes fit int32 (`end` is one), and half the memory traffic is nearly half the time.
    place = np.cumsum(is_used, dtype=np.int32)[index].astype(np.int64)
    place -= 1
    return np.flatnonzero(is_used), place


def _tree_temperature(
    batch: RolloutBatch, forest: Forest, packed: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Temperature of each packed token (ascending), float32: that of its tree, which has one."""
    root_start = forest.node_start[forest.node_parent < 0]
    is_held = forest.sequence_node >= 0
    node_start = forest.node_start[forest.sequence_node[is_held]]
    tree = np.searchsorted(root_start, node_start, side="right") - 1
    temperature = np.empty(len(root_start), np.float32)
    temperature[tree] = batch.temperature[forest.sequences[is_held]]
    bounds = np.searchsorted(packed, np.append(root_start, forest.num_tokens))
    return np.repeat(temperature, np.diff(bounds))
