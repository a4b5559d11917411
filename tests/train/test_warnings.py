"""What a report tells though it is no error: odd batches, clips that hold most, clamped numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ratoon.model.spec import FolderBase, ModelDtype
from ratoon.planner.planning import cpu_planner
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.validate import validate_groups
from ratoon.train.gradient_window import of_prepared
from ratoon.train.loss.compute import LossOutput
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.prepare import prepare
from ratoon.train.verdicts import clip_text
from ratoon_proto.types import (
    AdvantageKind,
    CorrectionLevel,
    CorrectionMask,
    CorrectionMode,
    KlConfig,
    KlKind,
    LossConfig,
    LossKind,
    NumericsGuard,
    OldLogprobs,
    OldLogprobsKind,
    ReferenceKind,
    RolloutCorrection,
    StalenessAction,
    StalenessConfig,
    StepWarning,
)
from tests import builders
from tests.train.loss_cases import make_loss, run_loss, summed
from tests.train.trainer_runs import make_batch, make_step, make_trainer
from tests.train.trainer_runs import make_loss as resolved_loss

_GIVEN = OldLogprobs(kind=OldLogprobsKind.GIVEN)
_LATEST = 2**63 - 1


def _batch(*versions: tuple[int | None, ...], **fields: Any) -> RolloutBatch:
    """One group for each tuple, with a rollout of two tokens for each version."""
    column = np.full(2, -1.0, np.float32)
    groups = [
        builders.group(
            [9],
            [
                builders.rollout(
                    [1, n],
                    **({"reward": float(n)} | fields),
                    policy_version=version,
                    sampler_logprobs=column,
                    old_logprobs=column,
                )
                for n, version in enumerate(of_group)
            ],
            f"group-{g}",
        )
        for g, of_group in enumerate(versions)
    ]
    return validate_groups(groups, builders.limits())


def _warnings(batch: RolloutBatch, version: int = 3, **changes: Any) -> tuple[StepWarning, ...]:
    request = LossConfig(**({"kind": LossKind.GRPO, "old_logprobs": _GIVEN} | changes))
    loss = resolve_loss(request, batch, has_frozen_reference=False)
    return prepare(batch, loss, version=version, plan=cpu_planner(64)).warnings


@pytest.mark.parametrize(
    "kind",
    [
        AdvantageKind.GROUP_MEAN_STD,
        AdvantageKind.GROUP_MEAN,
        AdvantageKind.GROUP_MEAN_BATCH_STD,
        AdvantageKind.LEAVE_ONE_OUT,
    ],
)
def test_groups_of_one_under_a_group_baseline_are_counted(kind: AdvantageKind) -> None:
    """A rollout sent alone had its reward as its advantage, and nothing said so."""
    batch = _batch((None,), (None, None), (None,))
    (warning,) = _warnings(batch, advantage=kind)
    assert warning.message.startswith("2 of 3 groups have a single rollout: ")
    assert str(kind) in warning.message
    assert _warnings(batch, advantage=AdvantageKind.NONE) == ()
    assert _warnings(_batch((None, None)), advantage=kind) == ()


def _of_lengths(lengths: list[int], **fields: Any) -> RolloutBatch:
    """One group; a response ends with token 7 unless it has 40 tokens."""
    rollouts = [
        builders.rollout(
            [1] * (length - 1) + [2 if length == 40 else 7], **({"reward": n} | fields)
        )
        for n, length in enumerate(lengths)
    ]
    return validate_groups([builders.group([9], rollouts, "g")], builders.limits())


def _bad(name: str) -> RolloutBatch:
    ten = list(range(30, 40))
    batch = _of_lengths(ten)
    rewards = np.ones(10)
    rewards[::2] = 0.0
    truncated = np.zeros(10, np.bool_)
    truncated[[1, 2, 4, 6, 7, 9]] = True
    far = rewards.copy()
    far[6] = 1e6
    return {
        "equal_rewards": replace(batch, rewards=np.full(10, 0.5)),
        "reward_outlier": replace(batch, rewards=far),
        "truncated_most": replace(batch, rewards=rewards, truncated=truncated),
        "unmarked_truncation": _of_lengths([*ten[:6], 40, 35, 40, 40]),
        "stale_rollouts": replace(batch, policy_version=np.array([1, *range(2, 11)])),
    }[name]


@pytest.mark.parametrize(
    ("kind", "first", "value"),
    [
        ("equal_rewards", 0, 0.5),
        ("reward_outlier", 6, 1e6),
        ("truncated_most", 9, 39),
        ("unmarked_truncation", 6, 40),
        ("stale_rollouts", 0, 19),
    ],
)
def test_bad_batch_is_told_with_whom_it_is_about(kind: str, first: int, value: float) -> None:
    request = LossConfig(kind=LossKind.REINFORCE, advantage=AdvantageKind.GROUP_MEAN)
    loss = resolve_loss(request, _bad(kind), has_frozen_reference=False)
    found = prepare(_bad(kind), loss, version=20, plan=cpu_planner(512)).warnings
    (warning,) = found
    assert warning.kind == kind
    offender = warning.offenders[0]
    assert (offender.group_id, offender.rollout, offender.value) == ("g", first, value)
    good = prepare(_of_lengths(list(range(30, 40))), loss, version=20, plan=cpu_planner(512))
    assert good.warnings == ()


def test_ready_advantages_of_a_single_rollout_are_as_they_are() -> None:
    batch = _batch((None,), reward=None, advantages=np.ones(2, np.float32))
    assert _warnings(batch) == ()


def test_on_policy_of_stale_rollouts_is_counted_with_its_versions() -> None:
    on_policy: dict[str, Any] = {"old_logprobs": OldLogprobs(kind=OldLogprobsKind.ON_POLICY)}
    batch = _batch((3, 1), (2, 3, None))
    found = _warnings(batch, **on_policy)
    (warning,) = (each for each in found if each.kind != "unused_logprobs")
    assert warning.message.startswith(
        "2 of 5 rollouts were sampled by versions 1 to 2, before version 3"
    )
    assert "on_policy" in warning.message
    assert not [each for each in _warnings(batch, 1, **on_policy) if each.kind == "stale_on_policy"]
    # Whoever weighs or masks the mismatch knows of it.
    correction = RolloutCorrection(
        mode=CorrectionMode.TRUNCATE, level=CorrectionLevel.TOKEN, low=0.0, high=2.0
    )
    mask = CorrectionMask(level=CorrectionLevel.TOKEN, low=0.5, high=2.0)
    fields: list[dict[str, Any]] = [{"correction": correction}, {"correction_mask": mask}]
    for known in fields:
        assert not [
            each
            for each in _warnings(batch, **on_policy, **known)
            if each.kind == "stale_on_policy"
        ]
    # Dropped rollouts are not trained on.
    staleness = StalenessConfig(max_versions=0, action=StalenessAction.DROP)
    dropped = _warnings(_batch((3, 1), (3, 3)), **on_policy, staleness=staleness)
    assert not [each for each in dropped if each.kind == "stale_on_policy"]


def test_versions_of_the_future_are_counted() -> None:
    """They made a mean staleness of less than none, and two of them one that overflowed."""
    batch = _batch((3, 9), (4, None))
    (warning,) = _warnings(batch)
    assert warning.message.startswith(
        "2 of 4 rollouts name versions 4 to 9, and the policy is at 3"
    )
    assert _warnings(batch, 9) == ()


def test_a_span_of_the_future_is_counted() -> None:
    batch = _batch((None, None), version_spans=((0, 3), (1, 5)))
    (warning,) = _warnings(batch)
    assert warning.message.startswith(
        "2 of 2 rollouts name versions 5 to 5, and the policy is at 3"
    )


def test_staleness_is_of_versions_that_the_policy_has_had() -> None:
    batch = _batch((1, _LATEST), (_LATEST, _LATEST))
    request = LossConfig(kind=LossKind.GRPO, old_logprobs=_GIVEN)
    loss = resolve_loss(request, batch, has_frozen_reference=False)
    sums = of_prepared(prepare(batch, loss, version=3, plan=cpu_planner(64)))
    assert (sums.dated_rollouts, sums.staleness, sums.staleness_max) == (1, 2, 2)
    assert (sums.dated_tokens, sums.token_staleness) == (2, 4)


_PATHS, _TOKENS = 256, 1024


def _mismatch() -> LossOutput:
    """Gradients of paths whose tokens a sampler drew that differs by sd 0.05 nats per token.

    Drawn by the sampler, a token's log p - log p_sampler has mean -sd^2 / 2: it is KL's. Advantages
    are -1 and 1 in turn.
    """
    rng = np.random.default_rng(0)
    gap_L = torch.tensor(rng.normal(-(0.05**2) / 2, 0.05, _PATHS * _TOKENS))
    logprob_L = torch.full_like(gap_L, -1.0)
    sequence_L = torch.arange(_PATHS).repeat_interleave(_TOKENS)
    return run_loss(
        make_loss(LossKind.GSPO),
        logprob_L,
        sequence_L=sequence_L,
        num_sequences=_PATHS,
        weight_L=torch.full_like(gap_L, 1 / _TOKENS),
        advantage_L=(sequence_L % 2) * 2.0 - 1.0,
        old_L=logprob_L - gap_L,
        sampler_L=logprob_L - gap_L,
    )


def test_clip_of_gspo_is_narrower_than_a_samplers_numerics() -> None:
    """Most rollouts with a negative advantage are pushed by nothing; the report says so."""
    output = _mismatch()
    gradient_ST = output.grad_logprob_L.reshape(_PATHS, _TOKENS)
    is_still_S = (gradient_ST == 0).all(dim=1)
    negative, positive = is_still_S[0::2].double().mean(), is_still_S[1::2].double().mean()
    sums = summed(output)
    assert negative == 0.75
    assert sums.negative_clipped / sums.negative_terms == pytest.approx(negative.item())
    assert sums.positive_clipped / sums.positive_terms == pytest.approx(positive.item())
    old = OldLogprobs(kind=OldLogprobsKind.SAMPLER)
    loss = make_loss(LossKind.GSPO, old_logprobs=old)
    text = clip_text(loss, "negative", negative.item(), has_advice=True)
    assert "75% of the terms with a negative advantage without a gradient: " in text
    assert "from_forward" in text
    # What is wrong with the log-probs is not to be hidden behind others.
    assert clip_text(loss, "negative", 0.75, has_advice=False).endswith("without a gradient")


_SAMPLER = OldLogprobs(kind=OldLogprobsKind.SAMPLER)


def _run(kind: LossKind, log_ratios: list[float], **given: Any) -> LossOutput:
    """One path of log-probs -1 and advantages -1; `log_ratios` to old and sampler's log-probs."""
    old = [-1.0 - each for each in log_ratios]
    fields = {"advantage_L": [-1.0] * len(old), "old_L": old, "sampler_L": old}
    return run_loss(make_loss(kind), [-1.0] * len(old), **(fields | given))


