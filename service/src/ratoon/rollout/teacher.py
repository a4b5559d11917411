"""A teacher's K likeliest tokens at each response token, and their log-probs, of all rollouts.

K is one for a batch. Rollouts that share a position may have other targets there: the columns are
of response tokens, as they were sent. Rows of tokens that are not trained are not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ratoon.errors import RatoonError, invalid
from ratoon.rollout.columns import LOGPROB_EPSILON, check_even
from ratoon.rollout.raw import RawRollout, RequestFields
from ratoon_proto.types import BadRolloutReason

# Tokens of a teacher at one position, and of a Forward's answer.
MAX_TEACHER_TOKENS = 128
# What rounding may add to a mass of one.
_MASS_EPSILON = 1e-3


def teacher_tokens(
    rollouts: Sequence[RawRollout],
    mask_J: NDArray[np.bool_],
    fields: RequestFields,
    vocab_size: int,
) -> NDArray[np.int32] | None:
    """Ids int32 [J, K], or None where no rollout gives them. Raises INVALID_ARGUMENT."""
    name = "teacher_tokens"
    ids_JK = _column(rollouts, name, "iu", mask_J, fields)
    if ids_JK is None:
        return None
    reason = BadRolloutReason.TOKEN
    is_unknown_JK = (ids_JK < 0) | (ids_JK >= vocab_size)

    def unknown(j: int) -> RatoonError:
        k = int(is_unknown_JK[j].argmax())
        expected = f"a token id in [0, {vocab_size})"
        return invalid(f"{fields.token(j, name)}[{k}]", ids_JK[j, k], expected)

    fields.judge_tokens(is_unknown_JK.any(1).ravel(), reason, unknown)
    sorted_JK = np.sort(ids_JK, axis=1)
    is_twice_JK = (sorted_JK[:, 1:] == sorted_JK[:, :-1]) & mask_J[:, None]

    def twice(j: int) -> RatoonError:
        token = sorted_JK[j, 1:][is_twice_JK[j]][0]
        return invalid(fields.token(j, name), f"the token {token} twice", "each token once")

    fields.judge_tokens(is_twice_JK.any(1).ravel(), reason, twice)
    return np.clip(ids_JK, 0, vocab_size - 1).astype(np.int32)


def teacher_logprobs(
    rollouts: Sequence[RawRollout],
    ids_JK: NDArray[np.int32] | None,
    mask_J: NDArray[np.bool_],
    fields: RequestFields,
) -> NDArray[np.float32] | None:
    """Log-probs of `ids_JK`, float32 [J, K], or None where no rollout gives them. Raises
    INVALID_ARGUMENT."""
    name = "teacher_logprobs"
    given_JK = _column(rollouts, name, "f", mask_J, fields)
    if given_JK is None:
        return None
    s = next(s for s, rollout in enumerate(rollouts) if rollout.teacher_logprobs is not None)
    if ids_JK is None:
        path = f"{fields.sequence(s)}.{name}"
        raise invalid(path, "log-probs without teacher_tokens", "the tokens that they are of")
    if given_JK.shape != ids_JK.shape:
        got = f"{given_JK.shape[1]} log-probs a token"
        expected = f"{ids_JK.shape[1]}, as in teacher_tokens"
        raise invalid(f"{fields.sequence(s)}.{name}.shape", got, expected)
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused below
        logprob_JK = given_JK.astype(np.float32)
        is_bad_JK = ~(np.isfinite(logprob_JK) & (logprob_JK <= LOGPROB_EPSILON))
        is_up_JK = logprob_JK[:, 1:] > logprob_JK[:, :-1]
        mass_J = np.exp(logprob_JK.astype(np.float64)).sum(axis=1)

    def bad(j: int) -> RatoonError:
        k = int(is_bad_JK[j].argmax())
        expected = "a finite log-probability <= 0"
        return invalid(f"{fields.token(j, name)}[{k}]", given_JK[j, k], expected)

    def up(j: int) -> RatoonError:
        k = int(is_up_JK[j].argmax()) + 1
        got = f"{logprob_JK[j, k]} after {logprob_JK[j, k - 1]}"
        return invalid(f"{fields.token(j, name)}[{k}]", got, "log-probs that do not ascend")

    def heavy(j: int) -> RatoonError:
        got = f"log-probs of a mass of {mass_J[j]:.6f}"
        return invalid(fields.token(j, name), got, f"a mass of at most 1 + {_MASS_EPSILON:g}")

    reason = BadRolloutReason.LOGPROB
    fields.judge_tokens(is_bad_JK.any(1).ravel(), reason, bad)
    fields.judge_tokens(is_up_JK.any(1).ravel(), reason, up)
    fields.judge_tokens(mask_J & (mass_J > 1 + _MASS_EPSILON), reason, heavy)
    return logprob_JK


def _column(
    rollouts: Sequence[RawRollout],
    name: str,
    kinds: str,
    mask_J: NDArray[np.bool_],
    fields: RequestFields,
) -> NDArray[Any] | None:
    """The column `name`, [J, K] in the widest dtype sent, zeros where `mask_J` is false."""
    values: list[NDArray[np.generic] | None] = [getattr(rollout, name) for rollout in rollouts]
    is_given_S = np.array([value is not None for value in values])
    if not is_given_S.any():
        return None
    needs_S = fields.with_some(mask_J)
    width = 0
    for s, value in enumerate(values):
        if value is not None:
            width = _check_form(value, name, kinds, s, width, fields)
    if not (is_given_S & needs_S).any():
        return None
    check_even(name, is_given_S, needs_S, BadRolloutReason.LOGPROB, fields)
    given = [value for value in values if value is not None]
    column_JK = np.zeros((len(mask_J), width), np.result_type(*given))
    bounds: list[int] = fields.response_offsets.tolist()
    for s, value in enumerate(values):
        if value is not None:
            column_JK[bounds[s] : bounds[s + 1]] = value
    column_JK[~mask_J] = 0
    return column_JK


def _check_form(
    value: NDArray[np.generic], name: str, kinds: str, s: int, width: int, fields: RequestFields
) -> int:
    """The K of sequence s, which is that of those before it: `width`, 0 of the first."""
    path = f"{fields.sequence(s)}.{name}"
    if value.dtype.kind not in kinds or value.dtype.itemsize < 4 or value.dtype == np.uint64:
        expected = "float32 or float64" if kinds == "f" else "int32, uint32 or int64"
        raise invalid(f"{path}.dtype", value.dtype, expected)
    num_tokens = int(fields.response_offsets[s + 1] - fields.response_offsets[s])
    most = f"K from 1 to {MAX_TEACHER_TOKENS}"
    is_of_form = value.ndim == 2 and len(value) == num_tokens
    if not is_of_form or not 1 <= value.shape[1] <= MAX_TEACHER_TOKENS:
        expected = f"[{num_tokens} response tokens, K], {most}"
        raise invalid(f"{path}.shape", list(value.shape), expected)
    if width not in (0, value.shape[1]):
        raise invalid(f"{path}.shape", list(value.shape), f"K = {width}, as in rollouts before it")
    return value.shape[1]
