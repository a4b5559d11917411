"""Distillation: divergences from a teacher's K tokens, whose targets differ where paths meet.

One packed or streamed forward-backward against one unpadded Hugging Face run a rollout, in float64,
and a Forward's likeliest tokens against the whole distribution.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ratoon.model.spec import FolderBase
from ratoon.planner.costs import DEFAULT_COSTS, CostModel
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.packed import UpdatePlan
from ratoon.train import passes
from ratoon.train.loss.divergences import LEAST_REST, divergence_terms
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.loss.spec import Distillation
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
)
from tests.equivalence import assert_close, paths_of
from tests.oracle import hf
from tests.oracle.advantages import select
from tests.oracle.losses import divergence
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
    plan_of,
    random_batch_near,
)
from tests.train.rank_runs import ranked, together, weights_of
from tests.train.trainer_runs import assert_close as assert_weights_close
from tests.train.trainer_runs import make_step, make_trainer
from tests.work_units import rows

FORWARD, REVERSE, MIXED = Divergence
GIVEN_OLD = OldLogprobs(kind=OldLogprobsKind.GIVEN)
KL = KlConfig(kind=KlKind.K3, coefficient=0.3, reference=ReferenceKind.FROZEN)


def _alone(kind: Divergence, **options: Any) -> LossConfig:
    config = DistillationConfig(kind, **options)
    return LossConfig(kind=LossKind.DISTILLATION, distillation=config)


def _beside(kind: LossKind, divergence: Divergence, **changes: Any) -> LossConfig:
    """A policy gradient with a divergence beside it."""
    config = DistillationConfig(divergence, coefficient=0.7)
    return LossConfig(kind=kind, old_logprobs=GIVEN_OLD, distillation=config, **changes)


BESIDE_GRPO = _beside(
    LossKind.GRPO, REVERSE, shared_tokens=SharedTokens.ONCE, kl=KL, entropy_coefficient=0.1
)
BESIDE_GSPO = _beside(LossKind.GSPO, FORWARD)
# The request, tokens of a teacher, and packed tokens of a micro-batch; EAGER: it is streamed.
ROWS = {
    "forward": (_alone(FORWARD), 5, (1, DEFAULT_COSTS)),
    "forward, one token": (_alone(FORWARD), 1, (30, DEFAULT_COSTS)),
    "reverse": (_alone(REVERSE, coefficient=2.5), 5, (WHOLE, DEFAULT_COSTS)),
    "reverse, whole vocabulary": (_alone(REVERSE), VOCAB_SIZE, (30, DEFAULT_COSTS)),
    "mixed": (_alone(MIXED), 5, (WHOLE, DEFAULT_COSTS)),
    "mixed, mostly the teacher": (_alone(MIXED, beta=0.9), 5, (30, DEFAULT_COSTS)),
    "beside grpo": (BESIDE_GRPO, 5, (30, DEFAULT_COSTS)),
    "beside gspo": (BESIDE_GSPO, 5, (30, DEFAULT_COSTS)),
    "reverse, streamed": (_alone(REVERSE, coefficient=2.5), 5, (12, EAGER)),
    "mixed, a token at a time": (_alone(MIXED), 5, (1, EAGER)),
    "beside grpo, streamed": (BESIDE_GRPO, 5, (12, EAGER)),
    "beside gspo, streamed": (BESIDE_GSPO, 5, (12, EAGER)),
}


def _batch(pair: Pair, seed: int, request: LossConfig, num_tokens: int) -> RolloutBatch:
    outcome = "none" if request.kind is LossKind.DISTILLATION else "advantages"
    return random_batch_near(
        pair, seed, outcome=outcome, num_teacher_tokens=num_tokens, max_response=12
    )


@pytest.mark.parametrize("name", ROWS)
def test_loss_counters_and_gradients_are_the_oracles(pair: Pair, name: str) -> None:
    request, num_tokens, cut = ROWS[name]
    batch = _batch(pair, 50, request, num_tokens)
    check_gradients(pair, batch, request, plan=plan_of(batch, *cut))


def test_paths_that_meet_have_other_targets(pair: Pair) -> None:
    """The batch of the rows above is worth testing with."""
    batch = _batch(pair, 50, *ROWS["forward"][:2])
    targets: dict[tuple[int, ...], set[bytes]] = {}
    for path in paths_of(batch):
        assert path.teacher_tokens is not None
        for token in path.trained:
            prefix = tuple(path.tokens[: len(path.prompt) + token + 1].tolist())
            targets.setdefault(prefix, set()).add(path.teacher_tokens[token].tobytes())
    assert max(map(len, targets.values())) > 1


@pytest.mark.parametrize("targets", [(), ("v_proj", "embed_tokens", "lm_head")])
def test_lora_is_exact_in_three_steps_of_two_calls(
    tmp_path: Path, targets: tuple[str, ...]
) -> None:
    pair = make_pair(
        write_folder(tmp_path / "base", "qwen3"),
        scratch=tmp_path / "adapter",
        tuning=LoraTuning(rank=3, alpha=6.0, target_modules=targets),
    )
    for seed in range(3):
        for call, name in enumerate(("reverse", "mixed")):
            request, num_tokens, _ = ROWS[name]
            batch = _batch(pair, 60 + 2 * seed + call, request, num_tokens)
            forward_backward(pair, batch, request, micro_batch_tokens=20)
        assert_close(pair.gradient_errors(), pair.tolerance)
        check_step(pair, OptimStepConfig(learning_rate=1e-2), divide_by="tokens")


@pytest.mark.parametrize(
    "name", rows(("reverse", "beside gspo", "beside grpo"), now=("reverse", "beside gspo"))
)
def test_ranks_that_run_a_micro_batch_together_give_the_same(
    pair: Pair, base: FolderBase, name: str
) -> None:
    request, num_tokens, _ = ROWS[name]
    batch = _batch(pair, 24, request, num_tokens)
    loss = resolve_loss(request, batch, has_frozen_reference=True)
    alone = make_trainer(base)
    step = make_step(alone, loss)
    with ranked(alone.spec, 2) as (two, _):
        for cut in ((12, EAGER), (WHOLE, DEFAULT_COSTS)):
            plan = plan_of(batch, *cut)
            one = alone.update(alone.prepare(batch, loss, plan), step)
            both = two.update(two.prepare(batch, loss, together(plan, 2)), step)
            assert not one.skipped
            assert both.loss == pytest.approx(one.loss, rel=1e-9)
            assert both.teacher_kl == pytest.approx(one.teacher_kl, rel=1e-9)
            assert both.grad_norm == pytest.approx(one.grad_norm, rel=1e-9)
        assert_weights_close(weights_of(two), weights_of(alone))


@pytest.mark.parametrize("name", ["reverse", "beside grpo"])
def test_bits_are_those_of_two_phases_and_of_a_repeat(
    pair: Pair, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few rows at a time, so that the gradient of some terms is known before other rows run."""
    monkeypatch.setattr(reference, "LOGIT_BYTES", 3 * 8 * VOCAB_SIZE)
    request, num_tokens, _ = ROWS[name]
    batch = _batch(pair, 50, request, num_tokens)
    loss = resolve_loss(request, batch, has_frozen_reference=True)

    def run() -> dict[str, torch.Tensor]:
        pair.trainer.discard_gradients()
        pair.trainer.forward_backward(pair.trainer.prepare(batch, loss))
        return pair.gradients()

    first, again = run(), run()
    monkeypatch.setattr(passes, "is_of_single_tokens", lambda _loss: False)
    in_two = run()
    for parameter, gradient in first.items():
        assert gradient.any(), parameter
        assert torch.equal(gradient, again[parameter]), parameter
        # The embedding is the head, too, whose two gradients are added up in another order.
        torch.testing.assert_close(gradient, in_two[parameter], rtol=1e-12, atol=1e-15)


