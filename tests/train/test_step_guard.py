"""Steps that are not taken: numbers that are not finite, and those above a limit of the guard."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from ratoon.model.spec import FolderBase, ModelDtype
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.validate import validate_groups
from ratoon.train.config import (
    LossKind,
    NumericsGuard,
    OldLogprobs,
    OldLogprobsKind,
    OptimizerStates,
)
from ratoon.train.gradient_window import WindowState
from ratoon.train.loss.sums import LossSums
from ratoon.train.optim.step_guard import WARNINGS, reason_in_sums
from ratoon.train.report.step_report import SkipReason, StepReport
from ratoon.train.trainer import Trainer
from tests import builders
from tests.train.trainer_runs import (
    FROZEN,
    forward_backward,
    make_batch,
    make_loss,
    make_step,
    make_trainer,
    state_of,
)

_SAMPLER = OldLogprobs(kind=OldLogprobsKind.SAMPLER)
_NO_GUARD = NumericsGuard()


def _guarded(base: FolderBase, guard: NumericsGuard) -> Trainer:
    """After one step without a guard: the KL to the first weights is not zero."""
    trainer = make_trainer(base, dtype=ModelDtype.FLOAT32)
    assert not _run(trainer, range(3, 4)).skipped
    trainer.spec = replace(trainer.spec, guard=guard)
    return trainer


def _run(trainer: Trainer, seeds: range) -> StepReport:
    """One window of batches, against sampler log-probs that are random numbers."""
    losses = [make_loss(make_batch(seed), old_logprobs=_SAMPLER, kl=FROZEN) for seed in seeds]
    for seed, loss in zip(seeds, losses, strict=True):
        forward_backward(trainer, make_batch(seed), loss)
    return trainer.optim_step(make_step(trainer, losses[0]))


def _assert_skipped(trainer: Trainer, report: StepReport, reason: SkipReason, digest: str) -> None:
    assert (report.skipped, report.skip_reason) == (True, reason)
    assert f"{WARNINGS[reason]}: the step was skipped" in report.warnings
    assert trainer.state_digest() == digest
    assert trainer.window_state is WindowState.EMPTY


def _far_advantages() -> RolloutBatch:
    """Advantages whose product with a log-prob is no float32, while they are."""
    rollout = builders.rollout([3, 4], advantages=np.array([2e38, -1.0], np.float32))
    return validate_groups([builders.group([1], [rollout])], builders.limits(vocab_size=64))


def test_loss_that_is_not_finite_skips_a_step_without_asking_the_optimizer(
    base: FolderBase,
) -> None:
    trainer = make_trainer(base, dtype=ModelDtype.FLOAT32)
    digest = trainer.state_digest()
    batch = _far_advantages()
    loss = make_loss(batch, LossKind.REINFORCE)
    forward_backward(trainer, batch, loss)
    report = trainer.optim_step(make_step(trainer, loss))
    _assert_skipped(trainer, report, SkipReason.NON_FINITE_LOSS, digest)
    assert report.loss is not None
    assert not math.isfinite(report.loss)
    assert report.grad_norm is None
    assert not _run(trainer, range(1)).skipped
    assert trainer.version == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_gradient_that_is_not_finite_skips_a_step_of_a_finite_loss(
    base: FolderBase, value: float
) -> None:
    trainer = make_trainer(base, dtype=ModelDtype.FLOAT32)
    _run(trainer, range(1))
    digest = trainer.state_digest()
    loss = make_loss(make_batch(1))
    forward_backward(trainer, make_batch(1), loss)
    gradient = next(iter(trainer.model.named_trainable().values())).grad
    assert gradient is not None
    gradient.view(-1)[0] = value
    report = trainer.optim_step(make_step(trainer, loss))
    _assert_skipped(trainer, report, SkipReason.NON_FINITE_GRADIENT, digest)
    assert report.loss is not None
    assert math.isfinite(report.loss)
    assert report.grad_norm is not None
    assert not math.isfinite(report.grad_norm)


@pytest.mark.parametrize(
    ("field", "quantity", "reason"),
    [
        ("max_grad_norm_to_step", "grad_norm", SkipReason.GRADIENT_NORM),
        ("max_reference_kl_to_step", "kl", SkipReason.REFERENCE_KL),
        ("max_sampler_kl_to_step", "sampler_kl", SkipReason.SAMPLER_KL),
    ],
)
def test_breaker_skips_above_its_limit_and_not_at_it(
    base: FolderBase, field: str, quantity: str, reason: SkipReason
) -> None:
    """The limit is compared with what the report says of the whole window."""
    free = _run(_guarded(base, NumericsGuard()), range(2))
    assert (free.skipped, free.skip_reason) == (False, None)
    value = getattr(free, quantity)
    assert value > 0
    at = _guarded(base, NumericsGuard(**{field: value}))
    assert not _run(at, range(2)).skipped
    below = _guarded(base, NumericsGuard(**{field: value * (1 - 1e-6)}))
    digest = below.state_digest()
    report = _run(below, range(2))
    _assert_skipped(below, report, reason, digest)
    assert below.version == 1
    assert getattr(report, quantity) == value


def test_update_is_guarded_too(base: FolderBase) -> None:
    trainer = _guarded(base, NumericsGuard(max_grad_norm_to_step=1e-9))
    batch = make_batch(0)
    loss = make_loss(batch)
    digest = trainer.state_digest()
    step = make_step(trainer, loss, max_grad_norm=1e-12)
    report = trainer.update(batch, loss, step, trainer.prepare(batch, loss).plan)
    _assert_skipped(trainer, report, SkipReason.GRADIENT_NORM, digest)
    assert report.grad_norm is not None
    assert report.grad_norm > 1e-9


@pytest.mark.parametrize("kind", list(OptimizerStates))
def test_optimizer_touches_nothing_above_the_limit(base: FolderBase, kind: OptimizerStates) -> None:
    spec = replace(make_trainer(base, dtype=ModelDtype.BFLOAT16).spec, optimizer_states=kind)
    norm = _run(Trainer.create(spec), range(1)).grad_norm
    assert norm is not None
    trainer = Trainer.create(spec)
    before = state_of(trainer)
    for limit, is_skipped in ((norm * 0.999, True), (norm * 1.001, False)):
        trainer.spec = replace(spec, guard=NumericsGuard(max_grad_norm_to_step=limit))
        report = _run(trainer, range(1))
        assert report.skipped == is_skipped
        assert report.grad_norm == norm
        is_equal = [
            torch.equal(now, before.tensors()[field][name])
            for field, tensors in state_of(trainer).tensors().items()
            for name, now in tensors.items()
        ]
        assert all(is_equal) == is_skipped
    assert state_of(trainer).num_steps == 1


def test_reasons_come_in_one_order() -> None:
    guard = NumericsGuard(max_reference_kl_to_step=1.0, max_sampler_kl_to_step=1.0)
    sums = LossSums(loss=math.nan, kl=3.0, weight=2.0, sampler_kl=3.0, sampler_terms=2.0)
    assert reason_in_sums(sums, 0.0, guard) is SkipReason.NO_TOKENS
    assert reason_in_sums(sums, 1.0, guard) is SkipReason.NON_FINITE_LOSS
    sums = replace(sums, loss=0.0)
    assert reason_in_sums(sums, 1.0, guard) is SkipReason.REFERENCE_KL
    sums = replace(sums, kl=2.0)
    assert reason_in_sums(sums, 1.0, guard) is SkipReason.SAMPLER_KL
    assert reason_in_sums(sums, 1.0, _NO_GUARD) is None
    sums = replace(sums, sampler_kl=2.0)
    assert reason_in_sums(sums, 1.0, guard) is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_kl_that_is_no_number_is_above_every_limit(value: float) -> None:
    sums = LossSums(weight=2.0, sampler_kl=value, sampler_terms=2.0)
    guard = NumericsGuard(max_sampler_kl_to_step=1e300)
    assert reason_in_sums(sums, 1.0, guard) is SkipReason.SAMPLER_KL
    assert reason_in_sums(sums, 1.0, _NO_GUARD) is None


def test_quantity_that_a_step_does_not_have_is_not_looked_at() -> None:
    guard = NumericsGuard(max_reference_kl_to_step=1e-9, max_sampler_kl_to_step=1e-9)
    assert reason_in_sums(LossSums(weight=3.0, loss=1.0), 1.0, guard) is None
