"""The segments of all rollouts of a request, joined: response tokens and their mask."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ratoon.errors import RatoonError, invalid
from ratoon.rollout.batch import offsets_of
from ratoon.rollout.fields import RequestFields, first_true, sequence_field
from ratoon.rollout.raw import RawRollout, RawSegment


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Segments of S rollouts; those of rollout s are [first[s], first[s + 1])."""

    segments: list[RawSegment]
    # int64 [S + 1]; int64 [segments + 1]: offsets of the segments in the response tokens.
    first: NDArray[np.int64]
    offsets: NDArray[np.int64]

    def field(self, i: int, group_offsets: NDArray[np.int64]) -> str:
        """Path of segment i; a rollout's only one, if trained, is its `response`."""
        s = bisect_right(self.first, i) - 1
        k = i - int(self.first[s])
        is_response = self.first[s + 1] - self.first[s] == 1 and self.segments[i].trained
        name = "response" if is_response else f"segments[{k}].tokens"
        return f"{sequence_field(group_offsets, s)}.{name}"


def list_segments(rollouts: Sequence[RawRollout], group_offsets: NDArray[np.int64]) -> Segments:
    """All segments; raises `RatoonError` where one is no vector of integers."""
    segments = [segment for rollout in rollouts for segment in rollout.segments]
    counts = np.array([len(rollout.segments) for rollout in rollouts], np.int64)
    listed = Segments(segments=segments, first=offsets_of(counts), offsets=np.zeros(1, np.int64))
    for i, segment in enumerate(segments):
        if not is_token_array(segment.tokens):
            raise bad_token_array(listed.field(i, group_offsets), segment.tokens)
    lengths = np.array([len(segment.tokens) for segment in segments], np.int64)
    return Segments(segments=segments, first=listed.first, offsets=offsets_of(lengths))


def is_token_array(tokens: NDArray[np.integer]) -> bool:
    return tokens.ndim == 1 and tokens.dtype.kind in "iu"


def bad_token_array(path: str, tokens: NDArray[np.integer]) -> RatoonError:
    return invalid(path, f"{tokens.dtype} of shape {list(tokens.shape)}", "integers [length]")


def join_tokens(arrays: Sequence[NDArray[np.integer]]) -> NDArray[np.integer]:
    """Concatenate without loss: numpy would make floats of uint64 beside a signed type."""
    return np.concatenate(
        [np.empty(0, np.int32)]
        + [
            np.minimum(array, np.iinfo(np.int64).max).astype(np.int64)
            if array.dtype == np.uint64
            else array
            for array in arrays
        ]
    )


def token_fault(tokens: NDArray[np.integer], vocab_size: int) -> int | None:
    """Index of the first id outside of [0, vocab_size)."""
    return first_true((tokens < 0) | (tokens >= vocab_size))


def response_ids(segments: Segments, fields: RequestFields, vocab_size: int) -> NDArray[np.int32]:
    """Response tokens, int32 [J]; raises `RatoonError` where an id is not in the vocabulary."""
    tokens = join_tokens([segment.tokens for segment in segments.segments])
    j = token_fault(tokens, vocab_size)
    if j is not None:
        i = bisect_right(segments.offsets, j) - 1
        path = f"{segments.field(i, fields.group_offsets)}[{j - int(segments.offsets[i])}]"
        raise invalid(path, tokens[j], f"a token id in [0, {vocab_size})")
    return tokens.astype(np.int32, copy=False)


def loss_mask(
    rollouts: Sequence[RawRollout], segments: Segments, fields: RequestFields
) -> NDArray[np.bool_]:
    """Trained response tokens, bool [J]: the given masks, elsewhere all of the trained segments.

    Raises `RatoonError` where a mask has the wrong form or trains a token of a context segment.
    """
    trained = np.array([segment.trained for segment in segments.segments], np.bool_)
    may_train = np.repeat(trained, np.diff(segments.offsets))
    mask = may_train.copy()
    bounds: list[int] = fields.response_offsets.tolist()
    for s, rollout in enumerate(rollouts):
        given = rollout.loss_mask
        if given is None:
            continue
        if given.ndim != 1 or given.dtype.kind not in "biu":
            path = f"{fields.sequence(s)}.loss_mask"
            raise invalid(path, f"{given.dtype} of shape {list(given.shape)}", "booleans [length]")
        fields.check_count(s, "loss_mask", len(given))
        if given.dtype != np.bool_:
            t = first_true((given != 0) & (given != 1))
            if t is not None:
                path = f"{fields.sequence(s)}.loss_mask[{t}]"
                raise invalid(path, given[t], "0 or 1")
        mask[bounds[s] : bounds[s + 1]] = given
    j = first_true(mask & ~may_train)
    if j is not None:
        i = bisect_right(segments.offsets, j) - 1
        context = segments.field(i, fields.group_offsets)
        raise invalid(fields.token(j, "loss_mask"), "true", f"false, as {context} is context")
    return mask
