"""The trainer's numbers: cuts, from_forward, the frozen reference, bits, bfloat16."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.spec import FolderBase, ModelDtype
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.packed import UpdatePlan
from ratoon.rollout.plan import plan_from_dict, plan_to_dict
from ratoon.rollout.validate import validate_groups
from ratoon.train.gradient_window import WindowState
from ratoon.train.trainer import Trainer
from ratoon_proto.types import (
    AdvantageKind,
    CorrectionLevel,
    CorrectionMode,
    DivideBy,
    FullTuning,
    LoraTuning,
    LossKind,
    OldLogprobs,
    OldLogprobsKind,
    ReferenceKind,
    RolloutCorrection,
    SharedTokens,
    TokenWeight,
)
from tests import builders
from tests.train.trainer_runs import (
    FROM_FORWARD,
    FROZEN,
    ON_POLICY,
    assert_close,
    assert_equal,
    forward_backward,
    gradients_of,
    make_batch,
    make_loss,
    make_step,
    make_trainer,
    weights_of,
)


@pytest.mark.parametrize("shared", list(SharedTokens))
@pytest.mark.parametrize("kind", [LossKind.GRPO, LossKind.DAPO, LossKind.GSPO])
def test_cuts_do_not_change_the_sums(
    base: FolderBase, kind: LossKind, shared: SharedTokens
) -> None:
    """Trap 8: nothing is normalised per micro-batch; one cut and seventeen give the same step."""
    batch = make_batch(0, num_groups=5)
    results = []
    for tokens in (100_000, 40, 1):
        trainer = make_trainer(base, tokens=tokens)
        loss = make_loss(
            batch,
            kind,
            old_logprobs=OldLogprobs(kind=OldLogprobsKind.SAMPLER),
            kl=FROZEN,
            entropy_coefficient=0.05,
            shared_tokens=shared,
        )
        report = forward_backward(trainer, batch, loss)
        gradients = gradients_of(trainer)
        step = trainer.optim_step(make_step(trainer, loss, max_grad_norm=0.5))
        results.append((report, gradients, step, weights_of(trainer)))
    counts = [report.num_micro_batches for report, *_ in results]
    assert counts[0] == 1 < counts[1] < counts[2]
    first_report, first_gradients, first_step, first_weights = results[0]
    for report, gradients, step, weights in results[1:]:
        assert_close(gradients, first_gradients)
        assert_close(weights, first_weights)
        assert step.grad_norm == pytest.approx(first_step.grad_norm, rel=1e-10)
        for name in ("loss", "policy_gradient_loss", "kl", "entropy", "ratio_max"):
            expected = getattr(first_report, name)
            assert getattr(report, name) == pytest.approx(expected, rel=1e-10, abs=1e-12), name


def test_each_step_has_its_own_learning_rate(base: FolderBase) -> None:
    """AdamW's first step moves a weight by lr (its moments cancel), so that lr is visible."""
    moves = []
    for rate in (1e-3, 2e-3, 0.0):
        trainer, batch = make_trainer(base), make_batch(8)
        loss = make_loss(batch)
        before = weights_of(trainer)
        step = make_step(trainer, loss, learning_rate=rate, weight_decay=0.0)
        trainer.update(batch, loss, step, trainer.prepare(batch, loss).plan)
        after = weights_of(trainer)
        moves.append(max(float((after[n] - before[n]).abs().max()) for n in before))
    assert moves[0] == pytest.approx(1e-3, rel=1e-3)
    assert moves[1] == pytest.approx(2 * moves[0], rel=1e-6)
    assert moves[2] == 0.0


