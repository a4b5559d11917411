"""Defaults of every loss by the table, and options that are kept."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ratoon.train.loss.kinds import (
    CispoObjective,
    ClipObjective,
    IpoObjective,
    LogprobObjective,
    Objective,
    RatioObjective,
    SapoObjective,
    SequenceClipObjective,
)
from ratoon_proto.types import (
    AdvantageKind,
    DivideBy,
    KlConfig,
    KlKind,
    LossKind,
    OldLogprobs,
    OldLogprobsKind,
    OverlongFilter,
    ReferenceKind,
    StalenessAction,
    StalenessConfig,
    TokenWeight,
)
from tests.train.loss_cases import GIVEN_OLD, MASK, resolve, small_batch

SUM, MEAN = TokenWeight.PER_TOKEN, TokenWeight.PER_SEQUENCE
_CLIP = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": math.inf}
STD = AdvantageKind.GROUP_MEAN_STD


@pytest.mark.parametrize(
    ("kind", "objective", "token_weight", "divide_by", "advantage"),
    [
        (LossKind.GRPO, ClipObjective(**_CLIP), MEAN, DivideBy.SEQUENCES, STD),
        (LossKind.PPO_CLIP, ClipObjective(**_CLIP), SUM, DivideBy.TOKENS, STD),
        (LossKind.DAPO, ClipObjective(**_CLIP | {"clip_high": 0.28}), SUM, DivideBy.TOKENS, STD),
        (
            LossKind.DR_GRPO,
            ClipObjective(**_CLIP),
            SUM,
            DivideBy.CONSTANT,
            AdvantageKind.GROUP_MEAN,
        ),
        (
            LossKind.GSPO,
            SequenceClipObjective(clip_low=0.0003, clip_high=0.0004),
            MEAN,
            DivideBy.SEQUENCES,
            STD,
        ),
        (LossKind.CISPO, CispoObjective(ratio_low=0.0, ratio_high=5.0), SUM, DivideBy.TOKENS, STD),
        (
            LossKind.SAPO,
            SapoObjective(tau_positive=1.0, tau_negative=1.05),
            MEAN,
            DivideBy.SEQUENCES,
            STD,
        ),
        (
            LossKind.IPO,
            IpoObjective(most_down=0.3, most_up=0.3),
            SUM,
            DivideBy.TOKENS,
            AdvantageKind.GROUP_MEAN,
        ),
        (LossKind.IMPORTANCE_SAMPLING, RatioObjective(), SUM, DivideBy.NONE, STD),
        (LossKind.REINFORCE, LogprobObjective(), SUM, DivideBy.NONE, STD),
        (LossKind.CROSS_ENTROPY, LogprobObjective(), SUM, DivideBy.NONE, None),
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
    loss = resolve(kind, small_batch(), old_logprobs=old if kind is LossKind.GSPO else None)
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
    loss = resolve(LossKind.DAPO, small_batch(reward=None, advantages=np.ones(2, np.float32)))
    assert loss.advantage is AdvantageKind.GIVEN
    assert not loss.drop_zero_variance_groups
    # A correction without a ratio is from the current policy to the sampler.
    loss = resolve(LossKind.REINFORCE, small_batch(), correction=MASK)
    assert loss.old_logprobs == OldLogprobs(kind=OldLogprobsKind.ON_POLICY)


def test_explicit_options_are_kept() -> None:
    loss = resolve(
        LossKind.PPO_CLIP,
        small_batch(),
        clip_low=0.1,
        clip_high=0.3,
        dual_clip=3.0,
        advantage=AdvantageKind.LEAVE_ONE_OUT,
        old_logprobs=GIVEN_OLD,
        correction=MASK,
        token_weight=TokenWeight.PER_SEQUENCE,
        overlong=OverlongFilter(),
        drop_zero_variance_groups=True,
        kl=KlConfig(kind=KlKind.K2, coefficient=0.1, reference=ReferenceKind.GIVEN),
        staleness=StalenessConfig(max_versions=0, action=StalenessAction.DROP),
    )
    assert loss.objective == ClipObjective(clip_low=0.1, clip_high=0.3, dual_clip=3.0)
    assert loss.advantage is AdvantageKind.LEAVE_ONE_OUT
    assert loss.old_logprobs == GIVEN_OLD
    assert loss.correction == MASK
    assert loss.token_weight is TokenWeight.PER_SEQUENCE
    assert loss.overlong == OverlongFilter()
    assert loss.drop_zero_variance_groups
    assert loss.kl is not None
    assert loss.kl.kind is KlKind.K2
    assert loss.staleness == StalenessConfig(max_versions=0, action=StalenessAction.DROP)
