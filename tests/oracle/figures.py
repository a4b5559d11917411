"""What practitioners watch, from the definition of each figure, one rollout and token at a time.

Enters every path as sent with its log-probs by the policy; nothing is a sum here but in the last
line of each figure. Invariant: no sum is merged, no histogram is made; a quantile is sorted for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.oracle.advantages import Counted, are_equal, has_gradient, select
from tests.oracle.losses import path_loss
from tests.oracle.paths import OracleLoss, Path

Values = NDArray[np.float64]


@dataclass(slots=True)
class _Tokens:
    """One entry for each counted token."""

    ratio: list[float] = field(default_factory=list[float])
    old_gap: list[float] = field(default_factory=list[float])
    is_dual: list[bool] = field(default_factory=list[bool])
    # old / sampler at every level, by its name.
    weights: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    sampler_gap: list[float] = field(default_factory=list[float])
    advantage: list[float] = field(default_factory=list[float])


def figures(
    paths: list[Path], logprobs: list[Values], loss: OracleLoss, version: int = 0
) -> dict[str, float | None]:
    """By the names of the report; `logprobs`: float64 [R] of each path by the policy."""
    by_path = {id(path): logprob for path, logprob in zip(paths, logprobs, strict=True)}
    tokens = _Tokens()
    for counted in select(paths, loss, version):
        tokens.advantage += counted.advantages[counted.own].tolist()
        # The model is not asked about the others.
        if counted.own.any() and has_gradient(counted, loss):
            _look_at(tokens, counted, loss, by_path[id(counted.path)])
    return {
        **_of_ratio(tokens, loss),
        **_of_correction(tokens, loss),
        **_of_batch(paths),
        "sampler_gap_mean": _mean(tokens.sampler_gap),
        "sampler_gap_abs_mean": _mean([abs(gap) for gap in tokens.sampler_gap]),
        "sampler_gap_max": max((abs(gap) for gap in tokens.sampler_gap), default=None),
        "sampler_kl": _mean([math.exp(gap) - gap - 1 for gap in tokens.sampler_gap]),
        "advantage_mean": None if loss.kind == "cross_entropy" else _mean(tokens.advantage),
        "advantage_std": None if loss.kind == "cross_entropy" else _std(tokens.advantage),
    }


def rollout_figures(
    paths: list[Path], logprobs: list[Values], loss: OracleLoss
) -> list[dict[str, Any]]:
    """Figures of every path, by the names of `RolloutFigures`; NaN and -1 where there is none."""
    found = [_Tokens() for _ in paths]
    place = {id(path): index for index, path in enumerate(paths)}
    weight, own = [0.0] * len(paths), [np.empty(0, np.int64)] * len(paths)
    for counted in select(paths, loss):
        index = place[id(counted.path)]
        found[index].advantage += counted.advantages[counted.own].tolist()
        if not (counted.own.any() and has_gradient(counted, loss)):
            continue
        own[index] = np.flatnonzero(counted.own)
        _look_at(found[index], counted, loss, logprobs[index])
        logp = torch.tensor(logprobs[index], requires_grad=True)
        total = path_loss(counted, loss, logp, torch.zeros_like(logp)).total
        if total.requires_grad:
            total.backward()
        weight[index] = 0.0 if logp.grad is None else float(logp.grad.abs().sum())
    figures: list[dict[str, Any]] = []
    for index, (path, tokens) in enumerate(zip(paths, found, strict=True)):
        gaps = [abs(gap) for gap in tokens.sampler_gap]
        ratios = [] if loss.kind == "reinforce" else tokens.ratio
        figures.append(
            {
                "reward": math.nan if path.reward is None else path.reward,
                "advantage": _or_nan(_mean(tokens.advantage)),
                "length": len(path.response),
                "gap_abs_mean": _or_nan(_mean(gaps)),
                "gap_max": max(gaps, default=math.nan),
                "gap_max_token": own[index][np.argmax(gaps)] if gaps else -1,
                "ratio_max": max(ratios, default=math.nan),
                "weight_share": weight[index] / (sum(weight) or math.nan),
                # Equal ratios differ in their last bits here and there.
                "is_at_ratio_max": [abs(r - max(ratios)) < 1e-12 for r in ratios],
                "own": own[index],
            }
        )
    return figures


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def quantile(ratios: list[float], share: float) -> float:
    """The smallest ratio that at least `share` of all are not above."""
    return sorted(ratios)[max(1, math.ceil(share * len(ratios))) - 1]


def _look_at(tokens: _Tokens, counted: Counted, loss: OracleLoss, logprob: Values) -> None:
    path = counted.path
    old = {"sampler": path.sampler, "given": path.old, "on_policy": logprob, "none": None}[loss.old]
    trained = path.trained.tolist()
    whole_gap, mismatch = 0.0, np.zeros(len(path.response))
    if old is not None:
        gaps = [
            _held(float(logprob[t] - old[t]), float(counted.advantages[t]), loss) for t in trained
        ]
        whole_gap = sum(gaps) / len(gaps)
        if path.sampler is not None:
            mismatch = old - path.sampler
    for t in np.flatnonzero(counted.own).tolist():
        advantage = float(counted.advantages[t])
        if path.sampler is not None:
            tokens.sampler_gap.append(float(logprob[t] - path.sampler[t]))
        if old is None:
            continue
        gap = float(logprob[t] - old[t])
        ratio = math.exp(whole_gap if loss.kind in ("gspo", "gmpo") else gap)
        tokens.old_gap.append(gap)
        tokens.ratio.append(ratio)
        dual = math.inf if loss.dual_clip is None else loss.dual_clip
        tokens.is_dual.append(advantage < 0 and ratio > dual)
        whole = sum(mismatch[i] for i in trained)
        logs = {"token": mismatch[t], "sequence": whole, "geometric": whole / len(trained)}
        tokens.weights.append({level: math.exp(value) for level, value in logs.items()})


def _held(gap: float, advantage: float, loss: OracleLoss) -> float:
    """A log-ratio as the sequence's mean has it."""
    if loss.kind != "gmpo":
        return gap
    return max(gap, -loss.clip_low) if advantage < 0 else min(gap, loss.clip_high)