@pytest.mark.parametrize("dtype", [ModelDtype.FLOAT32, ModelDtype.BFLOAT16])
@pytest.mark.parametrize("kind", [LossKind.GRPO, LossKind.GSPO])
def test_first_ratio_is_exactly_one_from_forward(
    base: FolderBase, dtype: ModelDtype, kind: LossKind
) -> None:
    """Traps 2 and 4: old and new log-probs take one path through one plan, and stay float32."""
    trainer, batch = make_trainer(base, dtype=dtype, tokens=48), make_batch(9, num_groups=6)
    plan = trainer.plan_forward(batch)
    assert len(plan.micro_batches) > 1
    old = trainer.forward(batch, plan, with_entropy=True, use_reference=False)
    assert old.logprobs.dtype == np.float32
    assert (old.logprobs[~batch.loss_mask] == 0).all()
    assert (old.logprobs[batch.loss_mask] < 0).all()
    loss = make_loss(batch, kind, old_logprobs=FROM_FORWARD)
    recorded = plan_from_dict(plan_to_dict(plan))
    assert recorded == trainer.prepare(batch, loss).plan
    report = trainer.forward_backward(batch, loss, recorded, old_logprobs_J=old.logprobs)
    assert report.ratio_max == 1.0
    assert report.clip_fraction_low == report.clip_fraction_high == 0.0
    by_ratio = _ratio_spread(trainer, batch, old.logprobs)
    assert by_ratio == 0.0
    # The same on the same weights without old log-probs: bit for bit the same gradient.
    if dtype is ModelDtype.FLOAT32:
        gradients = gradients_of(trainer)
        trainer.discard_gradients()
        trainer.forward_backward(batch, make_loss(batch, kind), recorded)
        assert_equal(gradients_of(trainer), gradients)


@pytest.mark.parametrize("level", CorrectionLevel)
def test_an_update_on_policy_is_one_from_a_forward(
    base: FolderBase, level: CorrectionLevel
) -> None:
    """Bit for bit, corrections of the sampler's log-probs too: it only runs no Forward."""
    correction = RolloutCorrection(mode=CorrectionMode.TRUNCATE, level=level, low=0.0, high=1.01)
    batch, digests = make_batch(9, num_groups=6), list[str]()
    for old in (FROM_FORWARD, ON_POLICY):
        trainer = make_trainer(base, dtype=ModelDtype.BFLOAT16, tokens=48)
        loss = make_loss(batch, old_logprobs=old, correction=correction)
        plan, arrays = trainer.prepare(batch, loss).plan, None
        if old is FROM_FORWARD:
            arrays = trainer.forward(batch, plan, with_entropy=False, use_reference=False).logprobs
        step = make_step(trainer, loss)
        report = trainer.update(batch, loss, step, plan, old_logprobs_J=arrays)
        assert report.ratio_min == report.ratio_max == 1.0
        assert report.correction_weight_mean != 1.0
        digests.append(trainer.state_digest())
    assert digests[0] == digests[1]


def _ratio_spread(trainer: Trainer, batch: RolloutBatch, old_J: NDArray[np.floating]) -> float:
    """max |log r| of a second Forward against the first."""
    again = trainer.forward(
        batch, trainer.plan_forward(batch), with_entropy=False, use_reference=False
    )
    assert again.entropy is None
    return float(np.abs(again.logprobs - old_J).max())


def test_ratio_is_near_one_under_another_plan(base: FolderBase) -> None:
    """Trap 4 where the cut differs: fp32 |r - 1| <= 1e-5."""
    batch = make_batch(9, num_groups=6)
    coarse, fine = (make_trainer(base, dtype=ModelDtype.FLOAT32, tokens=t) for t in (10_000, 8))
    one, two = (
        t.forward(batch, t.plan_forward(batch), with_entropy=False, use_reference=False).logprobs
        for t in (coarse, fine)
    )
    assert np.abs(np.expm1(one.astype(np.float64) - two)).max() <= 1e-5


def test_forward_of_other_rollouts_is_refused(base: FolderBase) -> None:
    trainer, batch = make_trainer(base), make_batch(9)
    loss = make_loss(batch, old_logprobs=FROM_FORWARD)
    with pytest.raises(RatoonError) as caught:
        forward_backward(
            trainer, batch, loss, old_logprobs_J=np.zeros(len(batch.loss_mask) + 1, np.float32)
        )
    assert caught.value.field == "loss.old_logprobs.forward_operation_id"
    assert trainer.window_state is WindowState.EMPTY


