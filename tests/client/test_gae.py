"""Advantages and returns against a plain loop over one rollout after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ratoon_client import InvalidArgumentError, gae


def _loop(
    reward: Sequence[float], value: Sequence[float], mask: Sequence[bool], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """Backwards over all tokens; untrained ones hand their reward on to earlier ones."""
    advantages, returns = [0.0] * len(value), [0.0] * len(value)
    next_value = later = waiting = 0.0
    for t in reversed(range(len(value))):
        waiting += reward[t]
        if not mask[t]:
            continue
        later = waiting + gamma * next_value - value[t] + gamma * lam * later
        advantages[t], returns[t] = later, later + value[t]
        next_value, waiting = value[t], 0.0
    return advantages, returns


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.0, 0.0)])
@pytest.mark.parametrize("is_masked", [False, True])
def test_paths_of_a_tree_are_those_of_a_plain_loop(
    gamma: float, lam: float, is_masked: bool
) -> None:
    """Rollouts share the values of a prefix; each has its own after it, and its own reward."""
    rng = np.random.default_rng(0)
    prefix = rng.normal(size=5)
    lengths = [0, 0, 3, 7, 1]
    values = [np.concatenate([prefix, rng.normal(size=n)]).astype(np.float32) for n in lengths]
    values += [np.zeros(0, np.float32)]
    ends = rng.normal(size=len(values)).tolist()
    by_token = [rng.normal(size=len(value)).astype(np.float32) for value in values]
    masks = [
        rng.random(len(value)) < 0.6 if is_masked else np.ones(len(value), bool) for value in values
    ]
    for rewards in (ends, by_token):
        advantages, returns = gae(
            rewards, values, gamma=gamma, lam=lam, loss_masks=masks if is_masked else None
        )
        for s, (value, mask) in enumerate(zip(values, masks, strict=True)):
            reward: Any = rewards[s]
            if isinstance(reward, float):
                reward = np.zeros(len(value))
                reward[np.flatnonzero(mask)[-1:]] = np.float32(rewards[s])
            expected = _loop(reward.tolist(), value.tolist(), mask.tolist(), gamma, lam)
            for found, column in zip((advantages[s], returns[s]), expected, strict=True):
                assert found.dtype == np.float32
                np.testing.assert_allclose(found, np.array(column), rtol=1e-6, atol=1e-6)
                assert not found[~mask].any()


def test_with_lambda_one_the_return_is_what_is_left_of_the_rewards() -> None:
    advantages, returns = gae([[1.0, 2.0, 4.0]], [[0.5, -1.0, 3.0]], lam=1.0)
    assert returns[0].tolist() == [7.0, 6.0, 4.0]
    assert advantages[0].tolist() == [6.5, 7.0, 1.0]
    _, one_step = gae([7.0], [[0.5, -1.0, 3.0]], lam=0.0)
    assert one_step[0].tolist() == [-1.0, 3.0, 7.0]


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("rewards", {"rewards": [1.0]}),
        ("rewards[1]", {"rewards": [1.0, [1.0, 2.0]]}),
        ("rewards[0][0]", {"rewards": [float("nan"), 0.0]}),
        ("values[1][0]", {"values": [[0.0, 0.0], [float("inf")]]}),
        ("values[0]", {"values": ["ab", [0.0]]}),
        ("loss_masks", {"loss_masks": [[1, 1]]}),
        ("loss_masks[1]", {"loss_masks": [[1, 1], [1, 0]]}),
        ("loss_masks[0][1]", {"loss_masks": [[1, 2], [1]]}),
        ("gamma", {"gamma": 1.5}),
        ("lam", {"lam": float("nan")}),
    ],
)
def test_what_does_not_fit_is_refused_by_name(field: str, change: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"rewards": [1.0, 0.0], "values": [[0.0, 0.0], [0.0]]}
    with pytest.raises(InvalidArgumentError) as refused:
        gae(**(fields | change))
    assert refused.value.field == field
