"""Tokens that a truncating sampler kept (Keep Sampling Mask, DeepSeek-V3.2, arXiv 2512.02556).

The softmax of a trained token of a rollout with a mask is over the tokens that top-k and top-p left
the sampler, itself among them; a token that is not trained has no mask. Paths that share a packed
token but not its mask have a target each, and a row each that predicts it: their hidden state is
the same, their softmax is not.

N kept tokens, J response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon.rollout.batch import RolloutBatch, offsets_of, ragged_arange
from ratoon.rollout.packed import KeptTokens
from ratoon.rollout.raw import (
    RawRollout,
    RawSamplingMask,
    RequestFields,
    first_true,
    join_tokens,
)
from ratoon_proto.types import BadRolloutReason

NAME = "sampling_mask"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingMasks:
    """The columns of a `RolloutBatch`, and its loss mask without tokens outside of their own mask.

    The first two are None where no trained token has a mask, the third where none is outside.
    """

    sampling_mask: NDArray[np.int32] | None
    mask_offsets: NDArray[np.int64] | None
    outside_mask: NDArray[np.bool_] | None
    loss_mask: NDArray[np.bool_]


def recorded_masks(
    rollouts: Sequence[RawRollout],
    response_tokens: NDArray[np.int32],
    loss_mask: NDArray[np.bool_],
    fields: RequestFields,
    *,
    vocab_size: int,
    max_tokens: int,
) -> SamplingMasks:
    """Check and join what rollouts have.

    Raises `RatoonError`: BODY_TOO_LARGE for more than `max_tokens` kept tokens; INVALID_ARGUMENT
    naming the rollout and its response token, unless the fault is noted of the rollout.
    """
    given = [rollout.sampling_mask for rollout in rollouts]
    if all(mask is None for mask in given):
        return SamplingMasks(
            sampling_mask=None, mask_offsets=None, outside_mask=None, loss_mask=loss_mask
        )
    lengths_J = np.concatenate(
        [_lengths(mask, s, vocab_size, fields) for s, mask in enumerate(given)]
    )
    num_kept = int(lengths_J.sum())
    if num_kept > max_tokens:
        raise RatoonError(
            ErrorCode.BODY_TOO_LARGE,
            f"groups: got {num_kept} tokens in sampling masks, expected at most {max_tokens}",
            field="groups",
            got=f"{num_kept} tokens in sampling masks",
            expected=f"at most {max_tokens}",
        )
    token_N = np.repeat(np.arange(len(lengths_J)), lengths_J)
    sent_N = join_tokens([mask.token_ids for mask in given if mask is not None])

    def judge(is_bad_N: NDArray[np.bool_], error_of: Callable[[int, str], RatoonError]) -> None:
        """Judge the response tokens that keep a bad id."""
        is_bad_J = _any_of(token_N[is_bad_N], len(lengths_J))

        def error_at(j: int) -> RatoonError:
            n = int(np.flatnonzero(is_bad_N & (token_N == j))[0])
            return error_of(n, fields.token(j, NAME))

        fields.judge_tokens(is_bad_J, BadRolloutReason.SAMPLING_MASK, error_at)

    judge(
        (sent_N < 0) | (sent_N >= vocab_size),
        lambda n, path: invalid(path, sent_N[n], f"token ids in [0, {vocab_size})"),
    )
    # Tokens ascend, so sorting pairs sorts within each. An id that is out of range is judged.
    pair_N = np.sort(token_N * vocab_size + np.clip(sent_N, 0, vocab_size - 1))
    kept_N = (pair_N - token_N * vocab_size).astype(np.int32)
    judge(
        np.append(pair_N[1:] == pair_N[:-1], np.zeros(min(len(pair_N), 1), np.bool_)),
        lambda n, path: invalid(path, f"{kept_N[n]} twice", "each id once"),
    )
    length_S = np.diff(fields.response_offsets)
    is_meant_J = loss_mask & np.repeat([mask is not None for mask in given], length_S)
    is_in_J = _any_of(token_N[kept_N == response_tokens[token_N]], len(lengths_J))
    untrains_S = [mask is not None and mask.untrain_outside for mask in given]
    outside_J = is_meant_J & ~is_in_J & (lengths_J > 0) & np.repeat(untrains_S, length_S)

    def lacks(j: int) -> RatoonError:
        got = f"{lengths_J[j]} ids without it" if lengths_J[j] else "no ids"
        expected = f"ids with {response_tokens[j]}, which was sampled"
        return invalid(fields.token(j, NAME), got, expected)

    is_lacking_J = is_meant_J & ~is_in_J & ~outside_J
    fields.judge_tokens(is_lacking_J, BadRolloutReason.SAMPLING_MASK, lacks)
    loss_mask = loss_mask & ~outside_J
    is_used_J = is_meant_J & loss_mask
    has_some = bool((is_used_J & (lengths_J > 0)).any())
    return SamplingMasks(
        sampling_mask=kept_N[is_used_J[token_N]] if has_some else None,
        mask_offsets=offsets_of(np.where(is_used_J, lengths_J, 0)) if has_some else None,
        outside_mask=outside_J if outside_J.any() else None,
        loss_mask=loss_mask,
    )


def _lengths(
    mask: RawSamplingMask | None, s: int, vocab_size: int, fields: RequestFields
) -> NDArray[np.int64]:
    """How many tokens are kept for each response token of sequence s, int64 [R]."""
    if mask is None:
        return np.zeros(int(np.diff(fields.response_offsets[s : s + 2])[0]), np.int64)
    fields.check_count(s, f"{NAME}.lengths", len(mask.lengths))
    path = f"{fields.sequence(s)}.{NAME}"
    bad = first_true((mask.lengths < 0) | (mask.lengths > vocab_size))
    if bad is not None:
        expected = f"an integer in [0, {vocab_size}]"
        raise invalid(f"{path}.lengths[{bad}]", mask.lengths[bad], expected)
    lengths: NDArray[np.int64] = mask.lengths.astype(np.int64)
    if len(mask.token_ids) != lengths.sum():
        expected = f"{lengths.sum()}, the sum of lengths"
        raise invalid(f"{path}.token_ids", f"{len(mask.token_ids)} ids", expected)
    return lengths


def _any_of(index: NDArray[np.int64], size: int) -> NDArray[np.bool_]:
    """bool [size]: what `index` names."""
    is_named = np.zeros(size, np.bool_)
    is_named[index] = True
    return is_named


def kept_tokens(batch: RolloutBatch) -> KeptTokens | None:
    """What all J response tokens keep; None: none has a mask."""
    if batch.sampling_mask is None or batch.mask_offsets is None:
        return None
    return KeptTokens(tokens=batch.sampling_mask, offsets=batch.mask_offsets)


def kept_of(kept: KeptTokens, index: NDArray[np.integer]) -> KeptTokens:
    """What some of them keep, int [m], one after the other."""
    starts = kept.offsets[index]
    lengths = kept.offsets[index + 1] - starts
    place = ragged_arange(starts, lengths)
    return KeptTokens(tokens=kept.tokens[place], offsets=offsets_of(lengths))


def outside_masks(batch: RolloutBatch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens of each sequence that are outside of their own mask, and the first; int64 [S] each.

    The first is counted among the sequence's response tokens; -1: there is none.
    """
    num_S = np.zeros(batch.num_sequences, np.int64)
    first_S = np.full(batch.num_sequences, -1)
    if batch.outside_mask is not None:
        outside = np.flatnonzero(batch.outside_mask)
        sequence = np.searchsorted(batch.response_offsets, outside, side="right") - 1
        np.add.at(num_S, sequence, 1)
        # The last of several assignments to one place stays.
        first_S[sequence[::-1]] = (outside - batch.response_offsets[sequence])[::-1]
    return num_S, first_S


