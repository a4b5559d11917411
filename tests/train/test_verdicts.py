"""Runs made bad on purpose, what the report says of each in the step where it shows, and good runs
of which it says nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from ratoon.model.spec import ModelDtype
from ratoon.rollout.raw import RawGroup, RawRollout
from ratoon_proto.types import (
    AdvantageKind,
    CorrectionLevel,
    CorrectionMode,
    DivideBy,
    KlConfig,
    KlKind,
    LoraTuning,
    LossConfig,
    LossKind,
    Offender,
    OldLogprobs,
    OldLogprobsKind,
    ReferenceKind,
    RolloutCorrection,
    StepReport,
    StepWarning,
)
from tests.train.live_runs import GRPO, SAMPLER, LiveRun, changed, mapped

_ON_POLICY = OldLogprobs(kind=OldLogprobsKind.ON_POLICY)
_REINFORCE = LossConfig(kind=LossKind.REINFORCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A run, and what its sampler has drawn."""

    run: LiveRun
    groups: list[RawGroup]

    def look(self, groups: list[RawGroup], request: LossConfig = GRPO) -> StepReport:
        return self.run.look(groups, request)


@pytest.fixture(scope="module")
def sampled() -> Sampled:
    run = LiveRun()
    return Sampled(run=run, groups=run.sample())


def _kinds(report: StepReport) -> list[str]:
    return [warning.kind for warning in report.warnings]


def _place(offender: Offender) -> tuple[int, str, int]:
    return offender.group, offender.group_id, offender.rollout


def _only(report: StepReport, kind: str) -> StepWarning:
    (warning,) = (each for each in report.warnings if each.kind == kind)
    return warning


def test_nothing_is_said_of_what_the_policy_has_sampled(sampled: Sampled) -> None:
    report = sampled.look(sampled.groups)
    assert report.warnings == ()
    assert report.sampler_kl is not None
    assert report.sampler_kl < 1e-9


def _foreign(_g: int, n: int, raw: RawRollout) -> RawRollout:
    """Log-probs of other tokens than the rollout's."""
    length = sum(len(segment.tokens) for segment in raw.segments)
    column = -np.random.default_rng(n).uniform(0.1, 3.0, length)
    return replace(raw, sampler_logprobs=column.astype(np.float32))


@pytest.mark.parametrize("kind", [LossKind.GRPO, LossKind.GSPO])
def test_wrong_logprobs_are_called_wrong(sampled: Sampled, kind: LossKind) -> None:
    """Red before: a sampler KL of 1.98 nats without staleness was put down to numerics, and the
    advice was to take other old log-probs, which hides it."""
    request = LossConfig(kind=kind, old_logprobs=SAMPLER)
    report = sampled.look(mapped(sampled.groups, _foreign), request)
    assert report.sampler_kl is not None
    assert report.sampler_kl > 1.9
    warning = _only(report, "wrong_logprobs")
    assert str(warning).startswith("the log-probs are wrong: ")
    assert "other tokens" in str(warning)
    assert len(warning.offenders) == 8
    assert all(each.token is not None and each.value is not None for each in warning.offenders)
    text = " ".join(map(str, report.warnings))
    for hidden in ("numerics of sampler", "on_policy", "from_forward", "correction"):
        assert hidden not in text
    # Nobody says which version sampled them: that far apart, none of this policy did.
    unknown = mapped(
        sampled.groups, lambda g, n, raw: replace(_foreign(g, n, raw), policy_version=None)
    )
    assert "no named version" in str(_only(sampled.look(unknown), "wrong_logprobs"))


def test_temperature_other_than_declared_is_told(sampled: Sampled) -> None:
    """A KL of 0.01 without staleness is no numerics."""
    report = sampled.look(sampled.run.sample(temperature=0.6))
    assert report.sampler_kl is not None
    assert 0.005 < report.sampler_kl < 0.05
    warning = _only(report, "wrong_logprobs")
    assert "more certain" in str(warning)
    assert "temperature" in str(warning)
    hot = _only(sampled.look(sampled.run.sample(temperature=2.0)), "wrong_logprobs")
    assert "less certain" in str(hot)


def test_one_rollout_that_makes_the_gap_is_named_alone(sampled: Sampled) -> None:
    raw = sampled.groups[2].rollouts[1]
    groups = changed(sampled.groups, 2, 1, sampler_logprobs=_foreign(2, 1, raw).sampler_logprobs)
    report = sampled.look(groups, _REINFORCE)
    assert _kinds(report) == ["dominant_rollout"]
    (offender,) = _only(report, "dominant_rollout").offenders
    assert _place(offender) == (2, "g2", 1)
    assert offender.token is not None
    assert offender.value is not None
    assert offender.value > 1
    assert "of the sampler's gap" in str(report.warnings[0])


def test_one_rollout_that_makes_the_gradient_is_named(sampled: Sampled) -> None:
    def of(g: int, n: int, raw: RawRollout) -> RawRollout:
        size = 40.0 if (g, n) == (1, 3) else 1.0
        advantages = np.full(sum(len(each.tokens) for each in raw.segments), size, np.float32)
        return replace(raw, reward=None, advantages=advantages)

    report = sampled.look(mapped(sampled.groups, of))
    warning = _only(report, "dominant_rollout")
    assert [_place(each) for each in warning.offenders] == [(1, "g1", 3)]
    assert "of the gradient" in str(warning)
    assert _kinds(report) == ["dominant_rollout"]


