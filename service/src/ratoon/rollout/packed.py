"""The types between a batch and a device: forest, plan, packed batch.

`forest.build_forest` and friends make them; `train` consumes them. Invariant of all three: sequence
indexes are those of the `RolloutBatch`, packed indexes are positions in depth-first order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """Prefix trees over S sequences: M nodes in packed order, T packed tokens.

    Node m owns packed tokens [node_start[m], node_stop[m]), never none; its subtree ends at
    node_end[m]; children follow their parent, heaviest subtree first.
    """

    # int32 [T]: token ids in packed order.
    tokens: NDArray[np.int32]
    # int32 [M]; -1: root.
    node_parent: NDArray[np.int32]
    # int64 [M] each; node_depth is the position of the node's first token.
    node_start: NDArray[np.int64]
    node_stop: NDArray[np.int64]
    node_end: NDArray[np.int64]
    node_depth: NDArray[np.int64]
    # int64 [S]: sequence indexes of the batch in this forest, ascending.
    sequences: NDArray[np.int64]
    # int32 [S]: node that holds the sequence's last token; -1 for an empty sequence.
    sequence_node: NDArray[np.int32]
    # int64 [S].
    sequence_length: NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Packed tokens [start, stop) of a micro-batch that are run in one forward.

    `parent` is the index of the stage in which the paths of its tokens go on upwards, which has a
    parent itself; -1: they begin in this one.
    """

    start: int
    stop: int
    parent: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Sequences whose forest is packed once, and run at once or streamed.

    Streamed, its stages run in order. One that is a parent stays, keys, values and graph, until
    all that descend from it have been run forward and backward; only then it is run backward.
    """

    # Batch sequence indexes, ascending.
    sequences: tuple[int, ...]
    packed_tokens: int
    # A partition of the packed tokens, in order; empty: all are run at once.
    stages: tuple[Stage, ...] = ()
    # The rank that runs it, or the first of those that do.
    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlan:
    """How one batch is cut. Journaled before it is applied; replay executes it as it stands."""

    micro_batches: tuple[MicroBatch, ...]
    micro_batch_tokens: int
    # Totals of the plan: tokens and causal (query, key) pairs, each rollout alone against packed.
    unshared_tokens: int
    packed_tokens: int
    replicated_pairs: int
    packed_pairs: int
    # Batch sequence indexes, ascending: they share nothing with what sorts before them, as that
    # would cost more than it saves (`gate`).
    unshared: tuple[int, ...] = ()
    # Modelled cost of the longest rank over the mean of all ranks, less 1.
    rank_gap: float = 0.0
    # So many ranks run each micro-batch together: its own and those that follow it. It divides
    # `MicroBatch.rank`, so that the same ranks meet in all.
    sequence_ranks: int = 1

    @property
    def is_one_backward(self) -> bool:
        """Whether each parameter gets one gradient at most, on each rank."""
        ranks = [part.rank for part in self.micro_batches]
        return len({*ranks}) == len(ranks) and not any(part.stages for part in self.micro_batches)

    def of_rank(self, rank: int) -> UpdatePlan:
        """The plan with only the micro-batches of `rank`, if there are any.

        Counts of tokens and pairs stay those of the whole plan, and so does `unshared`, which the
        prefixes of every rank are made from.
        """
        first = rank - rank % self.sequence_ranks
        own = tuple(part for part in self.micro_batches if part.rank == first)
        return replace(self, micro_batches=own)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTokens:
    """Tokens that truncation left: int32 [N] ids; int64 [n + 1], offsets of n tokens or rows."""

    tokens: NDArray[np.int32]
    offsets: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """One micro-batch, ready to be put on a device.

    A *target* is a distinct trained packed token; it is predicted by the row just before it on its
    path. A *term* is one (sequence, trained token) pair; several terms may share a target. Where
    terms of a packed token have different sampling masks, it is a target, and is predicted by a
    row, for each of them. Beside its target a term may have *candidates*: other tokens whose
    log-probs its row gives.
    """

    forest: Forest
    # int64 [T]: depth on the path.
    position: NDArray[np.int64]
    # int32 [T]: one past the packed index of the subtree of the token's node.
    end: NDArray[np.int32]
    # int32 [T]: sequences that the token is part of.
    copies: NDArray[np.int32]
    # int64 [R]: predicting rows, ascending packed index; float32 [R].
    row_index: NDArray[np.int64]
    row_temperature: NDArray[np.float32]
    # int64 [M targets]: token id and index in row_index.
    target_token: NDArray[np.int64]
    target_row: NDArray[np.int64]
    # int64 [terms]: index of the target; index of the sequence in `forest.sequences`; index of the
    # response token in the batch's columns (0 .. J - 1). Terms are in request order.
    term_target: NDArray[np.int64]
    term_sequence: NDArray[np.int64]
    term_token: NDArray[np.int64]
    # int32 [terms, K]: ids of candidates; None: there are none.
    term_candidates: NDArray[np.int32] | None = None
    # int16 [L, T, C]: recorded experts by layer with experts, -1 of a token without; None: of none.
    routes: NDArray[np.int16] | None = None
    # What each row keeps, nothing if it has no mask; None: no row has one.
    kept: KeptTokens | None = None
