"""The trainer: windows, calls, cancels, skips and the report."""

from __future__ import annotations

import time
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.spec import FolderBase, ModelDtype
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.packed import Stage, UpdatePlan
from ratoon.rollout.validate import validate_groups
from ratoon.train.clock import DeviceClock
from ratoon.train.gradient_window import WindowState
from ratoon.train.prepare import without_bad
from ratoon.train.spec import PassHooks
from ratoon_proto.types import (
    DivideBy,
    LogprobsOf,
    LossKind,
    OverlongFilter,
    SkipReason,
    StalenessAction,
    StalenessConfig,
    StepReport,
    TokenWeight,
)
from tests import builders
from tests.train.optimizer_runs import changed_bits
from tests.train.trainer_runs import (
    FROZEN,
    SHORT,
    assert_close,
    assert_equal,
    bad_groups,
    forward_backward,
    gradients_of,
    make_batch,
    make_loss,
    make_step,
    make_trainer,
    weights_of,
)


def _split(batch_groups: list[Any], at: int) -> tuple[RolloutBatch, RolloutBatch]:
    return (
        validate_groups(batch_groups[:at], builders.limits(vocab_size=64)),
        validate_groups(batch_groups[at:], builders.limits(vocab_size=64)),
    )


@pytest.mark.parametrize(
    ("token_weight", "divide_by"),
    [
        (TokenWeight.PER_TOKEN, DivideBy.TOKENS),
        (TokenWeight.PER_SEQUENCE, DivideBy.SEQUENCES),
        (TokenWeight.PER_SEQUENCE, DivideBy.GROUPS),
        (TokenWeight.PER_TOKEN, DivideBy.NONE),
    ],
)
def test_a_window_of_two_calls_is_the_call_of_both(
    base: FolderBase, token_weight: TokenWeight, divide_by: DivideBy
) -> None:
    """Trap 8 again, over calls: sums add up, and the step divides once by the window's counters."""
    groups = builders.random_groups(np.random.default_rng(1), num_groups=5)
    whole = validate_groups(groups, builders.limits(vocab_size=64))
    together, apart = make_trainer(base), make_trainer(base)
    loss = make_loss(whole, LossKind.PPO_CLIP, token_weight=token_weight)
    step = make_step(together, loss, divide_by=divide_by)
    expected = together.update(together.prepare(whole, loss), step)
    for part in _split(groups, 2):
        forward_backward(apart, part, make_loss(part, LossKind.PPO_CLIP, token_weight=token_weight))
    report = apart.optim_step(step)
    assert report.grad_norm == pytest.approx(expected.grad_norm, rel=1e-10)
    assert report.loss == pytest.approx(expected.loss, rel=1e-10)
    assert report.entropy == pytest.approx(expected.entropy, rel=1e-10)
    assert_close(weights_of(apart), weights_of(together))
    assert apart.version == together.version == 1


def test_token_weights_of_a_window_may_not_mix(base: FolderBase) -> None:
    trainer, batch = make_trainer(base), make_batch(3)
    forward_backward(trainer, batch, make_loss(batch, LossKind.PPO_CLIP))
    before = gradients_of(trainer)
    other = make_loss(batch, LossKind.GRPO)
    plan = trainer.prepare_forward(batch).plan
    for call in (
        lambda: trainer.prepare(batch, other),
        lambda: trainer.forward_backward(trainer.prepare(batch, other, plan)),
    ):
        with pytest.raises(RatoonError) as caught:
            call()
        assert caught.value.field == "loss.token_weight"
    assert_equal(gradients_of(trainer), before)
    assert trainer.window_state is WindowState.OPEN
    assert trainer.normalisation.token_weight is TokenWeight.PER_TOKEN


def test_losses_of_a_window_may_differ_in_their_divisor_only_if_the_step_says_one(
    base: FolderBase,
) -> None:
    trainer, batch = make_trainer(base), make_batch(3)
    forward_backward(trainer, batch, make_loss(batch, LossKind.PPO_CLIP))
    assert trainer.normalisation.default_divide_by is DivideBy.TOKENS
    forward_backward(trainer, batch, make_loss(batch, LossKind.REINFORCE))
    assert trainer.normalisation.default_divide_by is None


def test_empty_and_open_windows_are_told_apart(base: FolderBase) -> None:
    trainer, batch = make_trainer(base), make_batch(3)
    loss = make_loss(batch)
    step, plan = make_step(trainer, loss), trainer.prepare(batch, loss).plan
    for call in (lambda: trainer.optim_step(step), lambda: trainer.normalisation):
        with pytest.raises(RatoonError) as caught:
            call()
        assert caught.value.code is ErrorCode.WINDOW_EMPTY
    trainer.forward_backward(trainer.prepare(batch, loss, plan))
    before = gradients_of(trainer)
    with pytest.raises(RatoonError) as caught:
        trainer.update(trainer.prepare(batch, loss, plan), step)
    assert caught.value.code is ErrorCode.WINDOW_OPEN
    assert_equal(gradients_of(trainer), before)
    trainer.discard_gradients()
    assert trainer.window_state is WindowState.EMPTY
    assert not trainer.update(trainer.prepare(batch, loss, plan), step).skipped


