"""Which sequences and tokens of a batch count, whatever its cut: drops, owners of shared tokens,
counters.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon.rollout.advantages import zero_variance_groups
from ratoon.rollout.batch import RolloutBatch, group_of_sequence, sent_field
from ratoon.rollout.forest import build_forest, response_tokens
from ratoon.rollout.prefixes import SortedPrefixes


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Sequences that stay, and how many went for each reason; one is counted for the first only."""

    # bool [S].
    kept_S: NDArray[np.bool_]
    dropped_stale: int
    dropped_truncated: int
    dropped_zero_variance: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What an update divides by: trained tokens, and the sequences and groups that have some."""

    tokens: int
    sequences: int
    groups: int


def select_sequences(
    batch: RolloutBatch,
    *,
    version: int,
    max_versions: int | None,
    refuse_stale: bool,
    drop_truncated: bool,
    drop_zero_variance: bool,
) -> Selection:
    """Drop stale, then truncated sequences, then groups of zero variance.

    A sequence is stale if it was sampled more than `max_versions` versions before `version` (None:
    none is). Variance is that of the rewards of the group as received, before any drop; without
    rewards no group is dropped for it. Raises `RatoonError`: STALE_ROLLOUTS with `refuse_stale`,
    INVALID_ARGUMENT where staleness is bounded and a sequence does not say its version, or one that
    the policy has not had yet.
    """
    kept = np.ones(batch.num_sequences, np.bool_)
    if max_versions is not None:
        kept = fresh_sequences(batch, version, max_versions, refuse_stale=refuse_stale)
    dropped_stale = int(np.count_nonzero(~kept))
    dropped_truncated = 0
    if drop_truncated:
        dropped_truncated = int(np.count_nonzero(kept & batch.truncated))
        kept = kept & ~batch.truncated
    dropped_zero_variance = 0
    if drop_zero_variance and batch.rewards is not None:
        is_flat = zero_variance_groups(batch.rewards, batch.group_offsets)
        is_flat = is_flat[group_of_sequence(batch)]
        dropped_zero_variance = int(np.count_nonzero(kept & is_flat))
        kept = kept & ~is_flat
    return Selection(
        kept_S=kept,
        dropped_stale=dropped_stale,
        dropped_truncated=dropped_truncated,
        dropped_zero_variance=dropped_zero_variance,
    )


def fresh_sequences(
    batch: RolloutBatch, version: int, max_versions: int, *, refuse_stale: bool
) -> NDArray[np.bool_]:
    """Sequences sampled at most `max_versions` before `version`, bool [S].

    Raises as `select_sequences`.
    """
    is_unknown = batch.policy_version < 0
    if is_unknown.any():
        field = f"{sent_field(batch, int(is_unknown.argmax()))}.policy_version"
        raise invalid(field, "none", "the version it was sampled from, as staleness is bounded")
    age = version - batch.policy_version
    if (age < 0).any():
        first = int((age < 0).argmax())
        field = f"{sent_field(batch, first)}.policy_version"
        got = int(batch.policy_version[first])
        raise invalid(field, got, f"at most {version}, the policy's, as staleness is bounded")
    if batch.token_version is not None and (batch.token_version > version).any():
        newest = int(batch.token_version.argmax())
        s = int(np.searchsorted(batch.response_offsets, newest, side="right")) - 1
        field = f"{sent_field(batch, s)}.version_spans"
        got = f"version {batch.token_version[newest]}"
        raise invalid(field, got, f"at most {version}, the policy's, as staleness is bounded")
    is_stale = age > max_versions
    if refuse_stale and is_stale.any():
        first = int(is_stale.argmax())
        field = f"{sent_field(batch, first)}.policy_version"
        got = f"version {batch.policy_version[first]}, {age[first]} behind {version}"
        expected = f"at most {max_versions} behind"
        count = int(np.count_nonzero(is_stale))
        raise RatoonError(
            ErrorCode.STALE_ROLLOUTS,
            f"{count} of {len(is_stale)} rollouts are stale, first {field}: got {got}, "
            f"expected {expected}",
            field=field,
            got=got,
            expected=expected,
            details={"num_stale": str(count), "version": str(version)},
        )
    return ~is_stale


def first_owner_mask(
    batch: RolloutBatch, prefixes: SortedPrefixes, kept_S: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Trained response tokens of kept sequences, a shared one with its first path only, bool [J].

    The first path is that of request order among kept sequences whose loss mask trains the token.
    """
    forest = build_forest(batch, prefixes, np.flatnonzero(kept_S))
    response = response_tokens(batch, forest)
    is_trained = batch.loss_mask[response.column]
    column, packed = response.column[is_trained], response.packed[is_trained]
    owner = np.empty(forest.num_tokens, np.int64)
    # The last of several assignments to one place stays: the first in request order.
    owner[packed[::-1]] = column[::-1]
    mask = np.zeros(len(batch.loss_mask), np.bool_)
    mask[column] = owner[packed] == column
    return mask


def trained_mask(batch: RolloutBatch, kept_S: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Trained response tokens of kept sequences, every path's own, bool [J]."""
    return batch.loss_mask & np.repeat(kept_S, np.diff(batch.response_offsets))


def predicted_mask(batch: RolloutBatch) -> NDArray[np.bool_]:
    """Response tokens with a log-prob, bool [J]: all but a first token without a prompt."""
    mask = np.ones(len(batch.loss_mask), np.bool_)
    has_no_prompt_S = (np.diff(batch.prompt_offsets) == 0)[group_of_sequence(batch)]
    starts, stops = batch.response_offsets[:-1], batch.response_offsets[1:]
    mask[starts[has_no_prompt_S & (starts < stops)]] = False
    return mask


def trained_lengths(batch: RolloutBatch, mask_J: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Response tokens of each sequence where `mask_J` (bool [J]) holds, int64 [S]."""
    before = np.zeros(len(mask_J) + 1, np.int64)
    np.cumsum(mask_J, out=before[1:])
    return np.diff(before[batch.response_offsets])


def counters(mask_J: NDArray[np.bool_], batch: RolloutBatch, kept_S: NDArray[np.bool_]) -> Counters:
    """Tokens of kept sequences where `mask_J` holds, and the sequences and groups that have one."""
    lengths = np.where(kept_S, trained_lengths(batch, mask_J), 0)
    per_group = np.add.reduceat(lengths, batch.group_offsets[:-1])
    return Counters(
        tokens=int(lengths.sum()),
        sequences=int(np.count_nonzero(lengths)),
        groups=int(np.count_nonzero(per_group)),
    )


def group_keys(batch: RolloutBatch, counted_J: NDArray[np.bool_]) -> frozenset[bytes]:
    """Digests of id and prompt of the groups that have a counted token."""
    lengths_S = trained_lengths(batch, counted_J)
    per_group = np.add.reduceat(lengths_S, batch.group_offsets[:-1])
    keys: set[bytes] = set()
    for group in np.flatnonzero(per_group).tolist():
        prompt = batch.prompt_tokens[batch.prompt_offsets[group] : batch.prompt_offsets[group + 1]]
        digest = hashlib.sha256(batch.group_ids[group].encode() + b"\0")
        digest.update(prompt.astype("<i4").tobytes())
        keys.add(digest.digest())
    return frozenset(keys)