@pytest.mark.parametrize("tuning", [FullTuning(), LoraTuning(rank=2, alpha=8.0)])
def test_frozen_reference_stays_what_the_policy_was(
    base: FolderBase, tuning: FullTuning | LoraTuning
) -> None:
    """KL is 0 at version 0, positive after a step, and equal to that of given log-probs."""
    trainer, batch = make_trainer(base, tuning=tuning), make_batch(10)
    loss = make_loss(batch, kl=FROZEN)
    plan = trainer.prepare(batch, loss).plan
    start = trainer.forward(batch, plan, with_entropy=False, use_reference=True).logprobs
    first = trainer.update(batch, loss, make_step(trainer, loss, learning_rate=5e-2), plan)
    assert first.kl == pytest.approx(0.0, abs=1e-14)
    again = trainer.forward(batch, plan, with_entropy=False, use_reference=True).logprobs
    np.testing.assert_array_equal(again, start)
    frozen = trainer.forward_backward(batch, loss, plan)
    assert frozen.kl is not None
    assert frozen.kl > 1e-6
    gradients = gradients_of(trainer)
    trainer.discard_gradients()
    # The batch carries float32: given and computed reference agree to its rounding.
    given_batch = replace(batch, reference_logprobs=start.astype(np.float32))
    given = make_loss(given_batch, kl=replace(FROZEN, reference=ReferenceKind.GIVEN))
    report = trainer.forward_backward(given_batch, given, plan)
    assert report.kl == pytest.approx(frozen.kl, rel=1e-4)
    for name, gradient in gradients_of(trainer).items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-5)


def test_forward_needs_a_reference_to_use_one(base: FolderBase) -> None:
    spec = replace(make_trainer(base).spec, keep_reference=False)
    trainer, batch = Trainer.create(spec), make_batch(10)
    with pytest.raises(RatoonError) as caught:
        trainer.forward(batch, trainer.plan_forward(batch), with_entropy=False, use_reference=True)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT


def test_repeated_updates_give_the_same_bits(base: FolderBase) -> None:
    batch = make_batch(11)
    runs = []
    for _ in range(2):
        trainer = make_trainer(base, dtype=ModelDtype.FLOAT32, tokens=30)
        for _ in range(2):
            loss = make_loss(batch, kl=FROZEN, entropy_coefficient=0.01)
            step = make_step(trainer, loss)
            trainer.update(batch, loss, step, trainer.prepare(batch, loss).plan)
        runs.append(weights_of(trainer))
    assert_equal(runs[0], runs[1])


@pytest.mark.parametrize("kind", list(LossKind))
def test_every_loss_trains_in_bfloat16(base: FolderBase, kind: LossKind) -> None:
    """Its gradient sums are near those of the same weights in float64, and a step is applied."""
    batch = make_batch(14, outcome="none" if kind is LossKind.CROSS_ENTROPY else "advantages")
    low_precision, wide = make_trainer(base, dtype=ModelDtype.BFLOAT16), make_trainer(base)
    with torch.no_grad():
        for name, parameter in wide.model.named_trainable().items():
            parameter.copy_(low_precision.model.named_trainable()[name])
    loss = make_loss(batch, kind, token_weight=TokenWeight.PER_TOKEN)
    constant = 3.0 if kind is LossKind.DR_GRPO else None
    by = DivideBy.TOKENS if constant is None else DivideBy.CONSTANT
    step = make_step(low_precision, loss, divide_by=by, divide_constant=constant)
    reports = [
        trainer.update(batch, loss, step, trainer.prepare(batch, loss).plan)
        for trainer in (low_precision, wide)
    ]
    assert low_precision.version == 1
    assert reports[0].grad_norm == pytest.approx(reports[1].grad_norm, rel=0.1)
    assert reports[0].loss == pytest.approx(reports[1].loss, rel=0.1, abs=0.02)