def test_logprobs_of_every_token_do_not_change_the_gradient(pair: Pair) -> None:
    """Terms that are only answered have no divergence."""
    request, num_tokens, _ = ROWS["mixed"]
    batch = _batch(pair, 51, request, num_tokens)
    forward_backward(pair, batch, request, logprobs_of=LogprobsOf.ALL, micro_batch_tokens=30)
    assert_close(pair.gradient_errors(), pair.tolerance)


def test_figures_are_means_over_counted_tokens(pair: Pair) -> None:
    request, num_tokens, _ = ROWS["forward"]
    batch = _batch(pair, 52, request, num_tokens)
    report, sums = forward_backward(pair, batch, request, micro_batch_tokens=30)
    reverse = oracle_loss(_alone(REVERSE), batch)
    kls, masses, own_masses = [], [], []
    with torch.no_grad():
        for counted in select(paths_of(batch), reverse):
            if not counted.own.any():
                continue
            rows = hf.distributions(pair.oracle.model, counted.path)
            own = torch.as_tensor(counted.own)
            kls.append(divergence(counted, reverse, rows)[own])
            assert counted.path.teacher is not None
            masses.append(torch.as_tensor(counted.path.teacher).exp().sum(1)[own])
            ids = torch.as_tensor(counted.path.teacher_tokens)
            own_masses.append(rows.exp().gather(1, ids).sum(1)[own])
    for found, values in (
        (report.teacher_kl, kls),
        (report.teacher_mass, masses),
        (report.policy_mass, own_masses),
    ):
        assert found == pytest.approx(float(torch.cat(values).mean()), rel=1e-10)
    assert report.loss == pytest.approx(sums.total / sums.counters.tokens, rel=1e-10)


def test_reports_of_other_losses_have_no_teacher(pair: Pair) -> None:
    batch = random_batch_near(pair, 53)
    report, _ = forward_backward(pair, batch, LossConfig(kind=LossKind.GRPO))
    assert (report.teacher_kl, report.teacher_mass, report.policy_mass) == (None, None, None)


