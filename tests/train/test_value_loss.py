"""A critic: values, their loss and its gradients, beside a policy gradient and alone.

One packed or streamed forward-backward against one unpadded Hugging Face run a rollout with a
linear head on its last hidden states, in float64. Rollouts that share a position have other returns
there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ratoon.errors import RatoonError
from ratoon.planner.planning import cpu_planner
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.forest import build_forest, pack
from ratoon.rollout.prefixes import sort_sequences
from ratoon.train import passes, prepare
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.loss.spec import Loss, ValueLoss
from ratoon.train.loss.values import value_terms
from ratoon.train.trainer import Trainer
from ratoon_kernels.token_logprobs import reference
from ratoon_proto.types import (
    DistillationConfig,
    Divergence,
    KlConfig,
    KlKind,
    LogprobsOf,
    LoraTuning,
    LossConfig,
    LossKind,
    OldLogprobs,
    OldLogprobsKind,
    OptimStepConfig,
    ReferenceKind,
    SharedTokens,
    TokenWeight,
    ValueLossConfig,
)
from tests.equivalence import assert_close, paths_of
from tests.oracle import hf
from tests.oracle.advantages import select
from tests.plans import make_plan
from tests.tiny_models import write_folder
from tests.train.equivalence_runs import (
    EAGER,
    VOCAB_SIZE,
    WHOLE,
    Pair,
    check_gradients,
    check_step,
    forward_backward,
    make_pair,
    oracle_loss,
    random_batch_near,
)
from tests.train.rank_runs import ranked, together, weights_of
from tests.train.recorded_masks import masked, split_tokens
from tests.train.trainer_runs import assert_close as assert_weights_close
from tests.train.trainer_runs import gradients_of, make_step

GIVEN_OLD = OldLogprobs(kind=OldLogprobsKind.GIVEN)
KL = KlConfig(kind=KlKind.K3, coefficient=0.3, reference=ReferenceKind.GIVEN)


def _alone(*, coefficient: float = 1.0, clip: float | None = None, **changes: Any) -> LossConfig:
    value = ValueLossConfig(coefficient=coefficient, clip=clip)
    return LossConfig(kind=LossKind.VALUE, value=value, **changes)


def _beside(kind: LossKind, **changes: Any) -> LossConfig:
    """A policy gradient with a critic on the same trunk."""
    value = ValueLossConfig(coefficient=0.7, clip=0.4)
    return LossConfig(kind=kind, old_logprobs=GIVEN_OLD, value=value, **changes)


LORA = LoraTuning(rank=3, alpha=6.0)
LORA_OF_HEAD = replace(LORA, target_modules=("v_proj", "lm_head"))
# The decoder has no graph then.
LORA_OF_HEAD_ALONE = replace(LORA, target_modules=("lm_head",))
# Two calls of a window.
ALONE, BESIDE = ("alone, clipped", "alone"), ("beside ppo", "beside gspo")
# The request, and packed tokens of a micro-batch.
ROWS = {
    "alone": (_alone(), 1),
    "alone, clipped": (_alone(clip=0.3, coefficient=2.5), 30),
    "alone, a term a shared token": (_alone(clip=0.3, shared_tokens=SharedTokens.ONCE), WHOLE),
    "alone, by sequence": (_alone(token_weight=TokenWeight.PER_SEQUENCE), 30),
    "beside ppo": (_beside(LossKind.PPO_CLIP, kl=KL, entropy_coefficient=0.1), 30),
    "beside gspo": (_beside(LossKind.GSPO), 30),
    "beside a teacher": (
        _beside(
            LossKind.GRPO, distillation=DistillationConfig(Divergence.REVERSE_KL, coefficient=0.2)
        ),
        30,
    ),
}


def _folder(folder: Path) -> Path:
    """A small model with a value head of random numbers."""
    write_folder(folder, "qwen3")
    rng = torch.Generator().manual_seed(4)
    (folder / "value_head").mkdir()
    head = {
        "value_head.weight": torch.randn(1, 16, generator=rng),
        "value_head.bias": torch.randn(1, generator=rng),
    }
    save_file(head, folder / "value_head" / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _folder(tmp_path_factory.mktemp("critic"))


@pytest.fixture(scope="module")
def _critic(folder: Path) -> Pair:
    return make_pair(folder, scratch=folder / "unused", value_head=True)


@pytest.fixture
def critic(_critic: Pair) -> Iterator[Pair]:
    """A trainer with a value head and an oracle, whose weights and version no test changes."""
    yield _critic
    _critic.discard()


def _batch(pair: Pair, seed: int, request: LossConfig) -> RolloutBatch:
    is_alone = request.kind is LossKind.VALUE
    return random_batch_near(
        pair,
        seed,
        outcome="none" if is_alone else "advantages",
        num_teacher_tokens=5 if request.distillation else 0,
        with_returns=True,
        max_response=12,
    )


def _loss(request: LossConfig, batch: RolloutBatch) -> Loss:
    return resolve_loss(request, batch, has_frozen_reference=True, has_value_head=True)


@pytest.mark.parametrize("name", ROWS)
def test_loss_counters_and_gradients_are_the_oracles(critic: Pair, name: str) -> None:
    request, micro_batch_tokens = ROWS[name]
    batch = _batch(critic, 50, request)
    check_gradients(critic, batch, request, micro_batch_tokens=micro_batch_tokens)


@pytest.mark.parametrize("name", ["alone, clipped", "beside ppo"])
def test_rows_of_several_masks_have_one_value(critic: Pair, name: str) -> None:
    """Where truncation left paths other tokens, the position that predicts them is several rows."""
    request = ROWS[name][0]
    batch = masked(_batch(critic, 40, request))
    prepared = prepare.prepare(
        batch, _loss(request, batch), version=0, plan=cpu_planner(WHOLE), logprobs_of=None
    )
    forest = build_forest(batch, prepared.prefixes, np.arange(batch.num_sequences))
    assert split_tokens(pack(batch, forest, prepared.term_mask_J))
    check_gradients(critic, batch, request)


def test_paths_that_meet_have_other_returns(critic: Pair) -> None:
    """The batch of the rows above is worth testing with."""
    returns: dict[tuple[int, ...], set[float]] = {}
    for path in paths_of(_batch(critic, 50, ROWS["alone"][0])):
        assert path.returns is not None
        for token in path.trained:
            prefix = tuple(path.tokens[: len(path.prompt) + token + 1].tolist())
            returns.setdefault(prefix, set()).add(float(path.returns[token]))
    assert max(map(len, returns.values())) > 1


STREAMED = [("alone, clipped", 12), ("alone", 1), ("beside gspo", 12), ("beside ppo", 12)]


@pytest.mark.parametrize(("name", "budget"), STREAMED)
def test_streamed_gradients_are_those_of_each_rollout_alone(
    critic: Pair, name: str, budget: int
) -> None:
    request = ROWS[name][0]
    batch = _batch(critic, 23, request)
    kept_S = prepare.has_trained_tokens(batch)
    plan = make_plan(batch, sort_sequences(batch), kept_S, budget, EAGER)
    assert any(part.stages for part in plan.micro_batches)
    trainer = critic.trainer
    report = trainer.forward_backward(trainer.prepare(batch, _loss(request, batch), plan))
    sums = critic.oracle.forward_backward(paths_of(batch), oracle_loss(request, batch))
    assert_close(critic.gradient_errors(), critic.tolerance)
    assert report.trained_tokens == sums.counters.tokens


@pytest.mark.parametrize(
    ("names", "tuning"),
    [
        *((ALONE, tuning) for tuning in (None, LORA)),
        *((BESIDE, tuning) for tuning in (None, LORA, LORA_OF_HEAD, LORA_OF_HEAD_ALONE)),
    ],
)
def test_three_steps_of_two_calls_are_exact(
    tmp_path: Path, folder: Path, names: tuple[str, str], tuning: LoraTuning | None
) -> None:
    pair = make_pair(folder, scratch=tmp_path / "adapter", tuning=tuning, value_head=True)
    for seed in range(3):
        for call, name in enumerate(names):
            request = replace(ROWS[name][0], token_weight=TokenWeight.PER_TOKEN)
            batch = _batch(pair, 60 + 2 * seed + call, request)
            forward_backward(pair, batch, request, micro_batch_tokens=20)
        assert_close(pair.gradient_errors(), pair.tolerance)
        step = OptimStepConfig(learning_rate=1e-2, divide_by="tokens")
        check_step(pair, step, divide_by="tokens")


@pytest.mark.parametrize(
    "name", ["alone, clipped", "beside gspo", pytest.param("beside ppo", marks=pytest.mark.more)]
)
def test_ranks_that_run_a_micro_batch_together_give_the_same(folder: Path, name: str) -> None:
    request = ROWS[name][0]
    pair = make_pair(folder, scratch=folder / "unused", value_head=True)
    alone, batch = pair.trainer, _batch(pair, 24, request)
    loss = _loss(request, batch)
    kept_S = prepare.has_trained_tokens(batch)
    step = make_step(alone, loss)
    with ranked(alone.spec, 2) as (two, _):
        for budget in (12, WHOLE):
            plan = make_plan(batch, sort_sequences(batch), kept_S, budget, EAGER)
            one = alone.update(alone.prepare(batch, loss, plan), step)
            both = two.update(two.prepare(batch, loss, together(plan, 2)), step)
            assert not one.skipped
            for figure in ("loss", "value_loss", "explained_variance", "grad_norm"):
                assert getattr(both, figure) == pytest.approx(getattr(one, figure), rel=1e-9)
        assert_weights_close(weights_of(two), weights_of(alone))


@pytest.mark.parametrize("name", ["alone, clipped", "beside ppo"])
def test_bits_are_those_of_two_phases_and_of_a_repeat(
    critic: Pair, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few rows at a time, so that the gradient of some terms is known before other rows run."""
    monkeypatch.setattr(reference, "LOGIT_BYTES", 3 * 8 * VOCAB_SIZE)
    request = ROWS[name][0]
    batch = _batch(critic, 50, request)

    def run() -> dict[str, torch.Tensor]:
        critic.trainer.discard_gradients()
        prepared = critic.trainer.prepare(batch, _loss(request, batch))
        critic.trainer.forward_backward(prepared)
        return {name: value.clone() for name, value in gradients_of(critic.trainer).items()}

    first, again = run(), run()
    monkeypatch.setattr(passes, "is_of_single_tokens", lambda _loss: False)
    in_two = run()
    for parameter, gradient in first.items():
        assert gradient.any(), parameter
        assert torch.equal(gradient, again[parameter]), parameter
        torch.testing.assert_close(gradient, in_two[parameter], rtol=1e-12, atol=1e-15)


