"""Groups as a caller sent them to a `RolloutBatch`, or an error that names the first thing wrong.

Sizes are checked before a column is allocated; the values of a batch need no further check.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon.rollout.bad import without
from ratoon.rollout.batch import RolloutBatch, offsets_of
from ratoon.rollout.columns import logprob_column, outcomes, sampling_settings, token_column
from ratoon.rollout.raw import (
    RawGroup,
    RawRollout,
    RawSegment,
    RequestFields,
    first_true,
    join_tokens,
    sequence_field,
)
from ratoon.rollout.routes import DENSE, RouteSizes, recorded_routes
from ratoon.rollout.sampling_masks import recorded_masks
from ratoon.rollout.teacher import teacher_logprobs, teacher_tokens
from ratoon_proto.types import BadRolloutReason


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


def _judge_ids(
    tokens: NDArray[np.integer],
    limits: BatchLimits,
    path_of: Callable[[int], str],
    judge: Callable[[NDArray[np.bool_], BadRolloutReason, Callable[[int], RatoonError]], None],
) -> None:
    """Have `judge` see ids that are not in the vocabulary, and ids that stand for an image or a
    video; `path_of` names a token's field by its index."""
    reason = BadRolloutReason.TOKEN

    def unknown(index: int) -> RatoonError:
        return invalid(path_of(index), tokens[index], f"a token id in [0, {limits.vocab_size})")

    def media(index: int) -> RatoonError:
        name = next(name for name, token in limits.media_tokens.items() if token == tokens[index])
        expected = "a token of text: images and videos are not trained on"
        return invalid(path_of(index), f"{tokens[index]}, the {name} of the model", expected)

    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < limits.vocab_size:
        judge((tokens < 0) | (tokens >= limits.vocab_size), reason, unknown)
    for token in limits.media_tokens.values():
        judge(tokens == token, reason, media)


def response_ids(
    segments: Segments, fields: RequestFields, limits: BatchLimits
) -> NDArray[np.int32]:
    """Response tokens, int32 [J]; an id that is not one of text is a fault."""
    tokens = join_tokens([segment.tokens for segment in segments.segments])

    def path_of(j: int) -> str:
        i = bisect_right(segments.offsets, j) - 1
        return f"{segments.field(i, fields.group_offsets)}[{j - int(segments.offsets[i])}]"

    _judge_ids(tokens, limits, path_of, fields.judge_tokens)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Bounds of one batch; `max_tokens` counts a group's prompt once, whatever its rollouts."""

    vocab_size: int
    # Prompt and response of one sequence: what the model takes.
    max_sequence_tokens: int
    max_groups: int
    max_sequences: int
    max_tokens: int
    routes: RouteSizes = DENSE
    # Window that other readers of the model's folder may have; 0: none.
    sliding_window: int = 0
    # Tokens that stand for images or videos, by their fields in the model's configuration.
    media_tokens: Mapping[str, int] = field(default_factory=dict[str, int])


def validate_groups(
    groups: Sequence[RawGroup], limits: BatchLimits, *, drops_bad: bool = False
) -> RolloutBatch:
    """Check everything about `groups` and put it in columns, in request order.

    With `drops_bad` rollouts with a fault of their own (`BadRolloutReason`) are left out.

    Raises `RatoonError`: BODY_TOO_LARGE for more groups, sequences or tokens than `limits` has room
    for, INVALID_ARGUMENT for anything else.
    """
    _check_groups(groups, limits)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    group_sizes = np.array([len(group.rollouts) for group in groups], np.int64)
    group_offsets = offsets_of(group_sizes)
    prompt_offsets = offsets_of(np.array([len(group.prompt) for group in groups], np.int64))
    segments = list_segments(rollouts, group_offsets)
    fields = RequestFields(
        group_offsets=group_offsets,
        response_offsets=segments.offsets[segments.first],
        faults={} if drops_bad else None,
    )
    prompt_length_S = np.repeat(np.diff(prompt_offsets), group_sizes)
    _check_lengths(int(prompt_offsets[-1]), prompt_length_S, fields, limits)

    response_tokens = response_ids(segments, fields, limits)
    masks = recorded_masks(
        rollouts,
        response_tokens,
        loss_mask(rollouts, segments, fields),
        fields,
        vocab_size=limits.vocab_size,
        max_tokens=limits.max_tokens,
    )
    mask = masks.loss_mask
    _check_trained(mask, prompt_length_S, fields)
    settings = sampling_settings(rollouts, fields)
    rewards, advantages = outcomes(rollouts, fields)
    length_S = prompt_length_S + np.diff(fields.response_offsets)
    routes = recorded_routes(rollouts, length_S, fields, limits.routes)
    teacher_JK = teacher_tokens(rollouts, mask, fields, limits.vocab_size)
    batch = RolloutBatch(
        group_ids=tuple(group.group_id for group in groups),
        group_offsets=group_offsets,
        prompt_tokens=_prompt_ids(groups, prompt_offsets, fields, limits),
        prompt_offsets=prompt_offsets,
        response_tokens=response_tokens,
        response_offsets=fields.response_offsets,
        loss_mask=mask,
        sampler_logprobs=logprob_column(rollouts, "sampler_logprobs", mask, fields),
        old_logprobs=logprob_column(rollouts, "old_logprobs", mask, fields),
        reference_logprobs=logprob_column(rollouts, "reference_logprobs", mask, fields),
        rewards=rewards,
        advantages=advantages,
        token_weights=token_column(rollouts, "token_weights", fields),
        temperature=settings.temperature,
        sampler_is_raw=settings.sampler_is_raw,
        truncated=settings.truncated,
        policy_version=settings.policy_version,
        token_version=settings.token_version,
        routed_experts=routes.routed_experts,
        route_first=routes.route_first,
        route_offsets=routes.route_offsets,
        teacher_tokens=teacher_JK,
        teacher_logprobs=teacher_logprobs(rollouts, teacher_JK, mask, fields),
        returns=token_column(rollouts, "returns", fields),
        old_values=token_column(rollouts, "old_values", fields),
        top_p=settings.top_p,
        top_k=settings.top_k,
        sampling_mask=masks.sampling_mask,
        mask_offsets=masks.mask_offsets,
        outside_mask=masks.outside_mask,
    )
    return without(batch, fields.faults or {})


