"""Generalised advantage estimation: advantages and returns of rollouts, from a critic's values."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import cast

import numpy as np
from numpy.typing import NDArray

from ratoon_client.arguments import FlagsLike, FloatsLike, flag_array, number, shown, value_array
from ratoon_client.errors import InvalidArgumentError


def gae(
    rewards: Sequence[float | FloatsLike],
    values: Sequence[FloatsLike],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    loss_masks: Sequence[FlagsLike] | None = None,
) -> tuple[list[NDArray[np.float32]], list[NDArray[np.float32]]]:
    """Advantages and returns of S rollouts, one float32 [R] array each, zero where not trained.

    With V the values and r the rewards of a rollout's trained tokens, and V = 0 after the last, the
    advantage of token t is the sum over k of (gamma lam)^k (r[t+k] + gamma V[t+k+1] - V[t+k])
    (Schulman et al., 2016, arXiv 1506.02438, eq. 16), and its return is the advantage plus V[t].
    Rollouts that share tokens share their values there; each has advantages and returns of its own.

    Args:
        rewards: Of each rollout one number, which comes with its last trained token, or one for
            each token [R]. That of a token that is not trained comes with the trained one before
            it; before the first trained token it is nobody's.
        values: Those of a Forward [R].
        gamma: Discount of what comes later, from 0 to 1.
        lam: Weight of later values' errors, from 0 (one step) to 1 (all rewards).
        loss_masks: Which tokens are trained [R]; default: all.

    Raises:
        InvalidArgumentError: Rollouts or tokens do not match, or a number is out of range.
    """
    for name, factor in (("gamma", gamma), ("lam", lam)):
        if not 0 <= number(name, factor) <= 1:
            raise InvalidArgumentError(name, factor, "a number from 0 to 1")
    for name, given in (("rewards", rewards), ("loss_masks", loss_masks)):
        if given is not None and len(given) != len(values):
            raise InvalidArgumentError(name, f"{len(given)} rollouts", f"{len(values)}, as values")
    advantages: list[NDArray[np.float32]] = []
    returns: list[NDArray[np.float32]] = []
    for s, sent in enumerate(values):
        value_R = _finite(f"values[{s}]", sent)
        mask_R = np.ones(len(value_R), np.bool_)
        if loss_masks is not None:
            mask_R = flag_array(f"loss_masks[{s}]", loss_masks[s])
            _check_length(f"loss_masks[{s}]", len(mask_R), len(value_R))
        trained = np.flatnonzero(mask_R)
        value_N = value_R[trained]
        advantage_N = _advantages(
            _rewards(f"rewards[{s}]", rewards[s], trained, len(value_R)), value_N, gamma, lam
        )
        for column, found_N in ((advantages, advantage_N), (returns, advantage_N + value_N)):
            column.append(np.zeros(len(value_R), np.float32))
            column[-1][trained] = found_N
    return advantages, returns


def _advantages(
    reward_N: NDArray[np.float64], value_N: NDArray[np.float64], gamma: float, lam: float
) -> NDArray[np.float64]:
    """Advantages of N tokens that follow one another."""
    delta_N = reward_N + gamma * np.append(value_N[1:], 0.0) - value_N
    later = 0.0
    for t in range(len(delta_N) - 1, -1, -1):
        later = delta_N[t] = delta_N[t] + gamma * lam * later
    return delta_N


def _rewards(
    field: str, given: float | FloatsLike, trained: NDArray[np.int64], num_tokens: int
) -> NDArray[np.float64]:
    """Rewards of the trained tokens, float64 [N]."""
    reward_N = np.zeros(len(trained))
    if isinstance(given, Real):
        reward_N[-1:] = _finite(field, [cast("float", given)])
        return reward_N
    reward_R = _finite(field, cast("FloatsLike", given))
    _check_length(field, len(reward_R), num_tokens)
    owner_R = np.searchsorted(trained, np.arange(num_tokens), side="right") - 1
    np.add.at(reward_N, owner_R[owner_R >= 0], reward_R[owner_R >= 0])
    return reward_N


def _finite(field: str, given: FloatsLike) -> NDArray[np.float64]:
    values = value_array(field, given).astype(np.float64)
    if not np.isfinite(values).all():
        bad = int(np.argmin(np.isfinite(values)))
        raise InvalidArgumentError(f"{field}[{bad}]", shown(values[bad]), "a finite number")
    return values


def _check_length(field: str, got: int, expected: int) -> None:
    if got != expected:
        raise InvalidArgumentError(field, f"{got} tokens", f"{expected}, as in values")
