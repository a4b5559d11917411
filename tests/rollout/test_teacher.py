"""A teacher's tokens and log-probs: what passes, and what is refused by rollout and position."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ratoon.errors import ErrorCode, RatoonError
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.serial import batch_from_bytes, batch_to_bytes
from ratoon.rollout.teacher import MAX_TEACHER_TOKENS
from ratoon.rollout.validate import validate_groups
from tests.builders import group, limits, random_groups, rollout

VOCAB_SIZE = 100
LIMITS = limits(vocab_size=VOCAB_SIZE, max_sequence_tokens=20)
TOKENS = np.array([[5, 9], [1, 0], [99, 3]], np.int32)
LOGPROBS = np.log(np.array([[0.5, 0.25], [0.9, 0.1], [0.4, 0.4]])).astype(np.float32)


def _taught(**changes: Any) -> dict[str, Any]:
    return {"teacher_tokens": TOKENS, "teacher_logprobs": LOGPROBS} | changes


def _batch(*rollouts: Any, **options: Any) -> RolloutBatch:
    return validate_groups([group([7], [*rollouts], "a")], LIMITS, **options)


def _with(array: NDArray[Any], place: tuple[int, ...], value: float) -> NDArray[Any]:
    changed = array.copy()
    changed[place] = value
    return changed


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64])
def test_what_passes_is_what_was_sent(dtype: type) -> None:
    """A rollout without tokens, or none of them trained, may leave the teacher out."""
    given = _taught(teacher_tokens=TOKENS.astype(dtype))
    batch = _batch(
        rollout([2, 3, 4], **given),
        rollout([]),
        rollout([2], loss_mask=np.array([False])),
        rollout([2, 3, 5], **given),
    )
    assert batch.teacher_tokens is not None
    assert batch.teacher_logprobs is not None
    assert batch.teacher_tokens.dtype == np.int32
    for start in (0, 4):
        np.testing.assert_array_equal(batch.teacher_tokens[start : start + 3], TOKENS)
        np.testing.assert_array_equal(batch.teacher_logprobs[start : start + 3], LOGPROBS)
    assert not batch.teacher_tokens[3].any()
    assert not batch.teacher_logprobs[3].any()


def test_rows_of_untrained_tokens_are_not_looked_at() -> None:
    """Nor do they decide the bytes of the batch, by which a repeated call is known."""
    mask = np.array([True, False, True])
    plain = _batch(rollout([2, 3, 4], loss_mask=mask, **_taught()))
    garbage = _taught(
        teacher_tokens=_with(TOKENS, (1,), 1 << 20),
        teacher_logprobs=_with(LOGPROBS, (1,), np.nan),
    )
    odd = _batch(rollout([2, 3, 4], loss_mask=mask, **garbage))
    assert batch_to_bytes(odd) == batch_to_bytes(plain)


def test_the_bytes_of_a_batch_are_those_of_its_teacher() -> None:
    batch = _batch(rollout([2, 3, 4], **_taught()))
    back = batch_from_bytes(batch_to_bytes(batch))
    assert back.teacher_tokens is not None
    assert back.teacher_logprobs is not None
    np.testing.assert_array_equal(back.teacher_tokens, TOKENS)
    np.testing.assert_array_equal(back.teacher_logprobs, LOGPROBS)
    other = _batch(rollout([2, 3, 4], **_taught(teacher_tokens=_with(TOKENS, (2, 1), 4))))
    assert batch_to_bytes(other) != batch_to_bytes(batch)


WIDE = np.zeros((3, MAX_TEACHER_TOKENS + 1), np.int32) + np.arange(MAX_TEACHER_TOKENS + 1)


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        (
            {"teacher_tokens": TOKENS[:2]},
            "teacher_tokens.shape",
            r"\[3 response tokens, K",
        ),
        ({"teacher_tokens": TOKENS[:, 0]}, "teacher_tokens.shape", r"got \[3\]"),
        ({"teacher_tokens": TOKENS[:, :0]}, "teacher_tokens.shape", "K from 1 to 128"),
        ({"teacher_tokens": WIDE}, "teacher_tokens.shape", "K from 1 to 128"),
        ({"teacher_tokens": TOKENS[:, :1]}, "teacher_tokens.shape", "K = 2, as in rollouts before"),
        ({"teacher_tokens": TOKENS.astype(np.float32)}, "teacher_tokens.dtype", "int32, uint32 or"),
        ({"teacher_tokens": TOKENS.astype(np.uint16)}, "teacher_tokens.dtype", "got uint16"),
        ({"teacher_tokens": _with(TOKENS, (1, 1), 100)}, "teacher_tokens[1][1]", "got 100"),
        ({"teacher_tokens": _with(TOKENS, (2, 0), -1)}, "teacher_tokens[2][0]", r"in \[0, 100\)"),
        ({"teacher_tokens": _with(TOKENS, (1, 1), 1)}, "teacher_tokens[1]", "the token 1 twice"),
        ({"teacher_tokens": None}, "teacher_tokens", "got none, expected a value"),
        ({"teacher_logprobs": None}, "teacher_logprobs", "got none, expected a value"),
        ({"teacher_logprobs": LOGPROBS[:, :1]}, "teacher_logprobs.shape", "K = 2"),
        ({"teacher_logprobs": LOGPROBS.astype(np.float16)}, "teacher_logprobs.dtype", "float32 or"),
        ({"teacher_logprobs": _with(LOGPROBS, (0, 1), np.nan)}, "teacher_logprobs[0][1]", "nan"),
        ({"teacher_logprobs": _with(LOGPROBS, (0, 1), -np.inf)}, "teacher_logprobs[0][1]", "-inf"),
        ({"teacher_logprobs": _with(LOGPROBS, (2, 0), 0.5)}, "teacher_logprobs[2][0]", "<= 0"),
        ({"teacher_logprobs": LOGPROBS[:, ::-1]}, "teacher_logprobs[0][1]", "do not ascend"),
        (
            {"teacher_logprobs": _with(LOGPROBS, (2,), -0.5)},
            "teacher_logprobs[2]",
            "mass of 1.2",
        ),
    ],
)
def test_a_teacher_that_cannot_be_one_is_refused(
    changes: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(RatoonError, match=message) as caught:
        _batch(rollout([2, 3, 4], **_taught()), rollout([2, 3, 4], **_taught(**changes)))
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert caught.value.field == f"groups[0].rollouts[1].{field}"


def test_log_probs_without_tokens_or_of_other_widths_are_refused() -> None:
    with pytest.raises(RatoonError, match="the tokens that they are of"):
        _batch(rollout([2, 3, 4], teacher_logprobs=LOGPROBS))
    with pytest.raises(RatoonError, match="1 log-probs a token, expected 2"):
        _batch(rollout([2, 3, 4], **_taught(teacher_logprobs=LOGPROBS[:, :1])))


def test_a_mass_of_one_and_rounding_pass() -> None:
    mass = np.log(np.array([[0.7, 0.3005]] * 3)).astype(np.float32)
    batch = _batch(rollout([2, 3, 4], **_taught(teacher_logprobs=mass)))
    assert batch.teacher_logprobs is not None


def test_a_call_may_drop_rollouts_whose_teacher_is_bad() -> None:
    good = rollout([2, 3, 4], **_taught())
    bad = rollout([2, 3, 4], **_taught(teacher_logprobs=LOGPROBS[:, ::-1]))
    batch = _batch(bad, good, drops_bad=True)
    assert batch.bad_rollouts is not None
    assert batch.bad_rollouts[:, :2].tolist() == [[0, 0]]
    assert batch.teacher_tokens is not None
    np.testing.assert_array_equal(batch.teacher_tokens, TOKENS)


def test_random_teachers_pass() -> None:
    groups = random_groups(np.random.default_rng(3), num_groups=8, num_teacher_tokens=6)
    batch = validate_groups(groups, limits(vocab_size=64))
    assert batch.teacher_logprobs is not None
    mass_J = np.exp(batch.teacher_logprobs[batch.loss_mask]).sum(axis=1)
    assert (mass_J < 1).all()