def test_logprobs_of_every_token_do_not_change_the_gradient(critic: Pair) -> None:
    """Terms that are only answered have no value term."""
    request = ROWS["beside ppo"][0]
    batch = _batch(critic, 51, request)
    forward_backward(critic, batch, request, logprobs_of=LogprobsOf.ALL, micro_batch_tokens=30)
    assert_close(critic.gradient_errors(), critic.tolerance)


def test_figures_are_over_counted_tokens(critic: Pair) -> None:
    request = ROWS["alone, clipped"][0]
    batch = _batch(critic, 52, request)
    report, sums = forward_backward(critic, batch, request, micro_batch_tokens=30)
    values, returns, olds = [], [], []
    with torch.no_grad():
        for counted in select(paths_of(batch), oracle_loss(request, batch)):
            if counted.own.any():
                values.append(hf.values(critic.oracle.model, counted.path).numpy()[counted.own])
                assert counted.path.returns is not None
                assert counted.path.old_values is not None
                returns.append(counted.path.returns[counted.own])
                olds.append(counted.path.old_values[counted.own])
    v, r, old = (np.concatenate(parts) for parts in (values, returns, olds))
    held = np.clip(v, old - 0.3, old + 0.3)
    is_clipped = (held - r) ** 2 > (v - r) ** 2
    assert 0 < is_clipped.mean() < 1
    assert report.value_mean == pytest.approx(v.mean(), rel=1e-10)
    assert report.return_mean == pytest.approx(r.mean(), rel=1e-10)
    assert report.explained_variance == pytest.approx(1 - np.var(r - v) / np.var(r), rel=1e-9)
    assert report.value_clip_fraction == pytest.approx(is_clipped.mean(), rel=1e-12)
    assert report.value_loss == pytest.approx(
        np.maximum((v - r) ** 2, (held - r) ** 2).mean() / 2, rel=1e-10
    )
    assert report.loss == pytest.approx(sums.total / sums.counters.tokens, rel=1e-10)
    assert report.value_loss is not None
    assert report.loss == pytest.approx(2.5 * report.value_loss, rel=1e-10)