def test_discarded_gradients_leave_no_trace(base: FolderBase) -> None:
    one, two, batch, other = make_trainer(base), make_trainer(base), make_batch(4), make_batch(5)
    loss = make_loss(batch)
    forward_backward(one, other, make_loss(other, entropy_coefficient=1.0))
    one.discard_gradients()
    for trainer in (one, two):
        trainer.update(trainer.prepare(batch, loss), make_step(trainer, loss))
    assert_equal(weights_of(one), weights_of(two))


def test_cancel_stops_between_micro_batches_and_tears_the_window(base: FolderBase) -> None:
    trainer, batch = make_trainer(base, tokens=20), make_batch(6)
    loss = make_loss(batch)
    seen: list[tuple[int, int, int]] = []

    with pytest.raises(RatoonError) as caught:
        forward_backward(
            trainer,
            batch,
            loss,
            hooks=PassHooks(
                on_progress=lambda *now: seen.append(now), is_cancelled=lambda: len(seen) >= 3
            ),
        )
    assert caught.value.code is ErrorCode.CANCELLED
    assert caught.value.details["micro_batches_done"] == "2"
    assert [done for done, _, _ in seen] == [0, 1, 2]
    assert trainer.window_state is WindowState.TORN
    for call in (
        lambda: trainer.optim_step(make_step(trainer, loss)),
        lambda: forward_backward(trainer, batch, loss),
    ):
        with pytest.raises(RatoonError) as torn:
            call()
        assert torn.value.code is ErrorCode.WINDOW_POISONED
    trainer.discard_gradients()
    forward_backward(trainer, batch, loss)
    clean = make_trainer(base, tokens=20)
    forward_backward(clean, batch, loss)
    assert_equal(gradients_of(trainer), gradients_of(clean))


@pytest.mark.parametrize("after", [0, 2, 10_000])
def test_cancelled_update_leaves_everything_as_it_was(base: FolderBase, after: int) -> None:
    """Also where the cancel comes after the last micro-batch: before the step there is time."""
    trainer, batch = make_trainer(base, tokens=20), make_batch(6)
    loss = make_loss(batch)
    plan = trainer.prepare(batch, loss).plan
    before = weights_of(trainer)
    seen: list[tuple[int, int, int]] = []
    limit = min(after, len(plan.micro_batches))
    with pytest.raises(RatoonError) as caught:
        trainer.update(
            trainer.prepare(batch, loss, plan),
            make_step(trainer, loss),
            PassHooks(
                on_progress=lambda *now: seen.append(now),
                is_cancelled=lambda: seen[-1][0] >= limit,
            ),
        )
    assert caught.value.code is ErrorCode.CANCELLED
    assert trainer.window_state is WindowState.EMPTY
    assert trainer.version == 0
    assert_equal(weights_of(trainer), before)


def test_progress_counts_unshared_tokens(base: FolderBase) -> None:
    trainer, batch = make_trainer(base, tokens=20), make_batch(6)
    loss = make_loss(batch)
    seen: list[tuple[int, int, int]] = []
    hooks = PassHooks(on_progress=lambda *now: seen.append(now))
    report = forward_backward(trainer, batch, loss, hooks=hooks)
    planned = report.num_micro_batches
    assert [done for done, _, _ in seen] == list(range(planned + 1))
    assert {total for _, total, _ in seen} == {planned}
    assert seen[-1][2] == report.unshared_tokens > report.packed_tokens > 0


def _flat_batch() -> RolloutBatch:
    rollouts = [builders.rollout([3, n], reward=1.0, truncated=True) for n in range(3)]
    return validate_groups([builders.group([1], rollouts)], builders.limits(vocab_size=64))


@pytest.mark.parametrize("kind", [LossKind.DAPO, LossKind.DR_GRPO])
def test_an_update_of_which_nothing_remains_is_a_skipped_step(
    base: FolderBase, kind: LossKind
) -> None:
    """All dropped: done, skipped, version kept, whatever the divisor; the report says why."""
    trainer, batch = make_trainer(base), _flat_batch()
    loss = make_loss(batch, kind, overlong=OverlongFilter())
    constant = 5.0 if kind is LossKind.DR_GRPO else None
    before = weights_of(trainer)
    plan = trainer.prepare(batch, loss).plan
    assert plan.micro_batches == ()
    report = trainer.update(
        trainer.prepare(batch, loss, plan), make_step(trainer, loss, divide_constant=constant)
    )
    assert report.skipped
    assert report.skip_reason is SkipReason.NO_TOKENS
    assert report.grad_norm is None
    assert (report.trained_tokens, report.num_groups, report.loss) == (0, 0, None)
    assert report.dropped_truncated == 3
    assert any(each.kind == "all_dropped" for each in report.warnings)
    assert trainer.version == 0
    assert_equal(weights_of(trainer), before)


