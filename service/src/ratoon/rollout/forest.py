"""Prefix trees from sorted sequences, and the index arrays that a device needs of them.

Each run of tokens that the same sequences share is one node. The order of the request decides
nothing but which of two equally heavy siblings comes first. The row that predicts a token is the
one before it on its path: the last prompt token predicts the first token of every response.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ratoon.rollout.batch import RolloutBatch, group_of_sequence, ragged_arange, sequence_lengths
from ratoon.rollout.packed import Forest, KeptTokens, PackedBatch
from ratoon.rollout.prefixes import SortedPrefixes, shared_with_previous
from ratoon.rollout.routes import packed_routes
from ratoon.rollout.sampling_masks import kept_of, kept_tokens, number_masks

# A table of what indexes may be pays for itself up to so many times their number.
_SPARSE = 16


def build_forest(
    batch: RolloutBatch, prefixes: SortedPrefixes, sequences: NDArray[np.int64] | None
) -> Forest:
    """The forest of `sequences` (int64, distinct, ascending; None: all of the batch).

    A sequence that another one continues ends at an internal node; equal sequences end at the same
    node; an empty one has node -1.
    """
    if sequences is None:
        sequences = np.arange(batch.num_sequences)
    places = np.sort(prefixes.rank[sequences])
    length_S = sequence_lengths(batch)
    sorted_sequence = prefixes.order[places]
    lcp = shared_with_previous(prefixes.lcp, places)
    parent_M, stop_M, sample_M, node_of = _grow(lcp.tolist(), length_S[sorted_sequence].tolist())
    depth_M = np.where(parent_M < 0, 0, stop_M[parent_M])
    weight_M, first_M = _weigh(parent_M, stop_M, stop_M - depth_M, sorted_sequence, node_of)
    preorder = _preorder(parent_M, weight_M, first_M)

    packed = np.empty(len(preorder) + 1, np.int32)
    packed[preorder] = np.arange(len(preorder))
    packed[-1] = -1  # parent of a root, node of an empty sequence
    own = (stop_M - depth_M)[preorder]
    node_stop = np.cumsum(own)
    node_start = node_stop - own
    node_depth = depth_M[preorder]
    sequence_node = np.empty(len(sequences), np.int32)
    sequence_node[np.searchsorted(sequences, sorted_sequence)] = packed[node_of]
    return Forest(
        tokens=_gather_tokens(batch, sorted_sequence[sample_M[preorder]], node_depth, own),
        node_parent=packed[parent_M[preorder]],
        node_start=node_start,
        node_stop=node_stop,
        node_end=node_start + weight_M[preorder],
        node_depth=node_depth,
        sequences=sequences,
        sequence_node=sequence_node,
        sequence_length=length_S[sequences],
    )


def _grow(
    lcp: list[int], lengths: list[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Nodes of the trie of sorted sequences; node numbers are in order of creation.

    Returns per node the parent (-1: root), the depth where it stops and a sequence that holds it;
    per sequence the node where it ends (-1: empty). Sequences are by place in the sorted order.
    """
    parent: list[int] = []
    stop: list[int] = []
    sample: list[int] = []
    node_of: list[int] = []
    # Nodes from the root to the end of the sequence before.
    path: list[int] = []
    for i, shared in enumerate(lcp):
        below = -1
        while path and stop[path[-1]] > shared:
            below = path.pop()
        top = path[-1] if path else -1
        if below >= 0 and shared > (stop[top] if path else 0):
            # The sequence leaves in the middle of `below`: its upper part becomes a node.
            parent.append(top)
            stop.append(shared)
            sample.append(i)
            top = parent[below] = len(parent) - 1
            path.append(top)
        if lengths[i] > shared:
            parent.append(top)
            stop.append(lengths[i])
            sample.append(i)
            top = len(parent) - 1
            path.append(top)
        node_of.append(top)
    return (
        np.array(parent, np.int64),
        np.array(stop, np.int64),
        np.array(sample, np.int64),
        np.array(node_of, np.int64),
    )