def test_no_variance_of_equal_returns_is_explained(critic: Pair) -> None:
    request = ROWS["alone"][0]
    batch = _batch(critic, 53, request)
    assert batch.returns is not None
    batch = replace(batch, returns=np.full_like(batch.returns, 0.1))
    report, _ = forward_backward(critic, batch, request)
    assert report.explained_variance is None
    assert report.return_mean == pytest.approx(0.1)


def test_a_value_loss_by_hand() -> None:
    """At old value 1, clip 0.5 and return 3: a value of 2 is held at 1.5, one of 1.2 is free."""
    value_L = torch.tensor([2.0, 1.2, 4.0], requires_grad=True)
    return_L, old_L = torch.tensor([3.0, 3.0, 3.0]), torch.ones(3)
    found = value_terms(ValueLoss(coefficient=1.0, clip=0.5), value_L, return_L, old_L)
    assert found.loss_L.tolist() == pytest.approx([1.5**2 / 2, 1.8**2 / 2, 1.5**2 / 2])
    assert found.clipped_L.tolist() == [True, False, True]
    (gradient,) = torch.autograd.grad(found.loss_L.sum(), [value_L])
    assert gradient.tolist() == pytest.approx([0.0, -1.8, 0.0])
    free = value_terms(ValueLoss(coefficient=1.0, clip=None), value_L, return_L, None)
    assert free.loss_L.tolist() == pytest.approx([0.5, 1.8**2 / 2, 0.5])
    assert not free.clipped_L.any()


