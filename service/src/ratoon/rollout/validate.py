"""Groups as a caller sent them to a `RolloutBatch`, or an error that names the first thing wrong.

Sizes are checked before a column is allocated; the values of a batch need no further check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon.rollout.batch import RolloutBatch, offsets_of
from ratoon.rollout.columns import check_logprobs, outcomes, sampling_settings, token_column
from ratoon.rollout.fields import RequestFields, first_true
from ratoon.rollout.raw import RawGroup
from ratoon.rollout.routes import DENSE, RouteSizes, recorded_routes
from ratoon.rollout.segments import (
    bad_token_array,
    is_token_array,
    join_tokens,
    list_segments,
    loss_mask,
    response_ids,
    token_fault,
)


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
    # Tokens that the model's attention goes back to; 0: all.
    sliding_window: int = 0


def validate_groups(groups: Sequence[RawGroup], limits: BatchLimits) -> RolloutBatch:
    """Check everything about `groups` and put it in columns, in request order.

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
        group_offsets=group_offsets, response_offsets=segments.offsets[segments.first]
    )
    prompt_length_S = np.repeat(np.diff(prompt_offsets), group_sizes)
    _check_lengths(int(prompt_offsets[-1]), prompt_length_S, fields, limits)

    response_tokens = response_ids(segments, fields, limits.vocab_size)
    mask = loss_mask(rollouts, segments, fields)
    _check_trained(mask, prompt_length_S, fields)
    settings = sampling_settings(rollouts, fields)
    rewards, advantages = outcomes(rollouts, fields)
    length_S = prompt_length_S + np.diff(fields.response_offsets)
    routes = recorded_routes(rollouts, length_S, fields, limits.routes)
    batch = RolloutBatch(
        group_ids=tuple(group.group_id for group in groups),
        group_offsets=group_offsets,
        prompt_tokens=_prompt_ids(groups, prompt_offsets, limits.vocab_size),
        prompt_offsets=prompt_offsets,
        response_tokens=response_tokens,
        response_offsets=fields.response_offsets,
        loss_mask=mask,
        sampler_logprobs=token_column(rollouts, "sampler_logprobs", fields),
        old_logprobs=token_column(rollouts, "old_logprobs", fields),
        reference_logprobs=token_column(rollouts, "reference_logprobs", fields),
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
        top_p=settings.top_p,
        top_k=settings.top_k,
    )
    check_logprobs(batch, fields)
    return batch


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
    s = first_true(length_S > limits.max_sequence_tokens)
    if s is not None:
        expected = f"at most {limits.max_sequence_tokens}, which the model takes"
        if limits.sliding_window == limits.max_sequence_tokens:
            expected += ": its sliding window, beyond which attention is not full"
        got = f"{length_S[s]} tokens, {prompt_length_S[s]} of them prompt"
        raise invalid(fields.sequence(s), got, expected)


def _prompt_ids(
    groups: Sequence[RawGroup], prompt_offsets: NDArray[np.int64], vocab_size: int
) -> NDArray[np.int32]:
    """Prompt tokens of all groups, int32 [sum of P]."""
    tokens = join_tokens([group.prompt for group in groups])
    index = token_fault(tokens, vocab_size)
    if index is not None:
        g = int(np.searchsorted(prompt_offsets, index, side="right")) - 1
        path = f"groups[{g}].prompt[{index - prompt_offsets[g]}]"
        raise invalid(path, tokens[index], f"a token id in [0, {vocab_size})")
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
