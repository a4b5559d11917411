"""Rewards to one advantage per sequence, over each group as it was received.

A group of several whose rewards are all equal, as far as float32 can tell, has advantages of
exactly zero where the mean is taken off.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ratoon.errors import invalid

_STD_EPSILON = 1e-6
# Rewards closer than so many steps of float32 at their size are equal. A reward model computes in
# float32 at best, and its last bits depend on what else is in its batch: rounding of one sum moves
# them by a step, that of the handful that a score is made of by a few. So a difference counts from
# a millionth of the rewards' size on.
_EQUAL_STEPS = 8
# Exponents of float32's steps: 2^(e - 24) for a number in [2^(e - 1), 2^e), 2^-149 at least.
_STEP_EXPONENT = 24
_LEAST_STEP_EXPONENT = -149


def group_mean_std(
    rewards: NDArray[np.float64], group_offsets: NDArray[np.int64]
) -> NDArray[np.float64]:
    """(r - mean) / (std + 1e-6) with the unbiased std (GRPO, arXiv 2402.03300, 4.1.2).

    A group of one has mean 0 and std 1.
    """
    sizes = np.diff(group_offsets)
    centred = group_mean(rewards, group_offsets)
    squares = np.add.reduceat(centred**2, group_offsets[:-1])
    std = np.where(sizes > 1, np.sqrt(squares / np.maximum(sizes - 1, 1)), 1.0)
    return centred / (np.repeat(std, sizes) + _STD_EPSILON)


def group_mean(
    rewards: NDArray[np.float64], group_offsets: NDArray[np.int64]
) -> NDArray[np.float64]:
    """r - mean (Dr. GRPO, arXiv 2503.20783). A group of one has mean 0."""
    sizes = np.diff(group_offsets)
    mean = np.add.reduceat(rewards, group_offsets[:-1]) / sizes
    mean[sizes == 1] = 0.0
    return _zero_if_equal(rewards - np.repeat(mean, sizes), rewards, group_offsets)


def group_mean_batch_std(
    rewards: NDArray[np.float64], group_offsets: NDArray[np.int64]
) -> NDArray[np.float64]:
    """(r - mean of the group) / (std + 1e-6), the unbiased std of these over the whole batch.

    REINFORCE++ with a baseline (arXiv 2501.03262): groups of little variance are not blown up as by
    their own std. A group of one has mean 0; a batch of one has std 1.
    """
    centred = group_mean(rewards, group_offsets)
    std = float(centred.std(ddof=1)) if len(rewards) > 1 else 1.0
    return centred / (std + _STD_EPSILON)


def leave_one_out(
    rewards: NDArray[np.float64], group_offsets: NDArray[np.int64]
) -> NDArray[np.float64]:
    """r - mean of the group's other rewards (RLOO, arXiv 2402.14740, eq. 8). A group of one: r."""
    sizes = np.diff(group_offsets)
    totals = np.add.reduceat(rewards, group_offsets[:-1])
    others = (np.repeat(totals, sizes) - rewards) / np.repeat(np.maximum(sizes - 1, 1), sizes)
    others[np.repeat(sizes == 1, sizes)] = 0.0
    return _zero_if_equal(rewards - others, rewards, group_offsets)


def identity(rewards: NDArray[np.float64], group_offsets: NDArray[np.int64]) -> NDArray[np.float64]:
    """The reward itself."""
    assert group_offsets[-1] == len(rewards)
    return rewards.copy()


def overlong_penalty(
    response_lengths: NDArray[np.int64], max_tokens: int, buffer_tokens: int
) -> NDArray[np.float64]:
    """Soft overlong punishment in [-1, 0], float64 [S] (DAPO, arXiv 2503.14476, eq. 13).

    0 up to max_tokens - buffer_tokens, then falling linearly to -1 at max_tokens, -1 beyond.
    Raises `RatoonError` unless 0 < buffer_tokens <= max_tokens.
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise invalid("loss.overlong.buffer_tokens", buffer_tokens, f"1 to {max_tokens}")
    excess = response_lengths - (max_tokens - buffer_tokens)
    return -np.clip(excess / buffer_tokens, 0.0, 1.0)


def with_penalty(
    rewards: NDArray[np.float64],
    group_offsets: NDArray[np.int64],
    penalties: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Rewards plus penalties, float64 [S].

    Equal rewards become the same number first: what is left of a reward may be so small that its
    rounding would no longer look like rounding.
    """
    is_equal = np.repeat(zero_variance_groups(rewards, group_offsets), np.diff(group_offsets))
    first = np.repeat(rewards[group_offsets[:-1]], np.diff(group_offsets))
    return np.where(is_equal, first, rewards) + penalties


def zero_variance_groups(
    rewards: NDArray[np.float64], group_offsets: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Groups of more than one whose rewards are all equal, bool [G]: they teach nothing.

    Equal means within eight steps of float32 at the size of the group's largest reward. A group of
    one is not among them: its advantage is its reward.
    """
    low = np.minimum.reduceat(rewards, group_offsets[:-1])
    high = np.maximum.reduceat(rewards, group_offsets[:-1])
    exponent = np.frexp(np.maximum(np.abs(low), np.abs(high)))[1] - _STEP_EXPONENT
    step = np.ldexp(1.0, np.maximum(exponent, _LEAST_STEP_EXPONENT))
    return (high - low <= _EQUAL_STEPS * step) & (np.diff(group_offsets) > 1)


def _zero_if_equal(
    advantages: NDArray[np.float64],
    rewards: NDArray[np.float64],
    group_offsets: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Take off what rounding leaves where all rewards of a group are equal."""
    is_zero = zero_variance_groups(rewards, group_offsets)
    return np.where(np.repeat(is_zero, np.diff(group_offsets)), 0.0, advantages)
