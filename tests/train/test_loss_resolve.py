"""Defaults of every loss by the table, and each thing that is refused, by field."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ratoon.errors import ErrorCode, RatoonError
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.raw import SamplerLogprobsKind
from ratoon.rollout.validate import validate_groups
from ratoon.train.config import (
    AdvantageKind,
    CorrectionLevel,
    CorrectionMask,
    CorrectionMode,
    DivideBy,
    KlConfig,
    KlKind,
    LossKind,
    LossRequest,
    OldLogprobs,
    OldLogprobsKind,
    OverlongFilter,
    OverlongPenalty,
    ReferenceKind,
    RolloutCorrection,
    Staleness,
    StalenessAction,
    TokenWeight,
)
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.loss.spec import (
    CispoObjective,
    ClipObjective,
    IpoObjective,
    LinearObjective,
    Loss,
    Objective,
    SapoObjective,
    SequenceClipObjective,
)
from tests import builders

_MASK = RolloutCorrection(mode=CorrectionMode.MASK, level=CorrectionLevel.TOKEN, low=0.5, high=2.0)
_TRUNCATE = replace(_MASK, mode=CorrectionMode.TRUNCATE, low=0.0)
_GEOMETRIC = CorrectionMask(level=CorrectionLevel.GEOMETRIC, low=0.9, high=1.1)
_FORWARD_OLD = OldLogprobs(kind=OldLogprobsKind.FROM_FORWARD, forward_operation_id="p.op")
_GIVEN_OLD = OldLogprobs(kind=OldLogprobsKind.GIVEN)


def _batch(**changes: Any) -> RolloutBatch:
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


def _resolve(
    kind: LossKind, batch: RolloutBatch, *, has_frozen: bool = False, **changes: Any
) -> Loss:
    return resolve_loss(LossRequest(kind=kind, **changes), batch, has_frozen_reference=has_frozen)


@pytest.mark.parametrize(
    ("kind", "objective", "token_weight", "divide_by", "advantage"),
    [
        (
            LossKind.GRPO,
            ClipObjective(clip_low=0.2, clip_high=0.2, dual_clip=math.inf),
            TokenWeight.PER_SEQUENCE,
            DivideBy.SEQUENCES,
            AdvantageKind.GROUP_MEAN_STD,
        ),
        (
            LossKind.PPO_CLIP,
            ClipObjective(clip_low=0.2, clip_high=0.2, dual_clip=math.inf),
            TokenWeight.PER_TOKEN,
            DivideBy.TOKENS,
            AdvantageKind.GROUP_MEAN_STD,
        ),
        (
            LossKind.DAPO,
            ClipObjective(clip_low=0.2, clip_high=0.28, dual_clip=math.inf),
            TokenWeight.PER_TOKEN,
            DivideBy.TOKENS,
            AdvantageKind.GROUP_MEAN_STD,
        ),
        (
            LossKind.DR_GRPO,
            ClipObjective(clip_low=0.2, clip_high=0.2, dual_clip=math.inf),
            TokenWeight.PER_TOKEN,
            DivideBy.CONSTANT,
            AdvantageKind.GROUP_MEAN,
        ),
        (
            LossKind.GSPO,
            SequenceClipObjective(clip_low=3e-4, clip_high=4e-4),
            TokenWeight.PER_SEQUENCE,
            DivideBy.SEQUENCES,
            AdvantageKind.GROUP_MEAN_STD,
        ),
        (
            LossKind.CISPO,
            CispoObjective(ratio_low=0.0, ratio_high=5.0),
            TokenWeight.PER_TOKEN,
            DivideBy.TOKENS,
            AdvantageKind.GROUP_MEAN_STD,
        ),
        (
            LossKind.SAPO,
            SapoObjective(tau_positive=1.0, tau_negative=1.05),
            TokenWeight.PER_SEQUENCE,
            DivideBy.SEQUENCES,
            AdvantageKind.GROUP_MEAN_STD,
        ),
        (
            LossKind.IPO,
            IpoObjective(most_down=0.3, most_up=0.3),
            TokenWeight.PER_TOKEN,
            DivideBy.TOKENS,
            AdvantageKind.GROUP_MEAN,
        ),
        (
            LossKind.IMPORTANCE_SAMPLING,
            LinearObjective(),
            TokenWeight.PER_TOKEN,
            DivideBy.NONE,
            AdvantageKind.GROUP_MEAN_STD,
        ),
        (
            LossKind.REINFORCE,
            LinearObjective(),
            TokenWeight.PER_TOKEN,
            DivideBy.NONE,
            AdvantageKind.GROUP_MEAN_STD,
        ),
        (
            LossKind.CROSS_ENTROPY,
            LinearObjective(),
            TokenWeight.PER_TOKEN,
            DivideBy.NONE,
            None,
        ),
    ],
)
def test_defaults_are_those_of_the_table(
    kind: LossKind,
    objective: Objective,
    token_weight: TokenWeight,
    divide_by: DivideBy,
    advantage: AdvantageKind | None,
) -> None:
    old = OldLogprobs(kind=OldLogprobsKind.SAMPLER)
    loss = _resolve(kind, _batch(), old_logprobs=old if kind is LossKind.GSPO else None)
    assert loss.objective == objective
    assert (loss.token_weight, loss.default_divide_by) == (token_weight, divide_by)
    assert loss.advantage is advantage
    has_ratio = kind not in (LossKind.REINFORCE, LossKind.CROSS_ENTROPY)
    assert loss.old_logprobs == (old if has_ratio else None)
    assert loss.drop_zero_variance_groups == (kind is LossKind.DAPO)
    assert loss.kl is None
    assert loss.correction is None
    assert loss.entropy_coefficient == 0.0


def test_defaults_follow_what_the_rollouts_carry() -> None:
    """Ready-made advantages are taken; without rewards there is no variance to drop for."""
    loss = _resolve(LossKind.DAPO, _batch(reward=None, advantages=np.ones(2, np.float32)))
    assert loss.advantage is AdvantageKind.GIVEN
    assert not loss.drop_zero_variance_groups
    # A correction without a ratio is from the current policy to the sampler.
    loss = _resolve(LossKind.REINFORCE, _batch(), correction=_MASK)
    assert loss.old_logprobs == OldLogprobs(kind=OldLogprobsKind.ON_POLICY)


def test_explicit_options_are_kept() -> None:
    loss = _resolve(
        LossKind.PPO_CLIP,
        _batch(),
        clip_low=0.1,
        clip_high=0.3,
        dual_clip=3.0,
        advantage=AdvantageKind.LEAVE_ONE_OUT,
        old_logprobs=_GIVEN_OLD,
        correction=_MASK,
        token_weight=TokenWeight.PER_SEQUENCE,
        overlong=OverlongFilter(),
        drop_zero_variance_groups=True,
        kl=KlConfig(kind=KlKind.K2, coefficient=0.1, reference=ReferenceKind.GIVEN),
        staleness=Staleness(max_versions=0, action=StalenessAction.DROP),
    )
    assert loss.objective == ClipObjective(clip_low=0.1, clip_high=0.3, dual_clip=3.0)
    assert loss.advantage is AdvantageKind.LEAVE_ONE_OUT
    assert loss.old_logprobs == _GIVEN_OLD
    assert loss.correction == _MASK
    assert loss.token_weight is TokenWeight.PER_SEQUENCE
    assert loss.overlong == OverlongFilter()
    assert loss.drop_zero_variance_groups
    assert loss.kl is not None
    assert loss.kl.kind is KlKind.K2
    assert loss.staleness == Staleness(max_versions=0, action=StalenessAction.DROP)


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
        (LossKind.GRPO, {"old_logprobs": None}, {"old_logprobs": _GIVEN_OLD}, "loss.old_logprobs"),
        (LossKind.REINFORCE, {}, {"old_logprobs": _GIVEN_OLD}, "loss.old_logprobs"),
        (
            LossKind.GRPO,
            {},
            {"old_logprobs": OldLogprobs(kind=OldLogprobsKind.FROM_FORWARD)},
            "loss.old_logprobs.forward_operation_id",
        ),
        (
            LossKind.GRPO,
            {},
            {"old_logprobs": replace(_GIVEN_OLD, forward_operation_id="op")},
            "loss.old_logprobs.forward_operation_id",
        ),
        (LossKind.GRPO, _RAW, {}, "groups[0].rollouts[0].sampler_logprobs_kind"),
        (
            LossKind.GRPO,
            _RAW,
            {"old_logprobs": _GIVEN_OLD, "correction": _MASK},
            "groups[0].rollouts[0].sampler_logprobs_kind",
        ),
        (LossKind.GRPO, {}, {"correction": _MASK}, "loss.correction"),
        (LossKind.CROSS_ENTROPY, {}, {"correction": _MASK}, "loss.correction"),
        (
            LossKind.GRPO,
            _NO_SAMPLER,
            {"old_logprobs": _GIVEN_OLD, "correction": _MASK},
            "loss.correction",
        ),
        (
            LossKind.GRPO,
            {},
            {"old_logprobs": _GIVEN_OLD, "correction": replace(_MASK, high=0.9)},
            "loss.correction.high",
        ),
        (
            LossKind.GRPO,
            {},
            {"old_logprobs": _GIVEN_OLD, "correction": replace(_MASK, low=1.1)},
            "loss.correction.low",
        ),
        (
            LossKind.GRPO,
            {},
            {"old_logprobs": _GIVEN_OLD, "correction": replace(_TRUNCATE, high=0.5)},
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
            {"old_logprobs": _GIVEN_OLD, "correction_mask": _GEOMETRIC},
            "loss.correction_mask",
        ),
        (
            LossKind.GRPO,
            {},
            {"old_logprobs": _GIVEN_OLD, "correction_mask": replace(_GEOMETRIC, low=1.2)},
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
            {"old_logprobs": _GIVEN_OLD, "correction": _MASK},
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
                "old_logprobs": _GIVEN_OLD,
                "correction": replace(_MASK, mode=CorrectionMode.TRUNCATE),
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
            {"staleness": Staleness(max_versions=-1, action=StalenessAction.DROP)},
            "loss.staleness.max_versions",
        ),
        (
            LossKind.GRPO,
            {"policy_version": None},
            {"staleness": Staleness(max_versions=1, action=StalenessAction.DROP)},
            "groups[0].rollouts[0].policy_version",
        ),
    ],
)
def test_what_would_not_be_used_is_refused_by_field(
    kind: LossKind, batch: dict[str, Any], request_: dict[str, Any], field: str
) -> None:
    with pytest.raises(RatoonError) as caught:
        _resolve(kind, _batch(**batch), **request_)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert caught.value.field == field
    assert field in caught.value.message


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 40}])
def test_truncated_sampling_is_taken_where_acknowledged_or_in_no_ratio(cut: dict[str, Any]) -> None:
    """The sampler's log-probs are of a distribution cut and renormalised, the trainer's are not: a
    ratio of the two is off by the mass that was cut, in every token."""
    batch = _batch(**cut)
    with pytest.raises(RatoonError, match=r"loss\.allow_truncated_sampling"):
        _resolve(LossKind.GRPO, batch)
    loss = _resolve(LossKind.GRPO, batch, allow_truncated_sampling=True)
    assert loss.old_logprobs == OldLogprobs(kind=OldLogprobsKind.SAMPLER)
    assert _resolve(LossKind.GRPO, batch, old_logprobs=_GIVEN_OLD).old_logprobs == _GIVEN_OLD
    assert _resolve(LossKind.REINFORCE, batch).old_logprobs is None


def test_router_loss_is_unsupported() -> None:
    """Trap 7: a router's auxiliary loss is no sum over rollouts, so no counter makes it exact."""
    with pytest.raises(RatoonError) as caught:
        _resolve(LossKind.GRPO, _batch(), router_aux_loss_coefficient=0.01)
    assert caught.value.code is ErrorCode.UNSUPPORTED
    assert caught.value.field == "loss.router_aux_loss_coefficient"


def test_frozen_reference_and_raw_sampler_are_taken_where_they_hold() -> None:
    assert _resolve(LossKind.GRPO, _batch(), has_frozen=True, kl=_FROZEN_KL).kl == _FROZEN_KL
    loss = _resolve(LossKind.GRPO, _batch(**_RAW), old_logprobs=_GIVEN_OLD)
    assert loss.old_logprobs == _GIVEN_OLD