def test_fingerprint_names_what_the_bits_depend_on(base: FolderBase) -> None:
    fingerprint = make_trainer(base).fingerprint()
    assert fingerprint["device"] == "cpu"
    assert fingerprint["threads"] == "1"
    assert fingerprint["torch"] == torch.__version__
    assert fingerprint["attention_backend"] == "reference"
    assert fingerprint["host_activation_bytes"] == "0"
    assert all(fingerprint.values())


def test_rewards_of_a_group_train_towards_the_better_rollout(base: FolderBase) -> None:
    """A few updates raise the log-prob of the rewarded response and lower the other's."""
    trainer = make_trainer(base, dtype=ModelDtype.FLOAT32)
    rollouts = [builders.rollout([10, 11], reward=1.0), builders.rollout([20, 21], reward=0.0)]
    batch = validate_groups([builders.group([1, 2], rollouts)], builders.limits(vocab_size=64))
    loss = make_loss(batch, advantage=AdvantageKind.LEAVE_ONE_OUT)
    plan: UpdatePlan = trainer.prepare(batch, loss).plan

    def logprobs() -> NDArray[np.floating]:
        return trainer.forward(batch, plan, with_entropy=False, use_reference=False).logprobs

    before = logprobs()
    for _ in range(5):
        trainer.update(batch, loss, make_step(trainer, loss), plan)
    after = logprobs()
    assert after[:2].sum() > before[:2].sum() + 0.1
    assert after[2:].sum() < before[2:].sum() - 0.1


def test_spec_of_a_trainer_decides_its_first_bits(base: FolderBase) -> None:
    one, two = make_trainer(base), make_trainer(base)
    assert_equal(weights_of(one), weights_of(two))
    assert one.version == two.version == 0
    assert one.info().num_trainable_parameters == sum(t.numel() for t in weights_of(one).values())
    lora = make_trainer(base, tuning=LoraTuning(rank=2, alpha=4.0))
    assert lora.info().num_trainable_parameters == sum(t.numel() for t in weights_of(lora).values())
    assert lora.info().num_trainable_parameters < one.info().num_trainable_parameters


@pytest.mark.parametrize("token_weight", list(TokenWeight))
def test_once_is_the_sum_with_shared_tokens_masked_in_later_paths(
    base: FolderBase, token_weight: TokenWeight
) -> None:
    """The second rollout's first two tokens are the first one's too: as if they were context."""
    advantages = np.array([0.5, -1.0, 2.0], np.float32)

    def batch_of(second_mask: list[bool]) -> RolloutBatch:
        rollouts = [
            builders.rollout([3, 4, 5], advantages=advantages),
            builders.rollout(
                [3, 4, 9], advantages=-3.0 * advantages, loss_mask=np.array(second_mask)
            ),
        ]
        return validate_groups([builders.group([1], rollouts)], builders.limits(vocab_size=64))

    shared, masked = batch_of([True, True, True]), batch_of([False, False, True])
    results = []
    for batch, counts in ((shared, SharedTokens.ONCE), (masked, SharedTokens.SUM)):
        trainer = make_trainer(base)
        loss = make_loss(
            batch,
            LossKind.PPO_CLIP,
            token_weight=token_weight,
            shared_tokens=counts,
            entropy_coefficient=0.1,
        )
        report = forward_backward(trainer, batch, loss)
        assert (report.trained_tokens, report.num_sequences) == (4, 2)
        results.append((gradients_of(trainer), report.loss))
    assert_close(results[0][0], results[1][0])
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-10)
    trainer = make_trainer(base)
    loss = make_loss(shared, LossKind.PPO_CLIP, token_weight=token_weight)
    assert forward_backward(trainer, shared, loss).trained_tokens == 6
