"""Advantages against numbers worked out by hand and against plain loops."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ratoon.errors import RatoonError
from ratoon.rollout.advantages import (
    group_mean,
    group_mean_batch_std,
    group_mean_std,
    identity,
    leave_one_out,
    overlong_penalty,
    with_penalty,
    zero_variance_groups,
)
from ratoon.rollout.validate import validate_groups
from tests.builders import group, limits, rollout
from tests.oracle.advantages import are_equal
from tests.rollout.strategies import CHECKED

Advantage = Callable[[NDArray[np.float64], NDArray[np.int64]], NDArray[np.float64]]

_GROUPS = st.lists(
    st.lists(st.floats(-100, 100, allow_subnormal=False), min_size=1, max_size=6),
    min_size=1,
    max_size=4,
)


def _flat(groups: list[list[float]]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    offsets = np.cumsum([0, *map(len, groups)])
    return np.array([reward for rewards in groups for reward in rewards]), offsets


def _loop_mean_std(rewards: list[float]) -> list[float]:
    if len(rewards) == 1:
        return [rewards[0] / (1 + 1e-6)]
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    return [(reward - mean) / (std + 1e-6) for reward in rewards]


def _loop_mean(rewards: list[float]) -> list[float]:
    mean = statistics.fmean(rewards) if len(rewards) > 1 else 0.0
    return [reward - mean for reward in rewards]


def _loop_leave_one_out(rewards: list[float]) -> list[float]:
    if len(rewards) == 1:
        return rewards
    others = [rewards[:i] + rewards[i + 1 :] for i in range(len(rewards))]
    return [reward - statistics.fmean(rest) for reward, rest in zip(rewards, others, strict=True)]


_LOOPS: dict[Advantage, Callable[[list[float]], list[float]]] = {
    group_mean_std: _loop_mean_std,
    group_mean: _loop_mean,
    leave_one_out: _loop_leave_one_out,
    identity: list,
}


@CHECKED
@given(groups=_GROUPS)
def test_each_advantage_is_that_of_a_loop(groups: list[list[float]]) -> None:
    """Groups of zero variance are those of more than one, equal rewards."""
    is_flat = [len(rewards) > 1 and are_equal(rewards) for rewards in groups]
    assert zero_variance_groups(*_flat(groups)).tolist() == is_flat
    for advantage, loop in _LOOPS.items():
        expected: list[float] = []
        for rewards, flat in zip(groups, is_flat, strict=True):
            are_zeros = flat and advantage is not identity
            expected += [0.0] * len(rewards) if are_zeros else loop(rewards)
        # Rewards of 1e-6 apart and less are divided by about 1e-6, rounding of the mean with them.
        np.testing.assert_allclose(advantage(*_flat(groups)), expected, rtol=1e-9, atol=1e-6)


def test_advantages_worked_out_by_hand() -> None:
    rewards, offsets = _flat([[1.0, 2.0, 6.0], [5.0]])
    std = np.sqrt(7.0)  # (4 + 1 + 9) / 2
    np.testing.assert_allclose(
        group_mean_std(rewards, offsets),
        [-2 / (std + 1e-6), -1 / (std + 1e-6), 3 / (std + 1e-6), 5 / (1 + 1e-6)],
        rtol=1e-14,
    )
    np.testing.assert_allclose(group_mean(rewards, offsets), [-2, -1, 3, 5], rtol=1e-14)
    np.testing.assert_allclose(leave_one_out(rewards, offsets), [-3, -1.5, 4.5, 5], rtol=1e-14)
    assert identity(rewards, offsets).tolist() == [1, 2, 6, 5]


@pytest.mark.parametrize("advantage", [group_mean_std, group_mean, leave_one_out])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.7e9])
def test_equal_rewards_have_exactly_no_advantage(advantage: Advantage, reward: float) -> None:
    """The rounded mean of equal rewards is not always the reward."""
    for size in range(2, 12):
        values = advantage(*_flat([[reward] * size, [0.0, 1.0]]))
        assert values[:size].tolist() == [0.0] * size
        assert values[size] != 0


def test_overlong_penalty_at_every_corner() -> None:
    """DAPO eq. 13 with L_max = 10, L_cache = 4: free up to 6, -1 from 10 on."""
    lengths = np.array([0, 6, 7, 8, 9, 10, 11, 100])
    expected = [0.0, 0.0, -0.25, -0.5, -0.75, -1.0, -1.0, -1.0]
    assert overlong_penalty(lengths, 10, 4).tolist() == expected


@pytest.mark.parametrize("buffer_tokens", [0, -1, 11])
def test_overlong_buffer_must_fit(buffer_tokens: int) -> None:
    with pytest.raises(RatoonError) as caught:
        overlong_penalty(np.array([1]), 10, buffer_tokens)
    assert caught.value.field == "loss.overlong.buffer_tokens"


def test_two_groups_of_one_prompt_are_normalised_apart() -> None:
    """Trap 3: a group identity lost on the way, several prompts silently trained as one."""
    batch = validate_groups(
        [
            group([1, 2], [rollout([3], reward=0.0), rollout([4], reward=2.0)], "first"),
            group([1, 2], [rollout([3], reward=100.0), rollout([4], reward=102.0)], "second"),
        ],
        limits(),
    )
    assert batch.rewards is not None
    assert batch.group_ids == ("first", "second")
    assert batch.group_offsets.tolist() == [0, 2, 4]
    assert group_mean(batch.rewards, batch.group_offsets).tolist() == [-1, 1, -1, 1]


def test_the_std_of_the_batch_by_hand():
    """Centred: -1, 1 | -3, 3 | 0. Their squares add up to 20, over 4 is 5."""
    rewards, offsets = np.array([1.0, 3.0, 0.0, 6.0, 0.0]), np.array([0, 2, 4, 5])
    found = group_mean_batch_std(rewards, offsets)
    np.testing.assert_allclose(found, np.array([-1, 1, -3, 3, 0]) / math.sqrt(5.0), rtol=1e-6)
    # What one group alone would blow up: rewards that differ by a hair.
    close = group_mean_batch_std(np.array([0.5, 0.5001, 0.0, 1.0]), np.array([0, 2, 4]))
    assert np.abs(close[:2]).max() < 1e-3 < np.abs(close[2:]).min()


def test_the_std_of_a_batch_without_differences_divides_by_nothing():
    flat = group_mean_batch_std(np.array([0.1, 0.1, 0.7, 0.7, 0.7]), np.array([0, 2, 5]))
    assert flat.tolist() == [0.0] * 5
    assert group_mean_batch_std(np.array([2.0]), np.array([0, 1])) == pytest.approx(2.0)


def _steps_above(reward: float, steps: int) -> float:
    """The float32 so many representable numbers above a reward."""
    value = np.float32(reward)
    for _ in range(steps):
        value = np.nextafter(value, np.float32(np.inf))
    return float(value)


ROUNDED_APART = {
    "a reward model's 10.1": (10.1, 1),
    "a reward model's 100.3": (100.3, 1),
    "below a power of two": (np.nextafter(np.float32(2), np.float32(0)), 1),
    "several steps": (0.1, 8),
    "negative": (-100.3, 3),
    "huge": (1e30, 2),
    "a denormal": (1e-40, 1),
    "zero": (0.0, 1),
}


@pytest.mark.parametrize("case", ROUNDED_APART)
@pytest.mark.parametrize(
    "advantage", [group_mean_std, group_mean, group_mean_batch_std, leave_one_out]
)
def test_rewards_a_few_float32_steps_apart_are_equal(advantage: Advantage, case: str) -> None:
    """Equal answers that a float32 reward model scored a step apart had advantages of size 1."""
    reward, steps = ROUNDED_APART[case]
    low, high = float(np.float32(reward)), _steps_above(reward, steps)
    rewards, offsets = _flat([[low, low, low, high], [high, low], [0.0, 1.0], [3.0]])
    assert zero_variance_groups(rewards, offsets).tolist() == [True, True, False, False]
    values = advantage(rewards, offsets)
    assert values[:6].tolist() == [0.0] * 6
    assert values[6] < 0 < values[7]
    assert identity(rewards, offsets).tolist() == rewards.tolist()


@pytest.mark.parametrize(
    "group",
    [
        [1.0, 1.001],
        [1.0, 1.00001],
        [100.3, 100.301],
        [-1.0, -1.001],
        [-1.0, 1.0],
        [1e30, 1.00001e30],
        [0.0, 1e-40],
        [0.0, 0.0, 1e-6],
        [0.1, _steps_above(0.1, 9)],
    ],
)
def test_small_differences_of_rewards_are_kept(group: list[float]) -> None:
    rewards, offsets = _flat([group])
    assert zero_variance_groups(rewards, offsets).tolist() == [False]
    for advantage in (group_mean_std, group_mean, leave_one_out):
        values = advantage(rewards, offsets)
        assert values[0] != 0 != values[-1]


def test_a_penalty_does_not_make_a_difference_of_rounding() -> None:
    """A penalty that takes away most of a reward leaves its rounding, which then looks large."""
    low, high = float(np.float32(10.1)), _steps_above(10.1, 1)
    rewards, offsets = _flat([[low, high, low], [low, high, 0.0]])
    penalised = with_penalty(rewards, offsets, np.full(6, -10.1))
    assert zero_variance_groups(penalised, offsets).tolist() == [True, False]
    apart = with_penalty(rewards, offsets, np.array([-1.0, 0, 0, 0, 0, 0]))
    assert group_mean(apart, offsets)[:3] == pytest.approx([-2 / 3, 1 / 3, 1 / 3])