def _of_ratio(tokens: _Tokens, loss: OracleLoss) -> dict[str, float | None]:
    # reinforce may have old log-probs, for its correction, but has no ratio.
    ratios = [] if loss.kind == "reinforce" else tokens.ratio
    return {
        "old_kl": _mean([math.exp(gap) - gap - 1 for gap in tokens.old_gap]),
        "ratio_mean": _mean(ratios),
        "ratio_min": min(ratios, default=None),
        "ratio_max": max(ratios, default=None),
        "ratio_p01": quantile(ratios, 0.01) if ratios else None,
        "ratio_p50": quantile(ratios, 0.5) if ratios else None,
        "ratio_p99": quantile(ratios, 0.99) if ratios else None,
        "clip_fraction_dual": _mean([float(is_dual) for is_dual in tokens.is_dual]) or 0.0,
    }


def _of_correction(tokens: _Tokens, loss: OracleLoss) -> dict[str, float | None]:
    names = ("masked_fraction", "truncated_fraction", "weight_mean", "ess_fraction")
    if loss.correction is None and loss.correction_mask is None:
        return {f"correction_{name}": None for name in names}
    masked, truncated, applied = 0, 0, list[float]()
    for weights in tokens.weights:
        weight, is_truncated = 1.0, False
        masks = [] if loss.correction_mask is None else [loss.correction_mask]
        if loss.correction is not None:
            weight = weights[loss.correction.level]
            if loss.correction.mode == "mask":
                masks.append(loss.correction)
            elif weight > loss.correction.high:
                weight, is_truncated = loss.correction.high, True
        is_masked = any(not rule.low <= weights[rule.level] <= rule.high for rule in masks)
        masked += is_masked
        truncated += is_truncated and not is_masked
        applied.append(0.0 if is_masked else weight)
    squares = math.fsum(w * w for w in applied)
    return {
        "correction_masked_fraction": masked / len(applied),
        "correction_truncated_fraction": truncated / len(applied),
        "correction_weight_mean": _mean(applied),
        "correction_ess_fraction": (
            math.fsum(applied) ** 2 / (len(applied) * squares) if squares else 0.0
        ),
    }


def _of_batch(paths: list[Path]) -> dict[str, float | None]:
    """Figures of all rollouts as sent, including dropped ones."""
    rewards = [path.reward for path in paths if path.reward is not None]
    groups: dict[str, list[float]] = {}
    for path in paths:
        if path.reward is not None:
            groups.setdefault(path.group_id, []).append(path.reward)
    flat = [len(each) > 1 and are_equal(each) for each in groups.values()]
    lengths = [len(path.response) for path in paths]
    return {
        "reward_mean": _mean(rewards),
        "reward_std": _std(rewards),
        "reward_min": min(rewards, default=None),
        "reward_max": max(rewards, default=None),
        "zero_variance_fraction": _mean([float(is_flat) for is_flat in flat]),
        "truncated_fraction": _mean([float(path.truncated) for path in paths]),
        "response_length_mean": _mean([float(length) for length in lengths]),
        "response_length_max": max(lengths),
        **{f"response_length_p{share}": _quantile(lengths, share) for share in (50, 90, 99)},
    }


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _quantile(lengths: list[int], percent: int) -> int:
    """The least length that at least `percent` of a hundred rollouts do not exceed."""
    return next(
        length
        for length in sorted(lengths)
        if 100 * sum(other <= length for other in lengths) >= percent * len(lengths)
    )


def _std(values: list[float]) -> float | None:
    return float(np.std(values)) if values else None
