"""Groups as the caller sent them, and the names of their parts in messages.

A wire has decoded them, and checked nothing but numpy's dtype kind. `validate` makes a
`RolloutBatch` of them or names what is wrong: `groups[3].rollouts[17]`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.types import BadRolloutReason

# Why a rollout cannot be trained, and its response token that is at fault; -1: none alone is.
Fault = tuple[BadRolloutReason, int]
MAX_FLOAT32 = float(np.finfo(np.float32).max)
# Characters of a group's id in what the service says of it.
MAX_ID = 256


class SamplerLogprobsKind(StrEnum):
    """Sampler log-probs were taken after (`processed`) or before (`raw`) the temperature."""

    UNSPECIFIED = "unspecified"
    PROCESSED = "processed"
    RAW = "raw"


@dataclass(frozen=True, slots=True, kw_only=True)
class RawSegment:
    """A run of tokens, int [length]; not trained: context."""

    tokens: NDArray[np.integer]
    trained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RawSamplingMask:
    """Ids that truncation left of each response token, int [sum of lengths], and how many, int [R].

    A token outside of its own is not trained with `untrain_outside`, else a fault of its rollout.
    """

    token_ids: NDArray[np.integer]
    lengths: NDArray[np.integer]
    untrain_outside: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRollout:
    """One rollout; `None`: the caller left it out. Arrays have one value a response token."""

    segments: tuple[RawSegment, ...]
    loss_mask: NDArray[np.generic] | None
    sampler_logprobs: NDArray[np.floating] | None
    old_logprobs: NDArray[np.floating] | None
    reference_logprobs: NDArray[np.floating] | None
    reward: float | None
    advantages: NDArray[np.floating] | None
    token_weights: NDArray[np.floating] | None
    temperature: float
    sampler_logprobs_kind: SamplerLogprobsKind
    top_p: float | None
    top_k: int | None
    policy_version: int | None
    truncated: bool
    # (first response token, version) of each span, in order; none: `policy_version` alone.
    version_spans: tuple[tuple[int, int], ...] = ()
    # [tokens, layers with experts, experts per token], from that token of the rollout's on.
    routed_experts: NDArray[np.generic] | None = None
    routed_experts_start: int = 0
    sampling_mask: RawSamplingMask | None = None
    # [R, K].
    teacher_tokens: NDArray[np.generic] | None = None
    teacher_logprobs: NDArray[np.generic] | None = None
    returns: NDArray[np.floating] | None = None
    old_values: NDArray[np.floating] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RawGroup:
    """Rollouts of one prompt, int [P]."""

    group_id: str
    prompt: NDArray[np.integer]
    rollouts: tuple[RawRollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFields:
    """Names sequences s (0 .. S - 1) and response tokens j (0 .. J - 1) of a request.

    Every check of a rollout's own values ends here: the first fault refuses the request, or each
    is noted of its sequence, which is dropped once all are known.
    """

    # int64 [G + 1], int64 [S + 1].
    group_offsets: NDArray[np.int64]
    response_offsets: NDArray[np.int64]
    # The first fault of each bad sequence; None: a fault refuses the request.
    faults: dict[int, Fault] | None = None

    def sequence(self, s: int) -> str:
        return sequence_field(self.group_offsets, s)

    def token(self, j: int, column: str) -> str:
        """Response token j in a per-token column: `groups[0].rollouts[1].old_logprobs[5]`."""
        s = bisect_right(self.response_offsets, j) - 1
        return f"{self.sequence(s)}.{column}[{j - int(self.response_offsets[s])}]"

    def judge_sequences(
        self,
        is_bad_S: NDArray[np.bool_],
        reason: BadRolloutReason,
        error_of: Callable[[int], RatoonError],
    ) -> None:
        """Note the fault of these sequences, bool [S], or raise `error_of` the first."""
        if (s := first_true(is_bad_S)) is not None:
            self._judge(s, reason, error_of, ((s, -1) for s in np.flatnonzero(is_bad_S).tolist()))

    def judge_tokens(
        self,
        is_bad_J: NDArray[np.bool_],
        reason: BadRolloutReason,
        error_of: Callable[[int], RatoonError],
    ) -> None:
        """Note the fault of the sequences of these tokens, bool [J], or raise `error_of` the
        first."""
        if (j := first_true(is_bad_J)) is not None:
            bad_J = np.flatnonzero(is_bad_J)
            bad_S = np.searchsorted(self.response_offsets, bad_J, side="right") - 1
            token_S = bad_J - self.response_offsets[bad_S]
            places = zip(bad_S.tolist(), token_S.tolist(), strict=True)
            self._judge(j, reason, error_of, places)

    def judge_prompts(
        self,
        is_bad_P: NDArray[np.bool_],
        prompt_offsets: NDArray[np.int64],
        reason: BadRolloutReason,
        error_of: Callable[[int], RatoonError],
    ) -> None:
        """Note the fault of all sequences of these prompt tokens' groups, bool [sum of P], or raise
        `error_of` the first."""
        if (p := first_true(is_bad_P)) is not None:
            bad_G = np.searchsorted(prompt_offsets, np.flatnonzero(is_bad_P), side="right") - 1
            offsets = self.group_offsets
            bad_S = (s for g in np.unique(bad_G) for s in range(offsets[g], offsets[g + 1]))
            self._judge(p, reason, error_of, ((s, -1) for s in bad_S))

    def _judge(
        self,
        first: int,
        reason: BadRolloutReason,
        error_of: Callable[[int], RatoonError],
        places: Iterable[tuple[int, int]],
    ) -> None:
        if self.faults is None:
            raise error_of(first)
        for s, token in places:
            self.faults.setdefault(s, (reason, token))

    def with_some(self, mask_J: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Sequences with a response token where `mask_J`, bool [J], holds; bool [S]."""
        starts = self.response_offsets[:-1]
        has_some_S = starts < self.response_offsets[1:]
        # Where a sequence has no tokens, `reduceat` would give the next one's first.
        has_some_S[has_some_S] = np.logical_or.reduceat(mask_J, starts[has_some_S])
        return has_some_S

    def check_count(self, s: int, column: str, num_values: int) -> None:
        """Raise `RatoonError` unless sequence s has `num_values` response tokens."""
        num_tokens = int(self.response_offsets[s + 1] - self.response_offsets[s])
        if num_values != num_tokens:
            path = f"{self.sequence(s)}.{column}"
            raise RatoonError(
                ErrorCode.INVALID_ARGUMENT,
                f"{path}: {num_values} values for {num_tokens} response tokens",
                field=path,
                got=f"{num_values} values",
                expected=f"{num_tokens} values",
            )


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


def sequence_field(group_offsets: NDArray[np.int64], s: int) -> str:
    """Path of sequence s, those of group g being [group_offsets[g], group_offsets[g + 1])."""
    group = bisect_right(group_offsets, s) - 1
    return f"groups[{group}].rollouts[{s - int(group_offsets[group])}]"


def first_true(is_bad: NDArray[np.bool_]) -> int | None:
    """Index of the first true value, None where there is none."""
    if not len(is_bad):
        return None
    index = int(is_bad.argmax())
    return index if is_bad[index] else None
