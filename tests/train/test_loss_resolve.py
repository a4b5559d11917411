"""What of a loss is refused, by field, and what is taken beside it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ratoon.errors import ErrorCode, RatoonError
from ratoon.rollout.raw import SamplerLogprobsKind
from ratoon_proto.types import (
    AdvantageKind,
    CorrectionLevel,
    CorrectionMask,
    CorrectionMode,
    KlConfig,
    KlKind,
    LossKind,
    OldLogprobs,
    OldLogprobsKind,
    OverlongPenalty,
    ReferenceKind,
    StalenessAction,
    StalenessConfig,
)
from tests.train.loss_cases import GIVEN_OLD, MASK, resolve, small_batch

_TRUNCATE = replace(MASK, mode=CorrectionMode.TRUNCATE, low=0.0)
_GEOMETRIC = CorrectionMask(level=CorrectionLevel.GEOMETRIC, low=0.9, high=1.1)
_FORWARD_OLD = OldLogprobs(kind=OldLogprobsKind.FROM_FORWARD, forward_operation_id="p.op")
_GIVEN_KL = KlConfig(kind=KlKind.K1, coefficient=0.1, reference=ReferenceKind.GIVEN)
_FROZEN_KL = replace(_GIVEN_KL, reference=ReferenceKind.FROZEN)
_NO_SAMPLER = {"sampler_logprobs": None}
_NO_REWARD = {"reward": None}
_ADVANTAGES = {"reward": None, "advantages": np.ones(2, np.float32)}
_RAW = {"sampler_logprobs_kind": SamplerLogprobsKind.RAW, "temperature": 0.7}
_PENALTY = OverlongPenalty(max_tokens=10, buffer_tokens=4, scale=1.0)


@pytest.mark.parametrize(
    ("kind", "batch", "request_", "field"),
    [
        (LossKind.REINFORCE, {}, {"clip_low": 0.2}, "loss.clip_low"),
        (LossKind.IMPORTANCE_SAMPLING, {}, {"clip_high": 0.2}, "loss.clip_high"),
        (LossKind.CROSS_ENTROPY, {}, {"dual_clip": 3.0}, "loss.dual_clip"),
        (LossKind.GSPO, {}, {"dual_clip": 3.0}, "loss.dual_clip"),
        (LossKind.CISPO, {}, {"dual_clip": 3.0}, "loss.dual_clip"),
        (LossKind.GRPO, {}, {"dual_clip": 1.0}, "loss.dual_clip"),
        (LossKind.GRPO, {}, {"dual_clip": math.inf}, "loss.dual_clip"),
        (LossKind.GRPO, {}, {"clip_low": -0.1}, "loss.clip_low"),
        (LossKind.GRPO, {}, {"clip_high": math.nan}, "loss.clip_high"),
        # A clip holds 1, or it would hold what is on policy.
        (LossKind.CISPO, {}, {"clip_low": 5.0}, "loss.clip_low"),
        (LossKind.CISPO, {}, {"clip_low": 1.1}, "loss.clip_low"),
        (LossKind.CISPO, {}, {"clip_high": 0.9}, "loss.clip_high"),
        (LossKind.CISPO, {}, {"clip_high": 1.0}, "loss.clip_high"),
        (LossKind.GRPO, {}, {"clip_low": 1.1}, "loss.clip_low"),
        (LossKind.GRPO, {}, {"dual_clip": 1.2}, "loss.dual_clip"),
        (LossKind.DAPO, {}, {"dual_clip": 1.25}, "loss.dual_clip"),
        (LossKind.GRPO, {}, {"entropy_coefficient": math.inf}, "loss.entropy_coefficient"),
        (
            LossKind.GRPO,
            {},
            {"kl": replace(_GIVEN_KL, coefficient=math.nan)},
            "loss.kl.coefficient",
        ),
        (LossKind.GRPO, {"reference_logprobs": None}, {"kl": _GIVEN_KL}, "loss.kl.reference"),
        (LossKind.GRPO, {}, {"kl": _FROZEN_KL}, "loss.kl.reference"),
        (LossKind.GRPO, _NO_SAMPLER, {}, "loss.old_logprobs"),
        (LossKind.GRPO, {"old_logprobs": None}, {"old_logprobs": GIVEN_OLD}, "loss.old_logprobs"),
        (LossKind.REINFORCE, {}, {"old_logprobs": GIVEN_OLD}, "loss.old_logprobs"),
        (
            LossKind.GRPO,
            {},
            {"old_logprobs": OldLogprobs(kind=OldLogprobsKind.FROM_FORWARD)},
            "loss.old_logprobs.forward_operation_id",
        ),
        (
            LossKind.GRPO,
            {},
            {"old_logprobs": replace(GIVEN_OLD, forward_operation_id="op")},
            "loss.old_logprobs.forward_operation_id",
        ),
        (LossKind.GRPO, _RAW, {}, "groups[0].rollouts[0].sampler_logprobs_kind"),
        (
            LossKind.GRPO,
            _RAW,
            {"old_logprobs": GIVEN_OLD, "correction": MASK},
            "groups[0].rollouts[0].sampler_logprobs_kind",
        ),
        (LossKind.GRPO, {}, {"correction": MASK}, "loss.correction"),
        (LossKind.CROSS_ENTROPY, {}, {"correction": MASK}, "loss.correction"),
        (
            LossKind.GRPO,
            _NO_SAMPLER,
            {"old_logprobs": GIVEN_OLD, "correction": MASK},
            "loss.correction",
        ),
        (
            LossKind.GRPO,
            {},
            {"old_logprobs": GIVEN_OLD, "correction": replace(MASK, high=0.9)},
            "loss.correction.high",
        ),
        (
            LossKind.GRPO,
            {},
            {"old_logprobs": GIVEN_OLD, "correction": replace(MASK, low=1.1)},
            "loss.correction.low",
        ),
        (
            LossKind.GRPO,
            {},
            {"old_logprobs": GIVEN_OLD, "correction": replace(_TRUNCATE, high=0.5)},
            "loss.correction.high",
        ),
        (LossKind.GRPO, {}, {"top_entropy_share": 0.2}, "loss.top_entropy_share"),
        (
            LossKind.GRPO,
            {},
            {"old_logprobs": _FORWARD_OLD, "top_entropy_share": 0.0},
            "loss.top_entropy_share",
        ),
        (LossKind.CROSS_ENTROPY, {}, {"top_entropy_share": 0.2}, "loss.top_entropy_share"),
        (LossKind.GRPO, {}, {"tau_positive": 1.0}, "loss.tau_positive"),
        (LossKind.SAPO, {}, {"tau_negative": 0.0}, "loss.tau_negative"),
        (LossKind.SAPO, {}, {"clip_low": 0.2}, "loss.clip_low"),
        (LossKind.IPO, {}, {"clip_high": 1.5}, "loss.clip_high"),
        (LossKind.IPO, {}, {"dual_clip": 3.0}, "loss.dual_clip"),
        (LossKind.GRPO, {}, {"correction_mask": _GEOMETRIC}, "loss.correction_mask"),
        (LossKind.CROSS_ENTROPY, {}, {"correction_mask": _GEOMETRIC}, "loss.correction_mask"),
        (
            LossKind.GRPO,
            _NO_SAMPLER,
            {"old_logprobs": GIVEN_OLD, "correction_mask": _GEOMETRIC},
            "loss.correction_mask",
        ),
        (
            LossKind.GRPO,
            {},
            {"old_logprobs": GIVEN_OLD, "correction_mask": replace(_GEOMETRIC, low=1.2)},
            "loss.correction_mask.low",
        ),
        (
            LossKind.REINFORCE,
            {},
            {"correction_mask": replace(_GEOMETRIC, high=math.inf)},
            "loss.correction_mask.high",
        ),
        (LossKind.GRPO, {"top_p": 0.9}, {}, "groups[0].rollouts[0].top_p"),
        (LossKind.GRPO, {"top_k": 40}, {}, "groups[0].rollouts[0].top_k"),
        (
            LossKind.GRPO,
            {"top_p": 0.9},
            {"old_logprobs": GIVEN_OLD, "correction": MASK},
            "groups[0].rollouts[0].top_p",
        ),
        (
            LossKind.REINFORCE,
            {"top_k": 1},
            {"correction": _TRUNCATE},
            "groups[0].rollouts[0].top_k",
        ),
        (
            LossKind.GRPO,
            {},
            {
                "old_logprobs": GIVEN_OLD,
                "correction": replace(MASK, mode=CorrectionMode.TRUNCATE),
            },
            "loss.correction.low",
        ),
        (LossKind.GRPO, _NO_REWARD, {}, "groups[0].rollouts[0].reward"),
        (
            LossKind.GRPO,
            _ADVANTAGES,
            {"advantage": AdvantageKind.GROUP_MEAN},
            "loss.advantage",
        ),
        (LossKind.GRPO, {}, {"advantage": AdvantageKind.GIVEN}, "loss.advantage"),
        (LossKind.CROSS_ENTROPY, {}, {"advantage": AdvantageKind.NONE}, "loss.advantage"),
        (LossKind.CROSS_ENTROPY, _ADVANTAGES, {}, "groups[0].rollouts[0].advantages"),
        (
            LossKind.GRPO,
            {"token_weights": np.ones(2, np.float32)},
            {},
            "groups[0].rollouts[0].token_weights",
        ),
        (LossKind.DAPO, _ADVANTAGES, {"overlong": _PENALTY}, "loss.overlong_penalty"),
        (LossKind.CROSS_ENTROPY, {}, {"overlong": _PENALTY}, "loss.overlong_penalty"),
        (
            LossKind.DAPO,
            {},
            {"overlong": replace(_PENALTY, buffer_tokens=0)},
            "loss.overlong_penalty.buffer_tokens",
        ),
        (
            LossKind.DAPO,
            {},
            {"overlong": replace(_PENALTY, max_tokens=3)},
            "loss.overlong_penalty.max_tokens",
        ),
        (
            LossKind.DAPO,
            {},
            {"overlong": replace(_PENALTY, scale=-1.0)},
            "loss.overlong_penalty.scale",
        ),
        (
            LossKind.DAPO,
            _ADVANTAGES,
            {"drop_zero_variance_groups": True},
            "loss.drop_zero_variance_groups",
        ),
        (
            LossKind.GRPO,
            {},
            {"staleness": StalenessConfig(max_versions=-1, action=StalenessAction.DROP)},
            "loss.staleness.max_versions",
        ),
        (
            LossKind.GRPO,
            {"policy_version": None},
            {"staleness": StalenessConfig(max_versions=1, action=StalenessAction.DROP)},
            "groups[0].rollouts[0].policy_version",
        ),
    ],
)
def test_what_would_not_be_used_is_refused_by_field(
    kind: LossKind, batch: dict[str, Any], request_: dict[str, Any], field: str
) -> None:
    with pytest.raises(RatoonError) as caught:
        resolve(kind, small_batch(**batch), **request_)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert caught.value.field == field
    assert field in caught.value.message


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 40}])
def test_truncated_sampling_is_taken_where_acknowledged_or_in_no_ratio(cut: dict[str, Any]) -> None:
    """The sampler's log-probs are of a distribution cut and renormalised, the trainer's are not: a
    ratio of the two is off by the mass that was cut, in every token."""
    batch = small_batch(**cut)
    with pytest.raises(RatoonError, match=r"loss\.allow_truncated_sampling"):
        resolve(LossKind.GRPO, batch)
    loss = resolve(LossKind.GRPO, batch, allow_truncated_sampling=True)
    assert loss.old_logprobs == OldLogprobs(kind=OldLogprobsKind.SAMPLER)
    assert resolve(LossKind.GRPO, batch, old_logprobs=GIVEN_OLD).old_logprobs == GIVEN_OLD
    assert resolve(LossKind.REINFORCE, batch).old_logprobs is None


@pytest.mark.parametrize("coefficient", [-0.1, math.nan, math.inf])
def test_router_loss_coefficient_is_finite_and_not_negative(coefficient: float) -> None:
    with pytest.raises(RatoonError) as caught:
        resolve(LossKind.GRPO, small_batch(), router_aux_loss_coefficient=coefficient)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert caught.value.field == "loss.router_aux_loss_coefficient"


def test_frozen_reference_and_raw_sampler_are_taken_where_they_hold() -> None:
    assert resolve(LossKind.GRPO, small_batch(), has_frozen=True, kl=_FROZEN_KL).kl == _FROZEN_KL
    loss = resolve(LossKind.GRPO, small_batch(**_RAW), old_logprobs=GIVEN_OLD)
    assert loss.old_logprobs == GIVEN_OLD
