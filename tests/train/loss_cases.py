"""Losses for tests: given advantages and old log-probs, clips that both sides of a ratio meet.

And a batch that any loss can be resolved for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.validate import validate_groups
from ratoon.train.loss.compute import LossOutput, TermColumns, compute_loss
from ratoon.train.loss.kinds import (
    LOSSES,
    CispoObjective,
    ClipObjective,
    GeometricClipObjective,
    IpoObjective,
    LogprobObjective,
    NoObjective,
    Objective,
    RatioObjective,
    SapoObjective,
    SequenceClipObjective,
)
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.loss.spec import Loss
from ratoon.train.loss.sums import LossSums
from ratoon_proto.types import (
    AdvantageKind,
    CorrectionLevel,
    CorrectionMode,
    DivideBy,
    LossConfig,
    LossKind,
    OldLogprobs,
    OldLogprobsKind,
    RolloutCorrection,
    SharedTokens,
    TokenWeight,
)
from tests import builders

MASK = RolloutCorrection(mode=CorrectionMode.MASK, level=CorrectionLevel.TOKEN, low=0.5, high=2.0)
GIVEN_OLD = OldLogprobs(kind=OldLogprobsKind.GIVEN)


def make_objective(kind: LossKind, *, dual_clip: float = math.inf) -> Objective:
    clip = LOSSES[kind].clip
    if kind is LossKind.SAPO:
        return SapoObjective(tau_positive=1.0, tau_negative=1.05)
    if kind in (LossKind.DISTILLATION, LossKind.VALUE):
        return NoObjective()
    if clip is None:
        return RatioObjective() if LOSSES[kind].has_ratio else LogprobObjective()
    if kind is LossKind.GSPO:
        return SequenceClipObjective(clip_low=clip[0], clip_high=clip[1])
    if kind is LossKind.GMPO:
        return GeometricClipObjective(most_down=clip[0], most_up=clip[1])
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
        "router_aux_loss_coefficient": 0.0,
        "report_groups": False,
    }
    return Loss(**(fields | changes))


def make_columns(logprobs: Sequence[float] | Tensor, **given: Any) -> TermColumns:
    """Columns of one path in float64, all of whose terms count with weight 1; `given`: others."""
    logprob_L = torch.as_tensor(logprobs, dtype=torch.float64)
    fields: dict[str, Any] = {
        "sequence_L": torch.zeros(len(logprob_L), dtype=torch.int64),
        "num_sequences": 1,
        "counted_C": torch.arange(len(logprob_L)),
        "weight_L": torch.ones_like(logprob_L),
        "advantage_L": torch.ones_like(logprob_L),
        "old_L": None,
        "sampler_L": None,
        "sampler_usable_L": torch.full(logprob_L.shape, "sampler_L" in given),
        "reference_L": None,
    }
    given = {
        name: torch.tensor(value, dtype=torch.float64) if _are_floats(value) else value
        for name, value in given.items()
    }
    return TermColumns(**(fields | given))


def _are_floats(value: object) -> bool:
    return isinstance(value, list) and isinstance(value[0], float)


def run_loss(loss: Loss, logprobs: Sequence[float] | Tensor, **given: Any) -> LossOutput:
    """The loss of `make_columns` at these log-probs, with entropies of 0."""
    logprob_L = torch.as_tensor(logprobs, dtype=torch.float64)
    columns = make_columns(logprob_L, **given)
    return compute_loss(loss, columns, logprob_L, torch.zeros_like(logprob_L))


def summed(output: LossOutput) -> LossSums:
    return LossSums.total([output.sums()])


def small_batch(**changes: Any) -> RolloutBatch:
    """One group of two rollouts of two tokens with everything that a loss may ask for."""
    fields: dict[str, Any] = {
        "sampler_logprobs": np.array([-1.0, -2.0], np.float32),
        "old_logprobs": np.array([-1.5, -2.5], np.float32),
        "reference_logprobs": np.array([-1.0, -1.0], np.float32),
        "reward": 1.0,
        "policy_version": 3,
    }
    rollout = builders.rollout([1, 2], **(fields | changes))
    return validate_groups([builders.group([5], [rollout, rollout])], builders.limits())


def resolve(
    kind: LossKind, batch: RolloutBatch, *, has_frozen: bool = False, **changes: Any
) -> Loss:
    return resolve_loss(LossConfig(kind=kind, **changes), batch, has_frozen_reference=has_frozen)