@pytest.mark.parametrize("kind", Divergence)
def test_a_divergence_by_hand(kind: Divergence) -> None:
    """Two tokens of three: p = (0.5, 0.2 | 0.3), q = (0.25, 0.25 | 0.5)."""
    p, q = np.array([0.5, 0.2, 0.3]), np.array([0.25, 0.25, 0.5])
    m = 0.25 * q + 0.75 * p

    def kl(a: np.ndarray, b: np.ndarray) -> float:
        return float((a * np.log(a / b)).sum())

    expected = {
        FORWARD: kl(q, p),
        REVERSE: kl(p, q),
        MIXED: 0.25 * kl(q, m) + 0.75 * kl(p, m),
    }[kind]
    asked = Distillation(divergence=kind, coefficient=1.0, beta=0.25)
    ours, theirs = (torch.tensor(np.log(x[None, :2])) for x in (p, q))
    assert float(divergence_terms(asked, ours, theirs).value_L) == pytest.approx(expected)
    same = divergence_terms(asked, theirs, theirs)
    assert float(same.value_L) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("kind", Divergence)
def test_masses_that_leave_no_rest_stay_finite(kind: Divergence) -> None:
    """Either side may have all of its mass on the K tokens, and rounding a little more."""
    asked = Distillation(divergence=kind, coefficient=1.0, beta=0.5)
    sides = [torch.tensor([pair]) for pair in ((0.0, -40.0), (1e-7, -90.0), (-1.0, -2.0))]
    for ours, theirs in product(sides, sides):
        leaf = ours.clone().requires_grad_()
        value = divergence_terms(asked, leaf, theirs).value_L
        (gradient,) = torch.autograd.grad(value.sum(), [leaf])
        assert value.isfinite().all()
        assert gradient.isfinite().all()
        assert value.item() > -2 * LEAST_REST


def _forward(pair: Pair, batch: RolloutBatch, plan: UpdatePlan, **asked: Any) -> Any:
    prepared = pair.trainer.prepare_forward(batch, plan, **asked)
    return pair.trainer.forward(prepared, with_entropy=True, use_reference=False)


def _distributions(
    pair: Pair, batch: RolloutBatch
) -> Iterator[tuple[NDArray[np.int64], torch.Tensor]]:
    """Places of each path's trained tokens, and log-probs of the vocabulary there."""
    for path, start in zip(paths_of(batch), batch.response_offsets, strict=False):
        if path.mask.any():
            with torch.no_grad():
                rows = hf.distributions(pair.oracle.model, path)
            yield start + path.trained, rows[torch.as_tensor(path.trained)]


@pytest.mark.parametrize("cut", [(9, EAGER), (WHOLE, DEFAULT_COSTS)])
def test_a_forward_answers_the_likeliest_tokens(pair: Pair, cut: tuple[int, CostModel]) -> None:
    batch = random_batch_near(pair, 6)
    plan = plan_of(batch, *cut)
    found = _forward(pair, batch, plan, num_best=7)
    assert found.teacher is not None
    tokens_JK, logprobs_JK = found.teacher
    plain = _forward(pair, batch, plan)
    np.testing.assert_array_equal(found.logprobs, plain.logprobs)
    assert plain.teacher is None
    for places, own in _distributions(pair, batch):
        best = own.topk(7, dim=1)
        np.testing.assert_array_equal(tokens_JK[places], best.indices)
        np.testing.assert_allclose(logprobs_JK[places], best.values, rtol=0, atol=1e-10)
    assert not logprobs_JK[~batch.loss_mask].any()
    assert not tokens_JK[~batch.loss_mask].any()


def test_a_forward_answers_chosen_tokens(pair: Pair) -> None:
    batch = random_batch_near(pair, 7, num_teacher_tokens=4)
    found = _forward(pair, batch, plan_of(batch, 12, EAGER), with_teacher=True)
    assert found.teacher is not None
    tokens_JK, logprobs_JK = found.teacher
    assert batch.teacher_tokens is not None
    np.testing.assert_array_equal(tokens_JK, batch.teacher_tokens)
    for places, own in _distributions(pair, batch):
        chosen = own.gather(1, torch.as_tensor(batch.teacher_tokens[places]).long())
        np.testing.assert_allclose(logprobs_JK[places], chosen, rtol=0, atol=1e-10)


def test_ranks_answer_the_likeliest_tokens_together(pair: Pair) -> None:
    batch = random_batch_near(pair, 8)
    plan = plan_of(batch, 20, EAGER)
    one = _forward(pair, batch, plan, num_best=5)
    with ranked(pair.trainer.spec, 2) as (two, _):
        prepared = two.prepare_forward(batch, together(plan, 2), num_best=5)
        both = two.forward(prepared, with_entropy=False, use_reference=False)
    assert one.teacher is not None
    assert both.teacher is not None
    np.testing.assert_array_equal(both.teacher[0], one.teacher[0])
    np.testing.assert_allclose(both.teacher[1], one.teacher[1], rtol=0, atol=1e-10)