def test_entropy_that_has_ended_is_told_and_absent_where_nothing_was_run(
    sampled: Sampled,
) -> None:
    cold = mapped(
        sampled.groups,
        lambda _g, _n, raw: replace(raw, temperature=1e-5, sampler_logprobs=None),
    )
    report = sampled.look(cold, _REINFORCE)
    assert report.entropy is not None
    assert report.entropy < 0.01
    assert _kinds(report) == ["entropy_collapsed"]
    flat = mapped(sampled.groups, lambda _g, _n, raw: replace(raw, reward=1.0))
    report = sampled.look(flat)
    assert report.entropy is None
    assert _kinds(report) == ["equal_rewards"]


def test_learning_rate_a_hundred_times_too_large_is_told_in_its_first_step() -> None:
    """By the KL of the new weights against the old, on tokens of the batch."""
    run = LiveRun()
    usual = run.update(run.sample(), learning_rate=1e-3)
    assert usual.warnings == ()
    assert usual.step_kl is not None
    assert usual.step_kl_tokens >= 32
    assert usual.update_norm is not None
    assert usual.weight_norm is not None
    large = run.update(run.sample(), learning_rate=0.1)
    assert large.step_kl is not None
    assert large.step_kl > 3 * usual.step_kl
    assert _kinds(large) == ["large_step"]
    assert "learning rate" in str(large.warnings[0])
    # So small a step is measured by nothing but its norm.
    small = run.update(run.sample(), GRPO, learning_rate=1e-7)
    assert small.update_norm is not None
    assert (small.step_kl, small.step_kl_tokens) == (None, 0)


def test_norms_of_a_step_are_those_of_all_weights() -> None:
    """They are estimated from a sample, of a policy with several times as many weights."""
    run = LiveRun()
    before = {n: p.detach().clone() for n, p in run.trainer.model.named_trainable().items()}
    report = run.update(run.sample())
    after = run.trainer.model.named_trainable()
    assert report.update_norm is not None
    assert report.weight_norm is not None
    assert sum(p.numel() for p in before.values()) > 4 * 2**17
    weight = sum(float(p.detach().double().square().sum()) for p in after.values()) ** 0.5
    update = (
        sum(float((after[n].detach() - p).double().square().sum()) for n, p in before.items())
        ** 0.5
    )
    assert report.weight_norm == pytest.approx(weight, rel=0.1)
    assert report.update_norm == pytest.approx(update, rel=0.1)


_KL = KlConfig(kind=KlKind.K3, coefficient=0.05, reference=ReferenceKind.FROZEN)
_WEIGHED = RolloutCorrection(
    mode=CorrectionMode.TRUNCATE, level=CorrectionLevel.TOKEN, low=0.0, high=2.0
)
_GOOD: dict[str, tuple[LossConfig, dict[str, Any], dict[str, Any]]] = {
    "grpo": (GRPO, {}, {}),
    "grpo on policy": (replace(GRPO, old_logprobs=_ON_POLICY), {}, {}),
    "grpo kl": (replace(GRPO, kl=_KL), {}, {}),
    "grpo entropy": (replace(GRPO, entropy_coefficient=0.02), {}, {}),
    "rloo": (replace(GRPO, advantage=AdvantageKind.LEAVE_ONE_OUT), {}, {}),
    "ppo_clip": (LossConfig(kind=LossKind.PPO_CLIP, old_logprobs=SAMPLER), {}, {}),
    "dapo": (LossConfig(kind=LossKind.DAPO, old_logprobs=SAMPLER), {}, {}),
    "dr_grpo": (
        LossConfig(kind=LossKind.DR_GRPO, old_logprobs=SAMPLER),
        {},
        {"divide_by": DivideBy.CONSTANT, "divide_constant": 24.0},
    ),
    "gspo": (
        LossConfig(kind=LossKind.GSPO, old_logprobs=_ON_POLICY, correction=_WEIGHED),
        {},
        {},
    ),
    "cispo": (LossConfig(kind=LossKind.CISPO, old_logprobs=SAMPLER), {}, {}),
    "sapo": (LossConfig(kind=LossKind.SAPO, old_logprobs=SAMPLER), {}, {}),
    "reinforce": (
        LossConfig(kind=LossKind.REINFORCE, advantage=AdvantageKind.GROUP_MEAN),
        {},
        {"divide_by": DivideBy.TOKENS},
    ),
    "importance": (
        LossConfig(
            kind=LossKind.IMPORTANCE_SAMPLING,
            old_logprobs=SAMPLER,
            advantage=AdvantageKind.GROUP_MEAN_STD,
        ),
        {},
        {"divide_by": DivideBy.TOKENS},
    ),
    "lora": (GRPO, {"tuning": LoraTuning(rank=8, alpha=16.0, target_modules=())}, {}),
    "bfloat16": (GRPO, {"dtype": ModelDtype.BFLOAT16}, {"learning_rate": 1e-4}),
    "small": (GRPO, {}, {"learning_rate": 1e-6}),
    **{f"async {age}": (GRPO, {"staleness": age}, {}) for age in (1, 2, 3, 4)},
}


@pytest.mark.more
@pytest.mark.parametrize("name", _GOOD)
def test_good_run_has_no_false_word(name: str) -> None:
    request, options, step = _GOOD[name]
    run = LiveRun(**options)
    num_updates = 2 + options.get("staleness", 0)
    reports = [run.update(run.sample(), request, **step) for _ in range(num_updates)]
    for report in reports:
        assert report.warnings == ()
        assert not report.skipped
    assert (reports[-1].staleness_max or 0) == options.get("staleness", 0)