def is_unmasked(batch: RolloutBatch) -> NDArray[np.bool_]:
    """Sequences that were sampled with top_p or top_k and do not say what was kept, bool [S]."""
    is_cut_S = (batch.top_p < 1) | (batch.top_k > 0)
    if batch.mask_offsets is None:
        return is_cut_S
    is_bare_J = batch.loss_mask & (np.diff(batch.mask_offsets) == 0)
    return is_cut_S & (np.diff(offsets_of(is_bare_J)[batch.response_offsets]) > 0)


def number_masks(
    kept: KeptTokens, row_L: NDArray[np.int64], token_L: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The number of each term's mask among the masks of its row, from 0 in order; int64 [L].

    Args:
        kept: What response tokens keep.
        row_L: The packed row that predicts each term.
        token_L: The response token of each term.
    """
    number_L = np.zeros(len(row_L), np.int64)
    if not len(row_L):
        return number_L
    data, size = kept.tokens.view(np.uint8).data, kept.tokens.itemsize
    # Most rows have one term, whose mask is their only one.
    several = np.flatnonzero(np.bincount(row_L)[row_L] > 1)
    starts = (kept.offsets[token_L[several]] * size).tolist()
    stops = (kept.offsets[token_L[several] + 1] * size).tolist()
    masks: dict[int, dict[bytes, int]] = {}
    for term, row, start, stop in zip(
        several.tolist(), row_L[several].tolist(), starts, stops, strict=True
    ):
        of_row = masks.setdefault(row, {})
        number_L[term] = of_row.setdefault(bytes(data[start:stop]), len(of_row))
    return number_L