@pytest.mark.parametrize("kind", [LossKind.GRPO, LossKind.REINFORCE, LossKind.GSPO])
def test_a_call_that_drops_bad_rollouts_is_that_of_the_others(
    base: FolderBase, kind: LossKind
) -> None:
    """Gradients, losses and figures to 1e-12, and those dropped by place and reason."""
    sent, left = bad_groups()
    staleness = StalenessConfig(max_versions=2, action=StalenessAction.REFUSE)
    reports, gradients = [], []
    for groups, drops_bad in ((sent, True), (left, False)):
        trainer = make_trainer(base)
        trainer.version = 10
        batch = validate_groups(groups, SHORT, drops_bad=drops_bad)
        loss = make_loss(batch, kind, staleness=staleness, kl=FROZEN, report_groups=True)
        if drops_bad:
            with pytest.raises(RatoonError) as caught:
                trainer.prepare(batch, loss)
            assert caught.value.code == ErrorCode.STALE_ROLLOUTS
            assert caught.value.field == "groups[3].rollouts[0].policy_version"
            batch = without_bad(batch, loss, trainer.version)
        prepared = trainer.prepare(batch, loss)
        reports.append(trainer.forward_backward(prepared))
        gradients.append(gradients_of(trainer))
    report, expected = reports
    for name, tensor in gradients[0].items():
        assert float(tensor.norm()) > 0, name
        assert float((tensor - gradients[1][name]).norm()) <= 1e-12 * float(tensor.norm()), name
    dropped = [(each.group, each.rollout, each.reason.value) for each in report.bad_rollouts]
    assert dropped == [
        (0, 1, "logprob"),
        (1, 0, "reward"),
        (1, 1, "alone"),
        (2, 0, "length"),
        (3, 0, "stale"),
        (3, 2, "reward"),
        (3, 5, "stale"),
        (3, 6, "logprob"),
    ]
    (warning,) = (each for each in report.warnings if each.kind == "bad_rollouts")
    assert warning.message == (
        "8 of 17 rollouts cannot be trained and were dropped: alone 1, length 1, "
        "logprob 2, reward 2, stale 2"
    )
    assert [(who.group, who.rollout) for who in warning.offenders] == [each[:2] for each in dropped]
    assert report.dropped_bad == 8
    for field in fields(StepReport):
        mine, theirs = getattr(report, field.name), getattr(expected, field.name)
        if isinstance(mine, float):
            if not field.name.endswith("per_second"):
                assert mine == pytest.approx(theirs, rel=1e-12, abs=1e-12), field.name
        elif field.name not in {"warnings", "bad_rollouts", "dropped_bad", "seconds"} | _MEMORY:
            assert mine == theirs, field.name


_MEMORY = {"peak_memory_bytes", "planned_memory_bytes"}


@pytest.mark.parametrize("kind", [LossKind.GRPO, LossKind.DAPO, LossKind.CISPO])
def test_a_call_of_which_bad_rollouts_leave_nothing_is_a_skipped_step(
    base: FolderBase, kind: LossKind
) -> None:
    """As where filters drop all: no step, version and weights as before."""
    trainer = make_trainer(base)
    rollouts = [builders.rollout([3, n], reward=float("nan")) for n in range(3)]
    batch = validate_groups([builders.group([1], rollouts)], SHORT, drops_bad=True)
    loss = make_loss(batch, kind, kl=FROZEN, report_groups=True)
    before = weights_of(trainer)
    prepared = trainer.prepare(
        without_bad(batch, loss, trainer.version), loss, logprobs_of=LogprobsOf.ALL
    )
    report = trainer.update(prepared, make_step(trainer, loss))
    assert report.skip_reason is SkipReason.NO_TOKENS
    assert (report.trained_tokens, report.num_groups, report.loss) == (0, 0, None)
    assert (report.dropped_bad, report.reward_mean, report.groups) == (3, None, ())
    assert [each.kind for each in report.warnings[:2]] == ["bad_rollouts", "all_dropped"]
    assert trainer.version == 0
    assert_equal(weights_of(trainer), before)


