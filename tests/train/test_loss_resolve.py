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

GRPO, DAPO, GSPO, CISPO = LossKind.GRPO, LossKind.DAPO, LossKind.GSPO, LossKind.CISPO
SAPO, IPO, REINFORCE = LossKind.SAPO, LossKind.IPO, LossKind.REINFORCE
CROSS_ENTROPY, IMPORTANCE_SAMPLING = LossKind.CROSS_ENTROPY, LossKind.IMPORTANCE_SAMPLING
_TRUNCATE = replace(MASK, mode=CorrectionMode.TRUNCATE, low=0.0)
_GEOMETRIC = CorrectionMask(level=CorrectionLevel.GEOMETRIC, low=0.9, high=1.1)
_FORWARD_OLD = OldLogprobs(kind=OldLogprobsKind.FROM_FORWARD, forward_operation_id="p.op")
_GIVEN_KL = KlConfig(kind=KlKind.K1, coefficient=0.1, reference=ReferenceKind.GIVEN)
_FROZEN_KL = replace(_GIVEN_KL, reference=ReferenceKind.FROZEN)
_OLD = {"old_logprobs": GIVEN_OLD}
_NO_SAMPLER = {"sampler_logprobs": None}
_NO_REWARD = {"reward": None}
_ADVANTAGES = {"reward": None, "advantages": np.ones(2, np.float32)}
_RAW = {"sampler_logprobs_kind": SamplerLogprobsKind.RAW, "temperature": 0.7}
_PENALTY = OverlongPenalty(max_tokens=10, buffer_tokens=4, scale=1.0)