def test_log_ratio_is_clamped_at_20_and_exact_below() -> None:
    """-r A with A = -1: the gradient is r, and 0 past the clamp, where the value stays e^20."""
    log_ratios = [25.0, 20.0, 19.5, 0.3, -19.5, -25.0]
    output = _run(LossKind.IMPORTANCE_SAMPLING, log_ratios)
    expected = [0.0, *(math.exp(each) for each in log_ratios[1:5]), 0.0]
    assert output.grad_logprob_L.tolist() == pytest.approx(expected, rel=1e-12, abs=0)
    sums = summed(output)
    value = sum(math.exp(max(-20.0, min(20.0, each))) for each in log_ratios)
    assert sums.loss == pytest.approx(value, rel=1e-12)
    assert sums.clamped_ratios == 2


def test_sequence_ratio_is_clamped_as_one() -> None:
    """gspo: the mean of 60 and 0 is 30, whatever its tokens are; that of 30 and 0 is not held."""
    output = _run(LossKind.GSPO, [60.0, 0.0])
    assert output.grad_logprob_L.tolist() == [0.0, 0.0]
    assert summed(output).clamped_ratios == 2
    output = _run(LossKind.GSPO, [30.0, 0.0])
    assert output.grad_logprob_L.tolist() == pytest.approx([math.exp(15.0)] * 2)
    assert summed(output).clamped_ratios == 0


