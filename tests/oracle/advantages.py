"""Advantages, drops and counters of a list of paths, group by group, in plain loops.

Order: advantages over each group as received, then drops, then counters over what remains.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tests.oracle.paths import OracleLoss, Overlong, Path

_Given = TypeVar("_Given")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """A path that is trained on: which of its trained tokens count, and its advantages.

    `own` bool [R]: the trained tokens whose term this path pays; `advantages` float64 [R].
    """

    path: Path
    own: NDArray[np.bool_]
    advantages: NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """A group is its id and its prompt: whoever numbers groups anew in each call has new ones."""

    tokens: int
    sequences: int
    groups: frozenset[tuple[str, bytes]]

    def __add__(self, other: Counters) -> Counters:
        return Counters(
            tokens=self.tokens + other.tokens,
            sequences=self.sequences + other.sequences,
            groups=self.groups | other.groups,
        )


NOTHING = Counters(tokens=0, sequences=0, groups=frozenset())


def overlong_penalty(length: int, rule: Overlong) -> float:
    """0 up to max - buffer, then linearly down to -1 at max, -1 past it; times scale."""
    free = rule.max_tokens - rule.buffer_tokens
    if length <= free:
        return 0.0
    if length <= rule.max_tokens:
        return rule.scale * (free - length) / rule.buffer_tokens
    return -rule.scale


def _groups(paths: list[Path]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for index, path in enumerate(paths):
        groups.setdefault(path.group_id, []).append(index)
    return groups


def are_equal(rewards: list[float]) -> bool:
    """Whether the rewards are within eight steps of float32, as wide as at the largest of them.

    A step is 2^-23 of the power of two at or below the largest magnitude, and 2^-149 at least.
    """
    largest, power = max(abs(Fraction(r)) for r in rewards), Fraction(2) ** -126
    while 2 * power <= largest:
        power *= 2
    step = power / 2**23
    return Fraction(max(rewards)) - Fraction(min(rewards)) <= 8 * step


def _group_advantages(rewards: list[float], kind: str) -> list[float]:
    """In rational arithmetic, so that equal rewards give exactly zero."""
    exact, count = [Fraction(r) for r in rewards], len(rewards)
    if kind == "none" or (kind == "leave_one_out" and count == 1):
        return rewards
    if count > 1 and are_equal(rewards):
        return [0.0] * count
    if kind == "leave_one_out":
        return [float(r - (sum(exact) - r) / (count - 1)) for r in exact]
    mean = sum(exact) / count if count > 1 else Fraction(0)
    centred = [r - mean for r in exact]
    if kind == "group_mean":
        return [float(r) for r in centred]
    assert kind == "group_mean_std"
    std = math.sqrt(sum(r * r for r in centred) / (count - 1)) if count > 1 else 1.0
    return [float(r) / (std + 1e-6) for r in centred]


def _advantages(paths: list[Path], loss: OracleLoss) -> list[NDArray[np.float64]]:
    """The advantage of every response token of each path."""
    out = [np.zeros(len(path.response)) for path in paths]
    if loss.kind in ("cross_entropy", "distillation", "value"):
        return out
    if loss.advantage == "given":
        return [_present(path.advantages) for path in paths]
    is_by_batch = loss.advantage == "group_mean_batch_std"
    kind = "group_mean" if is_by_batch else loss.advantage
    values: dict[int, float] = {}
    for members in _groups(paths).values():
        rewards = [_present(paths[index].reward) for index in members]
        if loss.overlong is not None:
            lengths = [len(paths[index].response) for index in members]
            penalties = [overlong_penalty(length, loss.overlong) for length in lengths]
            if are_equal(rewards):
                rewards = rewards[:1] * len(rewards)
            rewards = [r + penalty for r, penalty in zip(rewards, penalties, strict=True)]
        values |= dict(zip(members, _group_advantages(rewards, kind), strict=True))
    if is_by_batch and len(paths) > 1:
        std = statistics.stdev([Fraction(value) for value in values.values()])
        values = {index: value / (float(std) + 1e-6) for index, value in values.items()}
    for index, value in values.items():
        out[index][:] = value
    return out


def _flat_paths(paths: list[Path]) -> set[int]:
    """Paths of groups of more than one whose rewards are all equal.

    Of rewards as received, without penalty: the paper filters by the answers' accuracy (eq. 11).
    """
    flat: set[int] = set()
    for members in _groups(paths).values():
        rewards = [reward for index in members if (reward := paths[index].reward) is not None]
        if len(rewards) == len(members) > 1 and are_equal(rewards):
            flat.update(members)
    return flat


def _present(value: _Given | None) -> _Given:
    assert value is not None
    return value


def select(paths: list[Path], loss: OracleLoss, version: int = 0) -> list[Counted]:
    """Paths that remain, in request order; under `once` a token is paid by the first to train it.

    A trained token is shared where everything up to and including it is the same, and so is the
    temperature.
    """
    advantages, flat = _advantages(paths, loss), _flat_paths(paths)
    paid: set[tuple[float, tuple[int, ...]]] = set()
    remaining: list[Counted] = []
    for index, path in enumerate(paths):
        is_old = loss.max_versions is not None and 0 <= path.version < version - loss.max_versions
        is_cut = loss.filter_truncated and path.truncated
        if is_old or is_cut or (loss.drop_zero_variance and index in flat):
            continue
        own = path.mask.copy()
        if loss.shared == "once":
            for token in path.trained:
                prefix = tuple(path.tokens[: len(path.prompt) + token + 1].tolist())
                own[token] = (path.temperature, prefix) not in paid
                paid.add((path.temperature, prefix))
        remaining.append(Counted(path=path, own=own, advantages=advantages[index]))
    return remaining if loss.top_entropy_share is None else _of_most_entropy(remaining, loss)


def _of_most_entropy(remaining: list[Counted], loss: OracleLoss) -> list[Counted]:
    """Advantages of zero below the entropy that the asked share of all counted tokens reaches."""
    share = Fraction(str(loss.top_entropy_share))
    ranked = sorted(
        (float(entropy) for one in remaining for entropy in _present(one.path.entropy)[one.own]),
        reverse=True,
    )
    if not ranked:
        return remaining
    least = ranked[math.ceil(share * len(ranked)) - 1]
    return [
        replace(one, advantages=np.where(_present(one.path.entropy) >= least, one.advantages, 0.0))
        for one in remaining
    ]


def has_gradient(counted: Counted, loss: OracleLoss) -> bool:
    """Whether some term of the path is more than zero times something."""
    terms = loss.kl, loss.divergence, loss.value_coefficient
    if terms != (None, None, None) or loss.entropy_coefficient != 0:
        return True
    factors = counted.advantages
    if loss.kind == "cross_entropy":
        weights = counted.path.weights
        factors = np.ones(len(counted.own)) if weights is None else weights
    return bool((factors[counted.own] != 0).any())


def count(remaining: list[Counted]) -> Counters:
    """Counters over the paths that pay for at least one token."""
    payers = [counted for counted in remaining if counted.own.any()]
    return Counters(
        tokens=sum(int(counted.own.sum()) for counted in payers),
        sequences=len(payers),
        groups=frozenset((c.path.group_id, c.path.prompt.tobytes()) for c in payers),
    )