@pytest.mark.parametrize(
    ("kind", "batch", "request_", "field"),
    [
        # Its clip is narrower than a sampler's numerics: nobody's log-probs are taken unasked.
        (GSPO, {}, {}, "old_logprobs"),
        (REINFORCE, {}, {"clip_low": 0.2}, "clip_low"),
        (IMPORTANCE_SAMPLING, {}, {"clip_high": 0.2}, "clip_high"),
        (CROSS_ENTROPY, {}, {"dual_clip": 3.0}, "dual_clip"),
        (GSPO, {}, {"dual_clip": 3.0}, "dual_clip"),
        (CISPO, {}, {"dual_clip": 3.0}, "dual_clip"),
        (GRPO, {}, {"dual_clip": 1.0}, "dual_clip"),
        (GRPO, {}, {"dual_clip": math.inf}, "dual_clip"),
        (GRPO, {}, {"clip_low": -0.1}, "clip_low"),
        (GRPO, {}, {"clip_high": math.nan}, "clip_high"),
        (CISPO, {}, {"clip_low": 5.0}, "clip_low"),
        (CISPO, {}, {"clip_low": 1.1}, "clip_low"),
        (CISPO, {}, {"clip_high": 0.9}, "clip_high"),
        (CISPO, {}, {"clip_high": 1.0}, "clip_high"),
        (GRPO, {}, {"clip_low": 1.1}, "clip_low"),
        (GRPO, {}, {"dual_clip": 1.2}, "dual_clip"),
        (DAPO, {}, {"dual_clip": 1.25}, "dual_clip"),
        (GRPO, {}, {"entropy_coefficient": math.inf}, "entropy_coefficient"),
        (GRPO, {}, {"kl": replace(_GIVEN_KL, coefficient=math.nan)}, "kl.coefficient"),
        (GRPO, {"reference_logprobs": None}, {"kl": _GIVEN_KL}, "kl.reference"),
        (GRPO, {}, {"kl": _FROZEN_KL}, "kl.reference"),
        (GRPO, _NO_SAMPLER, {}, "old_logprobs"),
        (GRPO, {"old_logprobs": None}, {"old_logprobs": GIVEN_OLD}, "old_logprobs"),
        (REINFORCE, {}, {"old_logprobs": GIVEN_OLD}, "old_logprobs"),
        (
            GRPO,
            {},
            {"old_logprobs": OldLogprobs(kind=OldLogprobsKind.FROM_FORWARD)},
            "old_logprobs.forward_operation_id",
        ),
        (
            GRPO,
            {},
            {"old_logprobs": replace(GIVEN_OLD, forward_operation_id="op")},
            "old_logprobs.forward_operation_id",
        ),
        (GRPO, _RAW, {}, "@.sampler_logprobs_kind"),
        (GRPO, _RAW, _OLD | {"correction": MASK}, "@.sampler_logprobs_kind"),
        (GRPO, {}, {"correction": MASK}, "correction"),
        (CROSS_ENTROPY, {}, {"correction": MASK}, "correction"),
        (GRPO, _NO_SAMPLER, _OLD | {"correction": MASK}, "correction"),
        (GRPO, {}, _OLD | {"correction": replace(MASK, high=0.9)}, "correction.high"),
        (GRPO, {}, _OLD | {"correction": replace(MASK, low=1.1)}, "correction.low"),
        (GRPO, {}, _OLD | {"correction": replace(_TRUNCATE, high=0.5)}, "correction.high"),
        (GRPO, {}, {"top_entropy_share": 0.2}, "top_entropy_share"),
        (GRPO, {}, {"old_logprobs": _FORWARD_OLD, "top_entropy_share": 0.0}, "top_entropy_share"),
        (CROSS_ENTROPY, {}, {"top_entropy_share": 0.2}, "top_entropy_share"),
        (GRPO, {}, {"tau_positive": 1.0}, "tau_positive"),
        (SAPO, {}, {"tau_negative": 0.0}, "tau_negative"),
        (SAPO, {}, {"clip_low": 0.2}, "clip_low"),
        (IPO, {}, {"clip_high": 1.5}, "clip_high"),
        (IPO, {}, {"dual_clip": 3.0}, "dual_clip"),
        (GRPO, {}, {"correction_mask": _GEOMETRIC}, "correction_mask"),
        (CROSS_ENTROPY, {}, {"correction_mask": _GEOMETRIC}, "correction_mask"),
        (GRPO, _NO_SAMPLER, _OLD | {"correction_mask": _GEOMETRIC}, "correction_mask"),
        (GRPO, {}, _OLD | {"correction_mask": replace(_GEOMETRIC, low=1.2)}, "correction_mask.low"),
        (
            REINFORCE,
            {},
            {"correction_mask": replace(_GEOMETRIC, high=math.inf)},
            "correction_mask.high",
        ),
        (GRPO, {"top_p": 0.9}, {}, "@.top_p"),
        (GRPO, {"top_k": 40}, {}, "@.top_k"),
        (GRPO, {"top_p": 0.9}, _OLD | {"correction": MASK}, "@.top_p"),
        (REINFORCE, {"top_k": 1}, {"correction": _TRUNCATE}, "@.top_k"),
        (
            GRPO,
            {},
            _OLD | {"correction": replace(MASK, mode=CorrectionMode.TRUNCATE)},
            "correction.low",
        ),
        (GRPO, _NO_REWARD, {}, "@.reward"),
        (GRPO, _ADVANTAGES, {"advantage": AdvantageKind.GROUP_MEAN}, "advantage"),
        (GRPO, {}, {"advantage": AdvantageKind.GIVEN}, "advantage"),
        (CROSS_ENTROPY, {}, {"advantage": AdvantageKind.NONE}, "advantage"),
        (CROSS_ENTROPY, _ADVANTAGES, {}, "@.advantages"),
        (GRPO, {"token_weights": np.ones(2, np.float32)}, {}, "@.token_weights"),
        (DAPO, _ADVANTAGES, {"overlong": _PENALTY}, "overlong_penalty"),
        (CROSS_ENTROPY, {}, {"overlong": _PENALTY}, "overlong_penalty"),
        (
            DAPO,
            {},
            {"overlong": replace(_PENALTY, buffer_tokens=0)},
            "overlong_penalty.buffer_tokens",
        ),
        (DAPO, {}, {"overlong": replace(_PENALTY, max_tokens=3)}, "overlong_penalty.max_tokens"),
        (DAPO, {}, {"overlong": replace(_PENALTY, scale=-1.0)}, "overlong_penalty.scale"),
        (DAPO, _ADVANTAGES, {"drop_zero_variance_groups": True}, "drop_zero_variance_groups"),
        (
            GRPO,
            {},
            {"staleness": StalenessConfig(max_versions=-1, action=StalenessAction.DROP)},
            "staleness.max_versions",
        ),
        (
            GRPO,
            {"policy_version": None},
            {"staleness": StalenessConfig(max_versions=1, action=StalenessAction.DROP)},
            "@.policy_version",
        ),
    ],
)
def test_what_would_not_be_used_is_refused_by_field(
    kind: LossKind, batch: dict[str, Any], request_: dict[str, Any], field: str
) -> None:
    """`field`: below `loss`, or `@`, the first rollout."""
    field = field.replace("@", "groups[0].rollouts[0]") if field[0] == "@" else f"loss.{field}"
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
