"""Losses for tests: given advantages and old log-probs, clips that both sides of a ratio meet."""

from __future__ import annotations

import math
from typing import Any

from ratoon.train.config import (
    AdvantageKind,
    DivideBy,
    LossKind,
    OldLogprobs,
    OldLogprobsKind,
    SharedTokens,
    TokenWeight,
)
from ratoon.train.loss.compute import LossOutput
from ratoon.train.loss.spec import (
    LOSS_DEFAULTS,
    CispoObjective,
    ClipObjective,
    IpoObjective,
    LinearObjective,
    Loss,
    Objective,
    SapoObjective,
    SequenceClipObjective,
)
from ratoon.train.loss.sums import LossSums


def make_objective(kind: LossKind, *, dual_clip: float = math.inf) -> Objective:
    clip = LOSS_DEFAULTS[kind].clip
    if kind is LossKind.SAPO:
        return SapoObjective(tau_positive=1.0, tau_negative=1.05)
    if clip is None:
        return LinearObjective()
    if kind is LossKind.GSPO:
        return SequenceClipObjective(clip_low=clip[0], clip_high=clip[1])
    if kind is LossKind.CISPO:
        # Tighter than the default, so that both bounds are met.
        return CispoObjective(ratio_low=0.8, ratio_high=1.2)
    if kind is LossKind.IPO:
        # Tighter than the default, so that both bounds are met.
        return IpoObjective(most_down=0.02, most_up=0.02)
    return ClipObjective(clip_low=clip[0], clip_high=clip[1], dual_clip=dual_clip)


def make_loss(kind: LossKind, **changes: Any) -> Loss:
    fields: dict[str, Any] = {
        "kind": kind,
        "objective": make_objective(kind),
        "advantage": AdvantageKind.GIVEN,
        "old_logprobs": OldLogprobs(kind=OldLogprobsKind.GIVEN),
        "kl": None,
        "entropy_coefficient": 0.0,
        "correction": None,
        "correction_mask": None,
        "token_weight": TokenWeight.PER_TOKEN,
        "default_divide_by": DivideBy.TOKENS,
        "shared_tokens": SharedTokens.SUM,
        "top_entropy_share": None,
        "overlong": None,
        "drop_zero_variance_groups": False,
        "staleness": None,
    }
    return Loss(**(fields | changes))


def summed(output: LossOutput) -> LossSums:
    return LossSums.total([output.sums_F])