def test_loss_without_a_ratio_clamps_none() -> None:
    output = _run(LossKind.REINFORCE, [99.0, -99.0])
    assert output.grad_logprob_L.tolist() == [1.0, 1.0]
    assert summed(output).clamped_ratios == 0


@pytest.mark.parametrize(
    ("kind", "values", "gradients", "clamped"),
    [
        (KlKind.K1, [20.0, 19.0, -2.0, -20.0], [0.0, 1.0, 1.0, 0.0], 2),
        (KlKind.K2, [200.0, 180.5, 2.0, 200.0], [0.0, 19.0, -2.0, 0.0], 2),
        # A gap of -2 gives e^2 - 3 = 4.39; 19 and beyond, and -20, give 10, without a gradient.
        (
            KlKind.K3,
            [10.0, 10.0, math.exp(2) - 3, 10.0],
            [0.0, 0.0, 1 - math.exp(2), 0.0],
            3,
        ),
    ],
)
def test_kl_gap_is_clamped_at_20_and_k3_at_10(
    kind: KlKind, values: list[float], gradients: list[float], clamped: int
) -> None:
    config = KlConfig(kind=kind, coefficient=1.0, reference=ReferenceKind.GIVEN)
    gaps = [25.0, 19.0, -2.0, -99.0]
    output = run_loss(
        make_loss(LossKind.REINFORCE, kl=config),
        [-1.0] * 4,
        advantage_L=[0.0] * 4,
        reference_L=[-1.0 - gap for gap in gaps],
    )
    assert output.grad_logprob_L.tolist() == pytest.approx(gradients, rel=1e-12, abs=0)
    assert summed(output).kl == pytest.approx(sum(values), rel=1e-12)
    assert summed(output).clamped_kls == clamped


