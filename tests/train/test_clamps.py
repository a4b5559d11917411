"""Log-ratios and KL gaps that no policy means: clamped, without a gradient, counted and told."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ratoon.model.spec import FolderBase, ModelDtype
from ratoon.rollout.batch import RolloutBatch
from ratoon.train.loss.compute import LossOutput
from ratoon_proto.types import (
    KlConfig,
    KlKind,
    LossKind,
    NumericsGuard,
    OldLogprobs,
    OldLogprobsKind,
    ReferenceKind,
)
from tests.train.loss_cases import make_loss, run_loss, summed
from tests.train.trainer_runs import make_batch, make_step, make_trainer
from tests.train.trainer_runs import make_loss as resolved_loss

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
        assert any("clamped" in warning for warning in report.warnings)
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
