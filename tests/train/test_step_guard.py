"""Steps that are not taken: numbers that are not finite, and those above a limit of the guard."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ratoon.model.export import export_weights
from ratoon.model.spec import FolderBase, ModelDtype
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.validate import validate_groups
from ratoon.train.gradient_window import WindowState
from ratoon.train.loss.sums import LossSums
from ratoon.train.optimizer_step import WARNINGS, reason_in_sums
from ratoon.train.ranks.rank import Rank
from ratoon.train.spec import OptimizerStates
from ratoon.train.trainer import Trainer
from ratoon_proto.types import (
    FullTuning,
    LoraTuning,
    LossKind,
    NumericsGuard,
    OldLogprobs,
    OldLogprobsKind,
    SkipReason,
    StepReport,
)
from tests import builders
from tests.train.trainer_runs import (
    FROZEN,
    assert_equal,
    forward_backward,
    make_batch,
    make_loss,
    make_step,
    make_trainer,
    state_of,
    weights_of,
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
    told = [(each.kind, str(each)) for each in report.warnings]
    assert ("step_skipped", f"{WARNINGS[reason]}: the step was skipped") in told
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
    report = trainer.update(trainer.prepare(batch, loss), step)
    _assert_skipped(trainer, report, SkipReason.GRADIENT_NORM, digest)
    assert report.grad_norm is not None
    assert report.grad_norm > 1e-9


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


# All of them are within what a caller may ask for: moments over epsilon alone.
_FAR_STEP: dict[str, Any] = {
    "learning_rate": 1e4,
    "weight_decay": 0.0,
    "beta2": 0.0,
    "eps": 1e-30,
    "step_on_zero_gradient": True,
}


def _step_of(trainer: Trainer, advantage: float, **step: Any) -> StepReport:
    """An update whose advantages are `advantage` times those of a batch."""
    batch = make_batch(1)
    assert batch.advantages is not None
    batch = replace(batch, advantages=(batch.advantages * advantage).astype(np.float32))
    loss = make_loss(batch)
    asked = make_step(trainer, loss, max_grad_norm=0.0, **step)
    return trainer.update(trainer.prepare(batch, loss), asked)


@pytest.mark.parametrize(
    ("dtype", "kind", "tuning"),
    [
        (ModelDtype.BFLOAT16, OptimizerStates.BF16_SPLIT_8BIT, FullTuning()),
        (ModelDtype.BFLOAT16, OptimizerStates.FP32, LoraTuning(rank=2, alpha=4.0)),
        (ModelDtype.FLOAT32, OptimizerStates.FP32, FullTuning()),
    ],
)
def test_step_that_would_not_be_finite_changes_nothing(
    base: FolderBase, dtype: ModelDtype, kind: OptimizerStates, tuning: FullTuning | LoraTuning
) -> None:
    """It was done, not skipped, and its infinite weights were the newest version."""
    spec = make_trainer(base, dtype=dtype, tuning=tuning).spec
    trainer = Trainer.create(replace(spec, optimizer_states=kind))
    assert not _step_of(trainer, 1e9, learning_rate=0.0).skipped
    digest, before = trainer.state_digest(), state_of(trainer)
    report = _step_of(trainer, 0.0, **_FAR_STEP)
    _assert_skipped(trainer, report, SkipReason.NON_FINITE_STEP, digest)
    assert (trainer.version, report.grad_norm) == (1, 0.0)
    now = state_of(trainer)
    assert now.num_steps == before.num_steps == 1
    for field, tensors in now.tensors().items():
        assert_equal(tensors, before.tensors()[field])
    assert not _step_of(trainer, 1.0, learning_rate=1e-3).skipped
    assert trainer.version == 2


def test_normal_step_asks_no_rank_whether_it_is_finite(
    base: FolderBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(base, dtype=ModelDtype.BFLOAT16)
    monkeypatch.delattr(Rank, "stays_finite")
    for seed in range(3):
        assert not _run(trainer, range(seed, seed + 1)).skipped


@pytest.mark.parametrize("change", ["import", "checkpoint"])
def test_step_after_weights_came_from_elsewhere_is_judged_by_those(
    base: FolderBase, tmp_path: Path, change: str
) -> None:
    """Their first moments came with them: by what was known before, the step would be finite."""
    far, trainer = (make_trainer(base, dtype=ModelDtype.FLOAT32) for _ in range(2))
    assert not _step_of(far, 1e9, learning_rate=0.0).skipped
    far.snapshot().write(tmp_path / "far")
    assert not _step_of(trainer, 1.0, learning_rate=1e-3).skipped
    if change == "checkpoint":
        trainer.load_checkpoint(tmp_path / "far")
    else:
        (tmp_path / "weights").mkdir()
        export_weights(far.model, tmp_path / "weights")
        trainer = far
        weights = trainer.read_weights(tmp_path / "weights", "")
        trainer.import_weights(weights, adds=True, resets_optimizer=False)
    digest, version = trainer.state_digest(), trainer.version
    report = _step_of(trainer, 0.0, **_FAR_STEP)
    _assert_skipped(trainer, report, SkipReason.NON_FINITE_STEP, digest)
    assert trainer.version == version


@pytest.mark.parametrize("kind", [LossKind.GRPO, LossKind.IMPORTANCE_SAMPLING, LossKind.REINFORCE])
def test_window_without_a_gradient_is_stepped_on_only_where_asked(
    base: FolderBase, kind: LossKind
) -> None:
    """A batch of zero advantages moved weights by moments and decay, and nothing said so."""
    trainer = make_trainer(base, dtype=ModelDtype.FLOAT32)
    assert not _run(trainer, range(1)).skipped
    batch = make_batch(1)
    assert batch.advantages is not None
    batch = replace(batch, advantages=np.zeros_like(batch.advantages))
    loss = make_loss(batch, kind)
    digest, before = trainer.state_digest(), weights_of(trainer)
    report = trainer.update(trainer.prepare(batch, loss), make_step(trainer, loss))
    _assert_skipped(trainer, report, SkipReason.ZERO_GRADIENT, digest)
    assert (report.grad_norm, trainer.version) == (0.0, 1)
    step = make_step(trainer, loss, step_on_zero_gradient=True)
    report = trainer.update(trainer.prepare(batch, loss), step)
    assert (report.skipped, report.grad_norm, trainer.version) == (False, 0.0, 2)
    assert not any(each.kind == "step_skipped" for each in report.warnings)
    assert any(not torch.equal(now, before[name]) for name, now in weights_of(trainer).items())


@pytest.mark.parametrize("term", [{"kl": FROZEN}, {"entropy_coefficient": 0.02}])
def test_gradient_of_another_term_is_a_gradient(base: FolderBase, term: dict[str, Any]) -> None:
    trainer = make_trainer(base, dtype=ModelDtype.FLOAT32)
    assert not _run(trainer, range(1)).skipped
    batch = make_batch(1)
    assert batch.advantages is not None
    batch = replace(batch, advantages=np.zeros_like(batch.advantages))
    loss = make_loss(batch, **term)
    forward_backward(trainer, batch, loss)
    report = trainer.optim_step(make_step(trainer, loss))
    assert not report.skipped
    assert report.grad_norm is not None
    assert report.grad_norm > 0


def test_gradient_that_a_clip_holds_is_none(base: FolderBase) -> None:
    """All tokens count and were run, and all are beyond a bound that keeps no gradient."""
    trainer = make_trainer(base, dtype=ModelDtype.FLOAT32)
    batch = make_batch(1)
    assert batch.advantages is not None
    old = np.full_like(batch.advantages, -15.0)
    batch = replace(batch, advantages=np.ones_like(old), old_logprobs=old)
    given = OldLogprobs(kind=OldLogprobsKind.GIVEN)
    loss = make_loss(batch, LossKind.IPO, old_logprobs=given, clip_high=1e-9)
    digest = trainer.state_digest()
    assert forward_backward(trainer, batch, loss).clip_fraction_high == 1.0
    report = trainer.optim_step(make_step(trainer, loss))
    _assert_skipped(trainer, report, SkipReason.ZERO_GRADIENT, digest)