def test_sampler_mismatch_is_clamped_in_its_mean_and_not_in_its_maximum() -> None:
    output = _run(LossKind.REINFORCE, [99.0, 0.1])
    sums = summed(output)
    assert sums.sampler_kl == pytest.approx(10.0 + math.exp(0.1) - 1.1)
    assert sums.sampler_gap_max == pytest.approx(99.0)
    assert sums.clamped_sampler_gaps == 1


def _far(seed: int, column: str, value: float) -> RolloutBatch:
    """A batch near no policy, with one rollout whose recorded log-probs are all `value`."""
    batch = make_batch(seed)
    column_J = getattr(batch, column).copy()
    column_J[: batch.response_offsets[1]] = value
    assert batch.advantages is not None
    return replace(batch, **{column: column_J}, advantages=-np.abs(batch.advantages))


@pytest.mark.parametrize(
    ("kind", "column", "value", "changes"),
    [
        (LossKind.IMPORTANCE_SAMPLING, "sampler_logprobs", -99.0, {"old_logprobs": _SAMPLER}),
        (LossKind.GRPO, "sampler_logprobs", -99.0, {"old_logprobs": _SAMPLER}),
        (LossKind.REINFORCE, "sampler_logprobs", -99.0, {}),
        (
            LossKind.GRPO,
            "reference_logprobs",
            99.0,
            {"kl": KlConfig(kind=KlKind.K3, coefficient=0.1, reference=ReferenceKind.GIVEN)},
        ),
    ],
)
def test_bad_rollout_is_told_and_ends_no_policy(
    base: FolderBase, kind: LossKind, column: str, value: float, changes: dict[str, Any]
) -> None:
    """Five updates in a row with a gap of 99: each was skipped for a loss or a KL that is no
    number, and the policy failed."""
    trainer = make_trainer(base, dtype=ModelDtype.FLOAT32)
    guard = NumericsGuard(max_sampler_kl_to_step=1e4, max_reference_kl_to_step=1e4)
    trainer.spec = replace(trainer.spec, guard=guard)
    for seed in range(5):
        batch = _far(seed, column, value)
        loss = resolved_loss(batch, kind, **changes)
        # The clip of grpo holds every term of one of these batches, which are near no policy.
        step = make_step(trainer, loss, learning_rate=1e-4, step_on_zero_gradient=True)
        report = trainer.update(trainer.prepare(batch, loss), step)
        assert (report.skipped, report.skip_reason) == (False, None)
        assert report.loss is not None
        assert math.isfinite(report.loss)
        assert report.sampler_kl is not None
        assert report.sampler_kl <= 10.0
        told = {
            "sampler_logprobs": report.clamped_sampler_gaps,
            "reference_logprobs": report.clamped_kls,
        }
        assert told[column] > 0
        assert any("clamped" in warning.kind for warning in report.warnings)
    assert trainer.version == 5


def test_gradient_of_the_others_is_that_without_the_bad_rollout(base: FolderBase) -> None:
    """What is clamped adds exactly nothing, in float64 to the last bit of a sum with zeros."""
    grads: list[dict[str, Tensor]] = []
    for value in (-99.0, -1e4):
        trainer = make_trainer(base)
        batch = _far(0, "sampler_logprobs", value)
        loss = resolved_loss(batch, LossKind.IMPORTANCE_SAMPLING, old_logprobs=_SAMPLER)
        trainer.forward_backward(trainer.prepare(batch, loss))
        named = trainer.model.named_trainable().items()
        grads.append({name: p.grad.clone() for name, p in named if p.grad is not None})
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name])
        assert grad.isfinite().all()
