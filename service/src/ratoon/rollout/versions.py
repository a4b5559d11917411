"""Which policy version sampled which response token, where weights changed while it was sampled."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ratoon.errors import invalid
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.fields import RequestFields
from ratoon.rollout.raw import RawRollout

_MOST = np.iinfo(np.int64).max


def sampled_versions(
    rollouts: Sequence[RawRollout], fields: RequestFields
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """The oldest version of each rollout, int64 [S], -1 if it names none; of each token, int64 [J].

    The second is None if no rollout has spans. Raises INVALID_ARGUMENT naming span or version.
    """
    length_S = np.diff(fields.response_offsets)
    version_S = np.array(
        [
            _oldest(rollout, int(length_S[s]), fields.sequence(s))
            for s, rollout in enumerate(rollouts)
        ],
        np.int64,
    )
    if not any(rollout.version_spans for rollout in rollouts):
        return version_S, None
    version_J = np.repeat(version_S, length_S)
    for bounds, rollout in zip(pairwise(fields.response_offsets.tolist()), rollouts, strict=True):
        start, stop = bounds
        # A later span overwrites what an earlier one has said of its tokens.
        for first, version in rollout.version_spans:
            version_J[start + first : stop] = version
    return version_S, version_J


def versions_of_tokens(batch: RolloutBatch, is_meant_S: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The version of each response token of the sequences that `is_meant_S` (bool [S]) names."""
    length_S = np.diff(batch.response_offsets)
    version_J = batch.token_version
    if version_J is None:
        version_J = np.repeat(batch.policy_version, length_S)
    return version_J[np.repeat(is_meant_S, length_S)]


def newest_versions(batch: RolloutBatch) -> NDArray[np.int64]:
    """The newest version that sampled part of each sequence, int64 [S]; -1 where it says none."""
    newest_S = batch.policy_version.copy()
    if batch.token_version is not None:
        lengths_S = np.diff(batch.response_offsets)
        sequence_J = np.repeat(np.arange(batch.num_sequences), lengths_S)
        np.maximum.at(newest_S, sequence_J, batch.token_version)
    return newest_S


def _oldest(rollout: RawRollout, num_tokens: int, path: str) -> int:
    version = rollout.policy_version
    if version is not None and not 0 <= version <= _MOST:
        raise invalid(f"{path}.policy_version", version, f"an integer in [0, {_MOST}]")
    if not rollout.version_spans:
        return -1 if version is None else version
    before = -1
    for index, (first, of_span) in enumerate(rollout.version_spans):
        span = f"{path}.version_spans[{index}]"
        if index == 0 and first != 0:
            raise invalid(f"{span}.first_token", first, "0: spans cover all response tokens")
        if not before < first < num_tokens:
            expected = f"more than {before} and less than {num_tokens}, the response tokens"
            raise invalid(f"{span}.first_token", first, expected)
        if of_span < 0:
            raise invalid(f"{span}.version", of_span, "at least 0")
        before = first
    oldest = min(of_span for _, of_span in rollout.version_spans)
    if version is not None and version != oldest:
        raise invalid(f"{path}.policy_version", version, f"none, or {oldest}, the oldest span's")
    return oldest
