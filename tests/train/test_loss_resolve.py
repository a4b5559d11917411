"""What a loss and a step are resolved to: defaults by the table, what is kept, what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ratoon.errors import ErrorCode, RatoonError
from ratoon.rollout.raw import SamplerLogprobsKind
from ratoon.train.loss.kinds import (
    CispoObjective,
    ClipObjective,
    GeometricClipObjective,
    IpoObjective,
    LogprobObjective,
    Objective,
    RatioObjective,
    SapoObjective,
    SequenceClipObjective,
)
from ratoon.train.loss.spec import (
    CounterDivisor,
    NoDivisor,
    Normalisation,
)
from ratoon.train.optim.resolve import check_schedule, resolve_optim
from ratoon_proto.types import (
    AdamWConfig,
    AdvantageKind,
    CorrectionLevel,
    CorrectionMask,
    CorrectionMode,
    DivideBy,
    KlConfig,
    KlKind,
    LearningRateSchedule,
    LossKind,
    OldLogprobs,
    OldLogprobsKind,
    OptimStepConfig,
    OverlongFilter,
    OverlongPenalty,
    ReferenceKind,
    ScheduleKind,
    StalenessAction,
    StalenessConfig,
    TokenWeight,
)
from tests.train.loss_cases import GIVEN_OLD, MASK, resolve, small_batch

GRPO, DAPO, GSPO, CISPO = LossKind.GRPO, LossKind.DAPO, LossKind.GSPO, LossKind.CISPO
SAPO, IPO, REINFORCE = LossKind.SAPO, LossKind.IPO, LossKind.REINFORCE
CROSS_ENTROPY, IMPORTANCE_SAMPLING = LossKind.CROSS_ENTROPY, LossKind.IMPORTANCE_SAMPLING
_TRUNCATE = replace(MASK, mode=CorrectionMode.TRUNCATE, low=0.0)
_GEOMETRIC = CorrectionMask(level=CorrectionLevel.GEOMETRIC, low=0.9, high=1.1)
_FORWARD_OLD = OldLogprobs(kind=OldLogprobsKind.FROM_FORWARD, forward_operation_id="p.op")
_GIVEN_KL = KlConfig(kind=KlKind.K1, coefficient=0.1, reference=ReferenceKind.GIVEN)
_WEIGHTED = replace(_GIVEN_KL, importance_weighted=True)
_WEIGHT, _BIASED = "kl.importance_weighted", (KlKind.K2, KlKind.K1_PLUS, KlKind.K3_PLUS)
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
        # k2 is no unbiased estimate, k2's gradient needs no weight, and REINFORCE has no ratio.
        *((GRPO, {}, {"kl": replace(_WEIGHTED, kind=kind)}, _WEIGHT) for kind in _BIASED),
        (REINFORCE, {}, {"kl": _WEIGHTED}, _WEIGHT),
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


def test_truncated_sampling_with_its_mask_is_taken_in_a_ratio() -> None:
    batch = small_batch(top_p=0.9)
    num_tokens = len(batch.response_tokens)
    masked = replace(
        batch,
        sampling_mask=batch.response_tokens,
        mask_offsets=np.arange(num_tokens + 1),
    )
    assert resolve(LossKind.GRPO, masked).old_logprobs is not None
    offsets = np.minimum(np.arange(num_tokens + 1), num_tokens - 1)
    partly = replace(masked, sampling_mask=masked.response_tokens[:-1], mask_offsets=offsets)
    with pytest.raises(RatoonError, match=r"send the sampling_mask"):
        resolve(LossKind.GRPO, partly)


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
        (
            LossKind.GMPO,
            GeometricClipObjective(most_down=0.4, most_up=0.4),
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
        (LossKind.CROSS_ENTROPY, LogprobObjective(), SUM, DivideBy.TOKENS, None),
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


_ADAMW = AdamWConfig(weight_decay=0.03)


_TOKENS = Normalisation(token_weight=TokenWeight.PER_TOKEN, default_divide_by=DivideBy.TOKENS)


_SEQUENCES = Normalisation(
    token_weight=TokenWeight.PER_SEQUENCE, default_divide_by=DivideBy.SEQUENCES
)


_CONSTANT = replace(_TOKENS, default_divide_by=DivideBy.CONSTANT)


_MIXED = replace(_TOKENS, default_divide_by=None)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (("constant", 8.0), {0: 8.0, 10**6: 8.0}),
        (("constant", 8.0, 3), {0: 2.0, 1: 4.0, 2: 6.0, 3: 8.0, 9: 8.0}),
        (("linear", 8.0, 1, 5), {0: 4.0, 1: 8.0, 2: 6.0, 4: 2.0, 5: 0.0, 99: 0.0}),
        (("linear", 8.0, 0, 2, 0.25), {0: 8.0, 1: 5.0, 2: 2.0, 99: 2.0}),
        # Cosines of 0, 60, 90, 120 and 180 degrees.
        (("cosine", 8.0, 1, 7), {0: 4.0, 1: 8.0, 3: 6.0, 4: 4.0, 5: 2.0, 7: 0.0, 99: 0.0}),
        (("cosine", 8.0, 0, 2, 0.5), {0: 8.0, 1: 6.0, 2: 4.0, 99: 4.0}),
    ],
)
def test_a_schedule_says_the_rate_where_the_step_does_not(
    schedule: tuple[Any, ...], rates: dict[int, float]
) -> None:
    kind, rate, *others = schedule
    names = ("warmup_steps", "total_steps", "final_share")
    numbers = dict(zip(names, others, strict=False))
    own = LearningRateSchedule(ScheduleKind(kind), rate, **numbers)
    check_schedule("schedule", own)
    policy = replace(_ADAMW, schedule=own)
    for num_steps, expected in rates.items():
        step = resolve_optim(OptimStepConfig(), _TOKENS, policy, num_steps)
        assert step.learning_rate == pytest.approx(expected, rel=1e-15, abs=1e-15)
        step = resolve_optim(OptimStepConfig(learning_rate=0.5), _TOKENS, policy, num_steps)
        assert step.learning_rate == 0.5


def test_step_takes_the_policys_and_the_losss_defaults() -> None:
    step = resolve_optim(OptimStepConfig(learning_rate=1e-3), _TOKENS, _ADAMW)
    assert step.learning_rate == 1e-3
    assert step.weight_decay == 0.03
    assert step.max_grad_norm == 1.0
    assert step.divisor == CounterDivisor(counter=DivideBy.TOKENS)
    step = resolve_optim(
        OptimStepConfig(
            learning_rate=0.0, weight_decay=0.0, max_grad_norm=2.5, divide_constant=8.0
        ),
        _CONSTANT,
        _ADAMW,
    )
    assert step.weight_decay == 0.0
    assert step.max_grad_norm == 2.5
    assert step.divisor == CounterDivisor(counter=DivideBy.SEQUENCES, times=8.0)


@pytest.mark.parametrize(
    ("divide_by", "asked", "clip"),
    [
        (DivideBy.TOKENS, None, 1.0),
        (DivideBy.NONE, None, math.inf),
        (DivideBy.NONE, 3.0, 3.0),
        (DivideBy.TOKENS, 0.0, math.inf),
    ],
)
def test_gradients_are_clipped_at_1_unless_told_otherwise(
    divide_by: DivideBy, asked: float | None, clip: float
) -> None:
    """Without a default a spike of the gradient was a step of full size. Of sums that nothing
    divides the norm grows with the batch: there is none."""
    request = OptimStepConfig(learning_rate=1e-3, divide_by=divide_by, max_grad_norm=asked)
    assert resolve_optim(request, _TOKENS, _ADAMW).max_grad_norm == clip


@pytest.mark.parametrize(
    ("divide_by", "normalisation", "divisor"),
    [
        (DivideBy.SEQUENCES, _SEQUENCES, CounterDivisor(counter=DivideBy.SEQUENCES)),
        (DivideBy.SEQUENCES, _TOKENS, CounterDivisor(counter=DivideBy.SEQUENCES)),
        (DivideBy.GROUPS, _SEQUENCES, CounterDivisor(counter=DivideBy.GROUPS)),
        (DivideBy.GROUPS, _TOKENS, CounterDivisor(counter=DivideBy.GROUPS)),
        (DivideBy.NONE, _TOKENS, NoDivisor()),
        (DivideBy.TOKENS, _MIXED, CounterDivisor(counter=DivideBy.TOKENS)),
    ],
)
def test_step_divides_as_it_is_told(
    divide_by: DivideBy, normalisation: Normalisation, divisor: CounterDivisor | NoDivisor
) -> None:
    request = OptimStepConfig(learning_rate=1e-3, divide_by=divide_by)
    assert resolve_optim(request, normalisation, _ADAMW).divisor == divisor


@pytest.mark.parametrize(
    ("changes", "normalisation", "field"),
    [
        ({"divide_by": DivideBy.TOKENS}, _SEQUENCES, "optim.divide_by"),
        ({}, _MIXED, "optim.divide_by"),
        ({}, _CONSTANT, "optim.divide_constant"),
        ({"divide_by": DivideBy.TOKENS}, _CONSTANT, "optim.divide_by"),
        ({"divide_constant": 3.0}, _TOKENS, "optim.divide_constant"),
        (
            {"divide_constant": 3.0, "divide_by": DivideBy.TOKENS},
            _TOKENS,
            "optim.divide_constant",
        ),
        ({"divide_constant": 0.0}, _CONSTANT, "optim.divide_constant"),
        ({"divide_constant": math.inf}, _CONSTANT, "optim.divide_constant"),
        ({"learning_rate": None}, _TOKENS, "optim.learning_rate"),
        ({"learning_rate": -1e-3}, _TOKENS, "optim.learning_rate"),
        ({"learning_rate": math.nan}, _TOKENS, "optim.learning_rate"),
        ({"learning_rate": 1e38}, _TOKENS, "optim.learning_rate"),
        # Times the policy's 0.03 it is above 1.
        ({"learning_rate": 34.0}, _TOKENS, "optim.learning_rate"),
        ({"learning_rate": 34.0, "weight_decay": 0.03}, _TOKENS, "optim.weight_decay"),
        ({"weight_decay": 1e300, "learning_rate": 0.0}, _TOKENS, "optim.weight_decay"),
        ({"eps": 1e-31}, _TOKENS, "optim.eps"),
        ({"max_grad_norm": 1e-31}, _TOKENS, "optim.max_grad_norm"),
        ({"divide_constant": 1e300}, _CONSTANT, "optim.divide_constant"),
        ({"weight_decay": -0.1}, _TOKENS, "optim.weight_decay"),
        ({"beta1": 1.0}, _TOKENS, "optim.beta1"),
        ({"beta2": -0.1}, _TOKENS, "optim.beta2"),
        ({"beta2": math.nan}, _TOKENS, "optim.beta2"),
        ({"eps": 0.0}, _TOKENS, "optim.eps"),
        ({"max_grad_norm": -1.0}, _TOKENS, "optim.max_grad_norm"),
        ({"max_grad_norm": math.nan}, _TOKENS, "optim.max_grad_norm"),
        ({"max_grad_norm": math.inf}, _TOKENS, "optim.max_grad_norm"),
    ],
)
def test_step_refuses_by_field(
    changes: dict[str, Any], normalisation: Normalisation, field: str
) -> None:
    fields: dict[str, Any] = {"learning_rate": 1e-3} | changes
    request = OptimStepConfig(**fields)
    with pytest.raises(RatoonError) as caught:
        resolve_optim(request, normalisation, _ADAMW)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert caught.value.field == field
