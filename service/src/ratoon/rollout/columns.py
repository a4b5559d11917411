"""Per-token columns, versions, outcomes and sampling settings of all rollouts of a request.

A column is there for every rollout or for none; a rollout without response tokens may leave
per-token columns out, and one without trained tokens log-probs. Where weights changed while a
rollout was sampled, spans name the version of each of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ratoon.errors import RatoonError, invalid
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.raw import (
    MAX_FLOAT32,
    RawRollout,
    RequestFields,
    SamplerLogprobsKind,
    first_true,
)
from ratoon_proto.types import BadRolloutReason

_LAST_VERSION = int(np.iinfo(np.int64).max)
_LAST_TOP_K = int(np.iinfo(np.int32).max)
# At a lower temperature vLLM takes the likeliest token; logits divided by one much lower overflow.
_LEAST_TEMPERATURE = 1e-5
# What float32 tells from 0.
_LEAST_TOP_P = float(np.finfo(np.float32).smallest_subnormal)
# What rounding may leave of a probability of one.
LOGPROB_EPSILON = 1e-3


def sampled_versions(
    rollouts: Sequence[RawRollout], fields: RequestFields
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """The oldest version of each rollout, int64 [S], -1 if it names none; of each token, int64 [J].

    The second is None if no rollout has spans. Raises INVALID_ARGUMENT naming span or version.
    """
    length_S = np.diff(fields.response_offsets)
    oldest = [_oldest(rollout, s, fields) for s, rollout in enumerate(rollouts)]
    version_S = np.array(oldest, np.int64)
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


def _oldest(rollout: RawRollout, s: int, fields: RequestFields) -> int:
    version = rollout.policy_version
    _check_integer(version, _LAST_VERSION, s, "policy_version", fields)
    if not rollout.version_spans:
        return -1 if version is None else version
    path, before = fields.sequence(s), -1
    num_tokens = int(fields.response_offsets[s + 1] - fields.response_offsets[s])
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """The columns of the same names of a `RolloutBatch`, each [S] but token_version."""

    temperature: NDArray[np.float32]
    sampler_is_raw: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    policy_version: NDArray[np.int64]
    token_version: NDArray[np.int64] | None
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int32]


def logprob_column(
    rollouts: Sequence[RawRollout], name: str, mask_J: NDArray[np.bool_], fields: RequestFields
) -> NDArray[np.float32] | None:
    """The column of log-probs `name`, float32 [J]; NaN of tokens that are not trained is 0."""
    column = token_column(rollouts, name, fields, mask_J)
    if column is not None:
        fields.judge_tokens(
            mask_J & (column > LOGPROB_EPSILON),
            BadRolloutReason.LOGPROB,
            lambda j: invalid(fields.token(j, name), column[j], "a log-probability <= 0"),
        )
    return column


def token_column(
    rollouts: Sequence[RawRollout],
    name: str,
    fields: RequestFields,
    mask_J: NDArray[np.bool_] | None = None,
) -> NDArray[np.float32] | None:
    """The per-token column `name`, float32 [J], or None where no rollout gives it.

    `mask_J`: bool [J], where a log-prob is needed: NaN elsewhere is 0. None: there are numbers
    everywhere.
    """
    reason = BadRolloutReason.REWARD if mask_J is None else BadRolloutReason.LOGPROB
    values: list[NDArray[np.floating] | None] = [getattr(rollout, name) for rollout in rollouts]
    is_given_S = np.array([value is not None for value in values])
    if not is_given_S.any():
        return None
    lengths: list[int] = np.diff(fields.response_offsets).tolist()
    needs_S = np.array(lengths) > 0 if mask_J is None else fields.with_some(mask_J)
    parts: list[NDArray[np.floating]] = []
    for s, value in enumerate(values):
        if value is None:
            parts.append(np.zeros(lengths[s], np.float32))
        else:
            _check_values_array(value, name, s, fields)
            parts.append(value)
    if not (is_given_S & needs_S).any():
        return None
    check_even(name, is_given_S, needs_S, reason, fields)
    with np.errstate(over="ignore"):  # what overflows is refused below
        column = np.concatenate(parts, dtype=np.float32, casting="same_kind")
    is_bad_J = ~np.isfinite(column)
    if not is_bad_J.any():
        return column
    if mask_J is not None:
        is_absent_J = np.isnan(column) & ~mask_J
        column[is_absent_J] = 0.0
        is_bad_J &= ~is_absent_J

    def error_of(j: int) -> RatoonError:
        return invalid(fields.token(j, name), np.concatenate(parts)[j], "a finite float32")

    fields.judge_tokens(is_bad_J, reason, error_of)
    return column


def _check_values_array(
    value: NDArray[np.floating], name: str, s: int, fields: RequestFields
) -> None:
    # Two-byte floats are refused: their rounding alone moves a ratio by 0.4%.
    if value.ndim != 1 or value.dtype.kind != "f" or value.dtype.itemsize < 4:
        path = f"{fields.sequence(s)}.{name}"
        raise invalid(path, f"{value.dtype} of shape {list(value.shape)}", "float32 [length]")
    fields.check_count(s, name, len(value))


def check_even(
    name: str,
    is_given_S: NDArray[np.bool_],
    is_meant_S: NDArray[np.bool_],
    reason: BadRolloutReason,
    fields: RequestFields,
) -> None:
    """All meant rollouts give `name`, or none; of both kinds the rarer is named.

    Those without it are bad, unless they are most: it is no fault of theirs then.
    """
    given_S, missing_S = is_given_S & is_meant_S, ~is_given_S & is_meant_S
    given, missing = first_true(given_S), first_true(missing_S)
    if given is None or missing is None:
        return
    if np.count_nonzero(given_S) < np.count_nonzero(missing_S):
        raise _uneven(name, given, "a value", "none", missing, fields)
    fields.judge_sequences(
        missing_S, reason, lambda s: _uneven(name, s, "none", "a value", given, fields)
    )


def _uneven(
    name: str, s: int, got: str, expected: str, witness: int, fields: RequestFields
) -> RatoonError:
    return invalid(
        f"{fields.sequence(s)}.{name}", got, f"{expected}, as in {fields.sequence(witness)}"
    )


def outcomes(
    rollouts: Sequence[RawRollout], fields: RequestFields
) -> tuple[NDArray[np.float64] | None, NDArray[np.float32] | None]:
    """Rewards float64 [S] or advantages float32 [J]: one for the whole batch, or neither."""
    has_reward = np.array([rollout.reward is not None for rollout in rollouts])
    has_advantages = np.array([rollout.advantages is not None for rollout in rollouts])
    both = first_true(has_reward & has_advantages)
    if both is not None:
        path = f"{fields.sequence(both)}.advantages"
        raise invalid(path, "both reward and advantages", "one of them")
    rewarded, advantaged = first_true(has_reward), first_true(has_advantages)
    if rewarded is None:
        return None, token_column(rollouts, "advantages", fields)
    if advantaged is not None:
        first, other = sorted((rewarded, advantaged))
        names = {rewarded: "a reward", advantaged: "advantages"}
        has_tokens = fields.response_offsets[other] < fields.response_offsets[other + 1]
        name = "advantages" if has_tokens else "reward"
        raise _uneven(name, other, names[other], names[first], first, fields)
    all_S = np.ones(len(rollouts), np.bool_)
    check_even("reward", has_reward, all_S, BadRolloutReason.REWARD, fields)
    rewards = np.array([rollout.reward for rollout in rollouts], np.float64)
    fields.judge_sequences(
        ~(np.abs(rewards) <= MAX_FLOAT32),
        BadRolloutReason.REWARD,
        lambda s: invalid(f"{fields.sequence(s)}.reward", rewards[s], "a finite float32"),
    )
    return rewards, None


def sampling_settings(rollouts: Sequence[RawRollout], fields: RequestFields) -> SamplingSettings:
    """How each rollout was sampled; what was left out is off (top_p 1, top_k 0) or -1 (version)."""
    temperature = _within(
        [rollout.temperature for rollout in rollouts],
        "temperature",
        (_LEAST_TEMPERATURE, MAX_FLOAT32),
        f"a finite float32, at least {_LEAST_TEMPERATURE:g}: below it samplers are greedy",
        fields,
    )
    top_p = _within(
        [1.0 if rollout.top_p is None else rollout.top_p for rollout in rollouts],
        "top_p",
        (_LEAST_TOP_P, 1.0),
        "a number in (0, 1]",
        fields,
    )
    is_raw = np.zeros(len(rollouts), np.bool_)
    for s, rollout in enumerate(rollouts):
        _check_integer(rollout.top_k, _LAST_TOP_K, s, "top_k", fields)
        if rollout.sampler_logprobs is None or temperature[s] == 1.0:
            continue
        if rollout.sampler_logprobs_kind == SamplerLogprobsKind.UNSPECIFIED:
            path = f"{fields.sequence(s)}.sampler_logprobs_kind"
            raise invalid(
                path, "none", f"processed or raw, as the temperature is {rollout.temperature}"
            )
        is_raw[s] = rollout.sampler_logprobs_kind == SamplerLogprobsKind.RAW
    policy_version, token_version = sampled_versions(rollouts, fields)
    return SamplingSettings(
        temperature=temperature,
        sampler_is_raw=is_raw,
        truncated=np.array([rollout.truncated for rollout in rollouts], np.bool_),
        policy_version=policy_version,
        token_version=token_version,
        top_p=top_p,
        top_k=np.array([rollout.top_k or 0 for rollout in rollouts], np.int32),
    )


def _within(
    values: list[float],
    name: str,
    bounds: tuple[float, float],
    expected: str,
    fields: RequestFields,
) -> NDArray[np.float32]:
    """Values [S] as float32, all of them from the lower to the upper bound."""
    column = np.array(values, np.float64)
    s = first_true(~((column >= bounds[0]) & (column <= bounds[1])))
    if s is not None:
        raise invalid(f"{fields.sequence(s)}.{name}", values[s], expected)
    return column.astype(np.float32)


def _check_integer(value: int | None, most: int, s: int, name: str, fields: RequestFields) -> None:
    if value is not None and not 0 <= value <= most:
        raise invalid(f"{fields.sequence(s)}.{name}", value, f"an integer in [0, {most}]")