def _forward(
    trainer: Trainer, batch: RolloutBatch, budget: int, *, use_reference: bool = False
) -> Any:
    kept_S = prepare.has_trained_tokens(batch)
    plan = make_plan(batch, sort_sequences(batch), kept_S, budget, EAGER)
    prepared = trainer.prepare_forward(batch, plan)
    return trainer.forward(prepared, with_entropy=True, use_reference=use_reference)


@pytest.mark.parametrize("budget", [9, WHOLE])
def test_a_forward_answers_values(critic: Pair, budget: int) -> None:
    batch = random_batch_near(critic, 6)
    found = _forward(critic.trainer, batch, budget)
    for path, start in zip(paths_of(batch), batch.response_offsets, strict=False):
        if not path.mask.any():
            continue
        with torch.no_grad():
            expected = hf.values(critic.oracle.model, path).numpy()[path.trained]
        np.testing.assert_allclose(found.values[start + path.trained], expected, rtol=0, atol=1e-10)
    assert not found.values[~batch.loss_mask].any()
    assert _forward(critic.trainer, batch, budget, use_reference=True).values is None


def test_ranks_answer_values_together(critic: Pair) -> None:
    batch = random_batch_near(critic, 8)
    kept_S = prepare.has_trained_tokens(batch)
    plan = make_plan(batch, sort_sequences(batch), kept_S, 20, EAGER)
    one = _forward(critic.trainer, batch, 20)
    with ranked(critic.trainer.spec, 2) as (two, _):
        prepared = two.prepare_forward(batch, together(plan, 2))
        both = two.forward(prepared, with_entropy=False, use_reference=False)
    assert both.values is not None
    np.testing.assert_allclose(both.values, one.values, rtol=0, atol=1e-10)


REFUSED = {
    "a critic without its loss": (LossConfig(kind=LossKind.VALUE), {}, True, "loss.value"),
    "no head": (_alone(), {}, False, "loss.value"),
    "no returns": (_alone(), {"returns": None}, True, "loss.value"),
    "no old values": (_alone(clip=0.2), {"old_values": None}, True, "loss.value.clip"),
    "no clip": (_alone(clip=0.0), {}, True, "loss.value.clip"),
    "no number": (_alone(coefficient=float("nan")), {}, True, "loss.value.coefficient"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_cannot_be_is_refused_by_name(critic: Pair, name: str) -> None:
    request, changes, has_head, field = REFUSED[name]
    batch = replace(_batch(critic, 1, _alone()), **changes)
    with pytest.raises(RatoonError) as refused:
        resolve_loss(request, batch, has_frozen_reference=True, has_value_head=has_head)
    assert refused.value.field == field


def test_reports_of_other_losses_have_no_values(critic: Pair) -> None:
    batch = random_batch_near(critic, 53)
    report, _ = forward_backward(critic, batch, LossConfig(kind=LossKind.GRPO))
    assert (report.value_loss, report.value_mean, report.explained_variance) == (None, None, None)
