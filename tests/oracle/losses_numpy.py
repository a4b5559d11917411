"""The value of every loss a second time, one Python float at a time, to check the oracle itself.

Nothing is shared with `losses` but the types: a slip would have to be made twice.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tests.oracle.advantages import Counted
from tests.oracle.paths import OracleLoss

Values = NDArray[np.float64]


def _surrogate(ratio: float, advantage: float, loss: OracleLoss) -> float:
    clipped = max(1 - loss.clip_low, min(ratio, 1 + loss.clip_high))
    gain = min(ratio * advantage, clipped * advantage)
    if advantage < 0 and loss.dual_clip is not None:
        gain = max(gain, loss.dual_clip * advantage)
    return gain


def _weight(loss: OracleLoss, gaps: dict[int, float], token: int) -> float:
    """What the policy-gradient term of the token is multiplied with."""
    total = {
        "sequence": math.exp(sum(gaps.values())),
        "geometric": math.prod(math.exp(gap / len(gaps)) for gap in gaps.values()),
        "token": math.exp(gaps[token]),
    }
    weight = 1.0
    rule, mask = loss.correction, loss.correction_mask
    if rule is not None:
        weight = min(total[rule.level], rule.high)
        if rule.mode == "mask" and not rule.low <= total[rule.level] <= rule.high:
            weight = 0.0
    if mask is not None and not mask.low <= total[mask.level] <= mask.high:
        weight = 0.0
    return weight


def _term(
    counted: Counted,
    loss: OracleLoss,
    token: int,
    logp: float,
    ratio: float,
    old: float,
    weight: float,
) -> float:
    advantage = float(counted.advantages[token])
    if loss.kind in ("distillation", "value"):
        return 0.0
    if loss.kind == "cross_entropy":
        weights = counted.path.weights
        return -logp * (1.0 if weights is None else float(weights[token]))
    if loss.kind == "reinforce":
        return -weight * advantage * logp
    if loss.kind == "cispo":
        return -weight * min(max(ratio, loss.clip_low), loss.clip_high) * advantage * logp
    if loss.kind == "sapo":
        tau = loss.tau_positive if advantage > 0 else loss.tau_negative
        gate = 1.0 / (1.0 + math.exp(min(-tau * (ratio - 1.0), 700.0)))
        return -weight * 4.0 / tau * gate * advantage
    if loss.kind == "ipo":
        moved = math.exp(logp) - math.exp(old)
        is_kept = -loss.clip_low <= moved <= loss.clip_high
        return -weight * ratio * advantage * is_kept
    if loss.kind in ("importance_sampling", "gmpo"):
        return -weight * ratio * advantage
    return -weight * _surrogate(ratio, advantage, loss)


def _ratios(counted: Counted, loss: OracleLoss, logp: Values) -> tuple[dict[int, float], Values]:
    """Ratio of each trained token, and the old log-probs, float64 [R]."""
    path = counted.path
    old = {"sampler": path.sampler, "given": path.old, "on_policy": logp, "none": logp}[loss.old]
    assert old is not None
    logs = {int(token): float(logp[token] - old[token]) for token in path.trained}
    if loss.kind == "gmpo":
        for token, log in logs.items():
            is_bad = counted.advantages[token] < 0
            logs[token] = max(log, -loss.clip_low) if is_bad else min(log, loss.clip_high)
    if loss.kind in ("gspo", "gmpo"):
        mean = sum(logs.values()) / len(logs)
        logs = dict.fromkeys(logs, mean)
    return {token: math.exp(_within_20(value)) for token, value in logs.items()}, old


def _within_20(value: float) -> float:
    return max(-20.0, min(20.0, value))


def path_value(counted: Counted, loss: OracleLoss, logp: Values, entropy: Values) -> float:
    """The path's total, as `losses.path_loss` gives it, of log-probs and entropies float64 [R]."""
    path = counted.path
    ratios, old = _ratios(counted, loss, logp)
    gaps = dict.fromkeys(ratios, 0.0)
    if loss.correction is not None or loss.correction_mask is not None:
        assert path.sampler is not None
        gaps = {token: float(old[token] - path.sampler[token]) for token in ratios}
    total = 0.0
    for token in np.flatnonzero(counted.own).tolist():
        weight = _weight(loss, gaps, token)
        value = _term(
            counted, loss, token, float(logp[token]), ratios[token], float(old[token]), weight
        )
        if loss.kl is not None:
            assert path.reference is not None
            d = _within_20(float(logp[token] - path.reference[token]))
            k3 = min(math.exp(-d) - 1 + d, 10.0)
            estimate = {"k1": d, "k2": d * d / 2, "k3": k3}[loss.kl.removesuffix("_plus")]
            if loss.kl_weighted:
                estimate *= math.exp(_within_20(float(logp[token] - old[token])))
            value += loss.kl_coefficient * estimate
        total += value - loss.entropy_coefficient * float(entropy[token])
    return total / int(counted.own.sum()) if loss.token_weight == "per_sequence" else total