def _weigh(
    parent_M: NDArray[np.int64],
    stop_M: NDArray[np.int64],
    own_M: NDArray[np.int64],
    sorted_sequence: NDArray[np.int64],
    node_of: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens of each node's subtree, and the first in request order of its sequences; int64 [M]."""
    weight: list[int] = own_M.tolist()
    first = [int(sorted_sequence.max(initial=0)) + 1] * len(weight)
    for sequence, node in zip(sorted_sequence.tolist(), node_of.tolist(), strict=True):
        if node >= 0 and sequence < first[node]:
            first[node] = sequence
    parent: list[int] = parent_M.tolist()
    # A child stops deeper than its parent, so deepest first is children first.
    bottom_up: list[int] = np.argsort(-stop_M).tolist()
    for node in bottom_up:
        above = parent[node]
        if above >= 0:
            weight[above] += weight[node]
            first[above] = min(first[above], first[node])
    return np.array(weight, np.int64), np.array(first, np.int64)


def _preorder(
    parent_M: NDArray[np.int64], weight_M: NDArray[np.int64], first_M: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Nodes depth-first, heaviest sibling first, ties in request order; int64 [M]."""
    parent: list[int] = parent_M.tolist()
    # The last list is of the roots, whose parent is -1.
    children: list[list[int]] = [[] for _ in range(len(parent) + 1)]
    lightest_first: list[int] = np.lexsort((-first_M, weight_M)).tolist()
    for node in lightest_first:
        children[parent[node]].append(node)
    preorder: list[int] = []
    stack = children[-1]
    while stack:
        node = stack.pop()
        preorder.append(node)
        stack += children[node]
    return np.array(preorder, np.int64)


def _gather_tokens(
    batch: RolloutBatch,
    sample: NDArray[np.int64],
    depth: NDArray[np.int64],
    own: NDArray[np.int64],
) -> NDArray[np.int32]:
    """Tokens [depth, depth + own) of each sample sequence, one after the other, int32 [T]."""
    group = group_of_sequence(batch)[sample]
    prompt_start = batch.prompt_offsets[group]
    length = batch.prompt_offsets[group + 1] - prompt_start
    shift = batch.response_offsets[sample] - length
    stop = depth + own
    bounds = np.stack(
        [
            prompt_start + np.minimum(depth, length),
            prompt_start + np.minimum(stop, length),
            shift + np.maximum(depth, length),
            shift + np.maximum(stop, length),
        ],
        axis=1,
    )
    pieces: list[NDArray[np.int32]] = [np.empty(0, np.int32)]
    # Slices are copied whole: much quicker than gathering by index, as nodes are long.
    for prompt_from, prompt_to, response_from, response_to in bounds.tolist():
        if prompt_from < prompt_to:
            pieces.append(batch.prompt_tokens[prompt_from:prompt_to])
        if response_from < response_to:
            pieces.append(batch.response_tokens[response_from:response_to])
    return np.concatenate(pieces)


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


def pack(
    batch: RolloutBatch,
    forest: Forest,
    term_mask_J: NDArray[np.bool_],
    candidates_JK: NDArray[np.int32] | None = None,
) -> PackedBatch:
    """Pack the forest's sequences; their terms are the response tokens where `term_mask_J` holds.

    `term_mask_J` bool [J] may hold outside of the forest too. It must not hold at the first token
    of a sequence without a prompt (validation refuses such a loss mask). `candidates_JK`, int32
    [J, K]: ids of each response token's candidates.
    """
    own = forest.node_stop - forest.node_start
    response = response_tokens(batch, forest)
    is_term = term_mask_J[response.column]
    sequence = np.repeat(np.arange(len(forest.sequences)), response.lengths)
    term_packed = response.packed[is_term]

    term_token, before = response.column[is_term], predecessors(forest)
    kept, masks = kept_tokens(batch), 1
    if kept is not None:
        # The number of its mask tells a term from others of its packed token.
        number = number_masks(kept, before[term_packed], term_token)
        masks = int(number.max(initial=0)) + 1
        term_packed = term_packed * masks + number
    target, term_target = _distinct(term_packed, forest.num_tokens * masks)
    target_packed, target_number = _split(target, masks)
    row_of_target = before[target_packed]
    assert not len(row_of_target) or row_of_target.min() >= 0, "a first token is trained"
    row, target_row = _distinct(row_of_target * masks + target_number, forest.num_tokens * masks)
    row_index, _ = _split(row, masks)
    return PackedBatch(
        forest=forest,
        position=np.arange(forest.num_tokens)
        - np.repeat(forest.node_start - forest.node_depth, own),
        end=np.repeat(forest.node_end.astype(np.int32), own),
        copies=np.repeat(sequences_through(forest).astype(np.int32), own),
        row_index=row_index,
        row_temperature=_tree_temperature(batch, forest, row_index),
        target_token=forest.tokens[target_packed].astype(np.int64),
        target_row=target_row,
        term_target=term_target,
        term_sequence=sequence[is_term],
        term_token=term_token,
        term_candidates=None if candidates_JK is None else candidates_JK[term_token],
        routes=packed_routes(batch, forest),
        kept=None if kept is None else _kept_of_rows(kept, term_token, target_row[term_target]),
    )


def sequences_through(
    forest: Forest, weight_S: NDArray[np.float64] | None = None
) -> NDArray[np.int64] | NDArray[np.float64]:
    """[M]: sequences that end in each node or below it; with weights, the sum of theirs."""
    is_held = forest.sequence_node >= 0
    ends = np.bincount(
        forest.sequence_node[is_held],
        None if weight_S is None else weight_S[is_held],
        minlength=len(forest.node_start),
    )
    ended = np.zeros(len(ends) + 1, ends.dtype)
    np.cumsum(ends, out=ended[1:])
    # Nodes are in packed order: those below one follow it, up to its end.
    stop = np.searchsorted(forest.node_start, forest.node_end)
    return ended[stop] - ended[:-1]


def _kept_of_rows(
    kept: KeptTokens, term_token: NDArray[np.int64], term_row: NDArray[np.int64]
) -> KeptTokens | None:
    """What each row keeps, as any of its terms does; None: no row has a mask."""
    token_of_row = np.empty(term_row.max(initial=-1) + 1, np.int64)
    token_of_row[term_row] = term_token
    of_rows = kept_of(kept, token_of_row)
    return of_rows if len(of_rows.tokens) else None


def _split(
    index: NDArray[np.int64], masks: int
) -> tuple[NDArray[np.int64], NDArray[np.int64] | int]:
    """Packed indexes, and numbers of masks in [0, masks), of what was made of both."""
    return (index, 0) if masks == 1 else np.divmod(index, masks)


def _distinct(index: NDArray[np.int64], size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Distinct values of `index` (each in [0, size)), ascending, and each value's place in them."""
    if size > _SPARSE * len(index):
        return np.unique(index, return_inverse=True)
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
