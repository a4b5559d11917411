"""The validated batch: every rollout of an operation in columns, in request order.

With it the index arithmetic over its rows of different length, which has no loop over rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """G groups and S sequences (rollouts); J response tokens in all, concatenated in request order.

    A sequence is its group's prompt followed by its response. Optional columns are there for all
    rollouts of the batch or for none. Values where `loss_mask` is false are finite and unused.
    """

    group_ids: tuple[str, ...]
    # int64 [G + 1]: sequences of group g are [group_offsets[g], group_offsets[g + 1]).
    group_offsets: NDArray[np.int64]
    # int32 [sum of P], int64 [G + 1].
    prompt_tokens: NDArray[np.int32]
    prompt_offsets: NDArray[np.int64]
    # int32 [J], int64 [S + 1].
    response_tokens: NDArray[np.int32]
    response_offsets: NDArray[np.int64]
    # bool [J].
    loss_mask: NDArray[np.bool_]
    # float32 [J], at the sampling temperature unless sampler_is_raw says otherwise.
    sampler_logprobs: NDArray[np.float32] | None
    old_logprobs: NDArray[np.float32] | None
    reference_logprobs: NDArray[np.float32] | None
    # Exactly one of rewards float64 [S] and advantages float32 [J], or neither (cross_entropy,
    # Forward).
    rewards: NDArray[np.float64] | None
    advantages: NDArray[np.float32] | None
    # float32 [J], signed; cross_entropy only.
    token_weights: NDArray[np.float32] | None
    # float32 [S], > 0.
    temperature: NDArray[np.float32]
    # bool [S].
    sampler_is_raw: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    # int64 [S]; -1: not said. The oldest, where several versions sampled a rollout.
    policy_version: NDArray[np.int64]
    # float32 [S] in (0, 1], 1: off; int32 [S], 0: off.
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int32]
    # int64 [J]; -1: not said. None: of each token its rollout's.
    token_version: NDArray[np.int64] | None = None
    # Experts that the sampler recorded, uint8 or uint16 [N, L, C], ascending within a token, of N
    # tokens in layers with experts; int64 [S]: the first token of each sequence, prompt and
    # response, with a row; int64 [S + 1]: offsets of its rows, one token after the other. None,
    # all of them: no rollout has any. Tokens without a row are routed by the policy.
    routed_experts: NDArray[np.unsignedinteger] | None = None
    route_first: NDArray[np.int64] | None = None
    route_offsets: NDArray[np.int64] | None = None
    # Tokens that a truncating sampler kept of each trained token of the rollouts that say so, int32
    # [N], ascending within a token, itself among them; int64 [J + 1]: offsets of each response
    # token's. None, both: no rollout says so. A token without any has the whole vocabulary.
    sampling_mask: NDArray[np.int32] | None = None
    mask_offsets: NDArray[np.int64] | None = None
    # bool [J]: tokens that are outside of their own mask, and not trained for it; None: none is.
    outside_mask: NDArray[np.bool_] | None = None
    # A teacher's K likeliest tokens at each response token, int32 [J, K], distinct, and their
    # log-probs, float32 [J, K], not ascending; zeros where the loss mask is false. Tokens alone: of
    # a Forward that answers their log-probs.
    teacher_tokens: NDArray[np.int32] | None = None
    teacher_logprobs: NDArray[np.float32] | None = None
    # float32 [J]: returns, and values of an earlier version; for the value term of a loss.
    returns: NDArray[np.float32] | None = None
    old_values: NDArray[np.float32] | None = None
    # What was sent, where rollouts that cannot be trained were dropped. Ids of all groups; int64
    # [G] and [S]: index of each group among them, and of each rollout in its group; int64 [B, 5],
    # what was dropped, in request order: group, rollout, code of the reason, response token or -1,
    # response tokens. None, all of them: nothing was dropped.
    sent_ids: tuple[str, ...] | None = None
    sent_group: NDArray[np.int64] | None = None
    sent_rollout: NDArray[np.int64] | None = None
    bad_rollouts: NDArray[np.int64] | None = None

    @property
    def num_groups(self) -> int:
        return len(self.group_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.response_offsets) - 1

    def sequence_tokens(self, sequence: int) -> NDArray[np.int32]:
        """Prompt and response of one sequence, int32 [P + R]."""
        group = int(np.searchsorted(self.group_offsets, sequence, side="right")) - 1
        prompt = self.prompt_tokens[self.prompt_offsets[group] : self.prompt_offsets[group + 1]]
        start, stop = self.response_offsets[sequence], self.response_offsets[sequence + 1]
        return np.concatenate([prompt, self.response_tokens[start:stop]])


def ragged_arange(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """lengths[0] numbers from starts[0] on, then row 1's, and so on; int64 [sum of lengths]."""
    stops = np.cumsum(lengths)
    total = int(stops[-1]) if len(stops) else 0
    flat = np.repeat(starts - stops + lengths, lengths)
    flat += np.arange(total)
    return flat


def offsets_of(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Lengths [n] to offsets [n + 1], starting at 0."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def group_of_sequence(batch: RolloutBatch) -> NDArray[np.int64]:
    """Index of each sequence's group, int64 [S]."""
    return np.repeat(np.arange(batch.num_groups), np.diff(batch.group_offsets))


def sent_places(batch: RolloutBatch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Index of each sequence's group, and of the sequence in it, as sent; int64 [S] each."""
    group_S = group_of_sequence(batch)
    if batch.sent_group is not None and batch.sent_rollout is not None:
        return batch.sent_group[group_S], batch.sent_rollout
    return group_S, np.arange(batch.num_sequences) - batch.group_offsets[group_S]


def sent_field(batch: RolloutBatch, sequence: int) -> str:
    """Path of a sequence in the request: `groups[3].rollouts[17]`."""
    group_S, rollout_S = sent_places(batch)
    return f"groups[{group_S[sequence]}].rollouts[{rollout_S[sequence]}]"


def sent_index(batch: RolloutBatch, sequence: int) -> int:
    """Index of a sequence among all rollouts of the request, those that were dropped included."""
    if batch.bad_rollouts is None:
        return sequence
    group, rollout = (int(place_S[sequence]) for place_S in sent_places(batch))
    bad_group, bad_rollout = batch.bad_rollouts[:, :2].T
    is_before = (bad_group < group) | ((bad_group == group) & (bad_rollout < rollout))
    return sequence + int(np.count_nonzero(is_before))


def prompt_lengths(batch: RolloutBatch) -> NDArray[np.int64]:
    """Tokens of each sequence's prompt, int64 [S]."""
    return np.diff(batch.prompt_offsets)[group_of_sequence(batch)]


def sequence_lengths(batch: RolloutBatch) -> NDArray[np.int64]:
    """Tokens of prompt and response of each sequence, int64 [S]."""
    return prompt_lengths(batch) + np.diff(batch.response_offsets)