def test_report_counts_what_was_done(base: FolderBase) -> None:
    trainer = make_trainer(base)
    rollouts = [
        builders.rollout(
            [3, 4, n],
            reward=float(n),
            policy_version=-1 + n,
            sampler_logprobs=np.full(3, -2.0, np.float32),
        )
        for n in range(1, 4)
    ]
    batch = validate_groups([builders.group([1, 2], rollouts)], builders.limits(vocab_size=64))
    trainer.version = 3
    loss = make_loss(
        batch, staleness=StalenessConfig(max_versions=2, action=StalenessAction.DROP), kl=FROZEN
    )
    report = trainer.update(trainer.prepare(batch, loss), make_step(trainer, loss))
    assert trainer.version == 4
    assert report.dropped_stale == 1
    assert (report.num_groups, report.num_sequences, report.trained_tokens) == (1, 2, 6)
    # Two sequences of 5 that share 4: 10 tokens replicated, 6 packed; 30 pairs against 20.
    assert (report.unshared_tokens, report.packed_tokens) == (10, 6)
    assert report.token_reduction == pytest.approx(10 / 6)
    assert report.attention_pair_reduction == pytest.approx(30 / 20)
    assert report.reward_mean == pytest.approx(2.0)
    assert (report.staleness_mean, report.staleness_max) == (1.5, 2)
    assert report.num_micro_batches == 1
    assert report.hardware_mfu is None
    assert report.logical_mfu is None
    assert report.peak_memory_bytes > 0
    assert report.tokens_per_second is not None
    assert report.tokens_per_second > 0
    assert report.seconds.forward > 0
    assert report.seconds.backward > 0
    assert report.seconds.optimizer > 0
    assert report.kl is not None
    assert report.sampler_kl is not None
    assert report.sampler_gap_max is not None


def test_raw_sampler_logprobs_are_left_out_of_the_mismatch(base: FolderBase) -> None:
    trainer, batch = make_trainer(base), make_batch(13)
    raw_S = np.ones(batch.num_sequences, np.bool_)
    batch = replace(batch, sampler_is_raw=raw_S)
    loss = make_loss(batch, LossKind.REINFORCE)
    report = forward_backward(trainer, batch, loss)
    assert report.sampler_kl is None
    assert report.sampler_gap_max is None
    assert any(each.kind == "raw_logprobs" for each in report.warnings)


@pytest.mark.parametrize(
    ("dtype", "asked"),
    [(ModelDtype.BFLOAT16, True), (ModelDtype.BFLOAT16, False), (ModelDtype.FLOAT32, True)],
)
def test_share_of_changed_weights_is_of_what_is_trained(
    base: FolderBase, dtype: ModelDtype, asked: bool
) -> None:
    trainer = make_trainer(base, dtype=dtype)
    parameters = trainer.model.named_trainable()
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    loss = make_loss(make_batch(0))
    forward_backward(trainer, make_batch(0), loss)
    report = trainer.optim_step(make_step(trainer, loss, changed_share=asked))
    if dtype is ModelDtype.FLOAT32 or not asked:
        assert report.changed_share is None
        return
    total = sum(parameter.numel() for parameter in parameters.values())
    assert changed_bits(before, parameters) > 0
    assert report.changed_share == changed_bits(before, parameters) / total


def _with_stages(plan: UpdatePlan) -> UpdatePlan:
    """Cut at a token that is within a node."""
    first, *others = plan.micro_batches
    cut = first.packed_tokens - 1
    stages = (
        Stage(start=0, stop=cut, parent=-1),
        Stage(start=cut, stop=first.packed_tokens, parent=0),
    )
    return replace(plan, micro_batches=(replace(first, stages=stages), *others))


def test_a_plan_of_another_batch_is_an_error_and_not_a_wrong_gradient(base: FolderBase) -> None:
    trainer = make_trainer(base)
    batch = make_batch(3)
    loss = make_loss(batch)
    plan = trainer.prepare(batch, loss).plan
    first, *others = plan.micro_batches
    longer = replace(first, packed_tokens=first.packed_tokens + 1)
    for foreign in (replace(plan, micro_batches=(longer, *others)), _with_stages(plan)):
        with pytest.raises(RatoonError, match="micro-batch 0 of the plan") as caught:
            trainer.forward_backward(trainer.prepare(batch, loss, foreign))
        assert caught.value.code is ErrorCode.INTERNAL
        assert trainer.window_state is WindowState.TORN
        trainer.discard_gradients()


def test_laps_of_a_name_add_up_and_leave_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 11.0, 13.0, 13.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    clock = DeviceClock(torch.device("cpu"))
    for name in ("forward", "backward", "forward"):
        clock.lap(name)
    seconds = clock.seconds()
    assert seconds["forward"] == 1.5
    assert seconds["backward"] == 2.0
    assert seconds["optimizer"] == 0.0