def _too_large(path: str, got: int, limit: int, what: str) -> RatoonError:
    return RatoonError(
        ErrorCode.BODY_TOO_LARGE,
        f"{path}: got {got} {what}, expected at most {limit}",
        field=path,
        got=f"{got} {what}",
        expected=f"at most {limit}",
    )


def _check_groups(groups: Sequence[RawGroup], limits: BatchLimits) -> None:
    """Counts, ids and prompts' forms."""
    if not groups:
        raise invalid("groups", "none", "at least one group")
    if len(groups) > limits.max_groups:
        raise _too_large("groups", len(groups), limits.max_groups, "groups")
    num_sequences = sum(len(group.rollouts) for group in groups)
    if num_sequences > limits.max_sequences:
        raise _too_large("groups", num_sequences, limits.max_sequences, "rollouts")
    first_with: dict[str, int] = {}
    for g, group in enumerate(groups):
        path = f"groups[{g}]"
        _check_group_id(group.group_id, f"{path}.group_id")
        first = first_with.setdefault(group.group_id, g)
        if first != g:
            raise invalid(
                f"{path}.group_id", repr(group.group_id), f"another id than that of groups[{first}]"
            )
        if not group.rollouts:
            raise invalid(f"{path}.rollouts", "none", "at least one rollout")
        if not is_token_array(group.prompt):
            raise bad_token_array(f"{path}.prompt", group.prompt)


def _check_group_id(group_id: str, path: str) -> None:
    if not group_id:
        raise invalid(path, "an empty id", "a name")
    try:
        group_id.encode()
    except UnicodeEncodeError as err:
        raise invalid(path, repr(group_id), "text that UTF-8 can hold") from err


def _check_lengths(
    num_prompt_tokens: int,
    prompt_length_S: NDArray[np.int64],
    fields: RequestFields,
    limits: BatchLimits,
) -> None:
    """Tokens of the batch and of each sequence, before any array of them is made."""
    num_tokens = num_prompt_tokens + int(fields.response_offsets[-1])
    if num_tokens > limits.max_tokens:
        raise _too_large("groups", num_tokens, limits.max_tokens, "tokens")
    length_S = prompt_length_S + np.diff(fields.response_offsets)

    def error_of(s: int) -> RatoonError:
        expected = f"at most {limits.max_sequence_tokens}, which the model takes"
        if limits.sliding_window == limits.max_sequence_tokens:
            expected += ": its sliding window, beyond which readers of the folder differ"
        got = f"{length_S[s]} tokens, {prompt_length_S[s]} of them prompt"
        return invalid(fields.sequence(s), got, expected)

    fields.judge_sequences(length_S > limits.max_sequence_tokens, BadRolloutReason.LENGTH, error_of)


def _prompt_ids(
    groups: Sequence[RawGroup],
    prompt_offsets: NDArray[np.int64],
    fields: RequestFields,
    limits: BatchLimits,
) -> NDArray[np.int32]:
    """Prompt tokens of all groups, int32 [sum of P]."""
    tokens = join_tokens([group.prompt for group in groups])

    def path_of(index: int) -> str:
        g = int(np.searchsorted(prompt_offsets, index, side="right")) - 1
        return f"groups[{g}].prompt[{index - prompt_offsets[g]}]"

    def judge(
        is_bad: NDArray[np.bool_],
        reason: BadRolloutReason,
        error_of: Callable[[int], RatoonError],
    ) -> None:
        fields.judge_prompts(is_bad, prompt_offsets, reason, error_of)

    _judge_ids(tokens, limits, path_of, judge)
    return tokens.astype(np.int32, copy=False)


def _check_trained(
    mask: NDArray[np.bool_], prompt_length_S: NDArray[np.int64], fields: RequestFields
) -> None:
    """Something is trained, and nothing that has no token before it."""
    if not mask.any():
        raise invalid("groups", "no trained token", "at least one")
    starts = fields.response_offsets[:-1]
    bare = np.flatnonzero((prompt_length_S == 0) & (starts < fields.response_offsets[1:]))
    index = first_true(mask[starts[bare]])
    if index is not None:
        path = fields.token(int(starts[bare[index]]), "loss_mask")
        raise invalid(path, "true", "false: without a prompt no token predicts the first token")
