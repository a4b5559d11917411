"""Sampling masks: what is packed equals each rollout of Hugging Face alone, with logits masked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ratoon.errors import RatoonError
from ratoon.model.spec import FolderBase
from ratoon.planner.costs import DEFAULT_COSTS, CostModel
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.forest import build_forest, pack
from ratoon.rollout.prefixes import sort_sequences
from ratoon.rollout.selection import predicted_mask
from ratoon.rollout.serial import batch_from_bytes, batch_to_bytes
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.ranks.rank import Rank
from ratoon.train.step_probe import probe_of
from ratoon_proto.types import (
    CorrectionLevel,
    CorrectionMask,
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
from tests.equivalence import assert_close, paths_of, relative_errors
from tests.oracle import hf
from tests.tiny_models import write_folder
from tests.train.equivalence_runs import (
    EAGER,
    WHOLE,
    Pair,
    assert_same_report,
    check_gradients,
    check_step,
    default_divisor,
    forward_backward,
    make_pair,
    make_request,
    oracle_loss,
    plan_of,
)
from tests.train.rank_runs import ranked, together
from tests.train.recorded_masks import masked, masked_batch_near, split_tokens, with_kept
from tests.train.trainer_runs import make_batch, make_loss, make_step, make_trainer

FROZEN_K3 = KlConfig(kind=KlKind.K3, coefficient=0.2, reference=ReferenceKind.FROZEN)
FULL: dict[str, Any] = {"kl": FROZEN_K3, "entropy_coefficient": 0.05}
GIVEN_OLD = OldLogprobs(kind=OldLogprobsKind.GIVEN)
GRPO = LossConfig(kind=LossKind.GRPO, **FULL)
CUTS = {
    "whole": (WHOLE, DEFAULT_COSTS),
    "cut": (40, DEFAULT_COSTS),
    "streamed": (16, EAGER),
    "a token at a time": (1, EAGER),
}


def _requests() -> Iterator[tuple[str, LossConfig]]:
    for kind in LossKind:
        if kind not in (LossKind.CROSS_ENTROPY, LossKind.DISTILLATION, LossKind.VALUE):
            yield f"{kind}", make_request(kind, **FULL)
    once = SharedTokens.ONCE
    yield "grpo once", make_request(LossKind.GRPO, shared_tokens=once, **FULL)
    yield "gspo once", make_request(LossKind.GSPO, shared_tokens=once, **FULL)
    mask = CorrectionMask(level=CorrectionLevel.SEQUENCE, low=0.7, high=1.4)
    for level in (CorrectionLevel.TOKEN, CorrectionLevel.SEQUENCE):
        rule = replace(mask, level=level)
        yield (
            f"grpo masked by {level}",
            make_request(LossKind.GRPO, old_logprobs=GIVEN_OLD, correction_mask=rule),
        )


REQUESTS = dict(_requests())


def _check(
    pair: Pair, batch: RolloutBatch, request: LossConfig, budget: int, costs: CostModel
) -> None:
    """The gradients of a plan, and its figures, are the oracle's."""
    loss = resolve_loss(request, batch, has_frozen_reference=True)
    plan = plan_of(batch, budget, costs)
    assert costs is not EAGER or any(part.stages for part in plan.micro_batches)
    report = pair.trainer.forward_backward(pair.trainer.prepare(batch, loss, plan))
    paths = paths_of(batch)
    frozen = hf.all_logprobs(pair.initial, paths)
    paths = [
        replace(path, reference=logprob.numpy())
        for path, (logprob, _) in zip(paths, frozen, strict=True)
    ]
    sums = pair.oracle.forward_backward(paths, oracle_loss(request, batch))
    assert_close(pair.gradient_errors(), pair.tolerance)
    assert_same_report(
        report,
        sums,
        default_divisor(request, batch, sums),
        token_weight=oracle_loss(request, batch).token_weight,
        tolerance=pair.tolerance,
    )
    pair.discard()


@pytest.mark.parametrize("name", REQUESTS)
def test_gradients_of_every_loss_are_those_of_each_rollout_alone(pair: Pair, name: str) -> None:
    index = list(REQUESTS).index(name)
    cut = list(CUTS.values())[index % len(CUTS)]
    _check(pair, masked_batch_near(pair, 40 + index % 2), REQUESTS[name], *cut)


def test_a_teacher_whose_tokens_may_be_outside_of_a_mask_is_refused(pair: Pair) -> None:
    batch = masked_batch_near(pair, 40)
    shape = (len(batch.loss_mask), 1)
    batch = replace(
        batch,
        teacher_tokens=np.zeros(shape, np.int32),
        teacher_logprobs=np.full(shape, -1.0, np.float32),
    )
    distillation = DistillationConfig(divergence=Divergence.REVERSE_KL)
    request = make_request(LossKind.GRPO, distillation=distillation)
    with pytest.raises(RatoonError, match="with a sampling_mask, expected rollouts without"):
        resolve_loss(request, batch, has_frozen_reference=False)
    resolve_loss(request, replace(batch, sampling_mask=None), has_frozen_reference=False)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", [LossKind.GRPO, LossKind.GSPO])
def test_gradients_are_the_same_however_it_is_cut(pair: Pair, kind: LossKind, cut: str) -> None:
    _check(pair, masked_batch_near(pair, 42), make_request(kind, **FULL), *CUTS[cut])


def test_batches_share_tokens_whose_masks_differ_and_tokens_whose_masks_agree(pair: Pair) -> None:
    """The batches of the tests above are worth testing with."""
    for seed in (40, 41, 42):
        batch = masked_batch_near(pair, seed)
        forest = build_forest(batch, sort_sequences(batch), None)
        packed = pack(batch, forest, batch.loss_mask)
        assert split_tokens(packed) > 3
        assert len(packed.term_target) > len(packed.target_token) + 3
        assert packed.kept is not None
        lengths = np.diff(packed.kept.offsets)
        assert {0, 1, 64} <= {*lengths.tolist()}


def test_masks_change_the_gradient(pair: Pair) -> None:
    """So that what is compared elsewhere is theirs."""
    batch = masked_batch_near(pair, 43)
    found = []
    for each in (batch, replace(batch, sampling_mask=None, mask_offsets=None)):
        forward_backward(pair, each, GRPO)
        found.append({name: grad.clone() for name, grad in pair.gradients().items()})
        pair.discard()
    assert min(relative_errors(*found).values()) > 1e-3


def test_a_mask_of_the_whole_vocabulary_changes_no_bit(pair: Pair) -> None:
    batch = masked_batch_near(pair, 44)
    whole = with_kept(batch, [np.arange(64) if on else np.zeros(0, int) for on in batch.loss_mask])
    reports = []
    found = []
    for each in (whole, whole, replace(batch, sampling_mask=None, mask_offsets=None)):
        reports.append(forward_backward(pair, each, GRPO)[0])
        found.append({name: grad.clone() for name, grad in pair.gradients().items()})
        pair.discard()
    for other in found[1:]:
        assert all(torch.equal(found[0][name], grad) for name, grad in other.items())
    assert len({(report.loss, report.kl, report.entropy) for report in reports}) == 1


@pytest.mark.parametrize("cut", ["whole", "streamed"])
def test_a_batch_and_its_journaled_body_give_the_same_bits(pair: Pair, cut: str) -> None:
    batch = masked_batch_near(pair, 45)
    loss = resolve_loss(GRPO, batch, has_frozen_reference=True)
    plan = plan_of(batch, *CUTS[cut])
    found = []
    for each in (batch, batch_from_bytes(batch_to_bytes(batch))):
        pair.trainer.forward_backward(pair.trainer.prepare(each, loss, plan))
        found.append({name: grad.clone() for name, grad in pair.gradients().items()})
        pair.discard()
    assert all(torch.equal(found[0][name], grad) for name, grad in found[1].items())


@pytest.mark.parametrize("use_reference", [False, True])
def test_a_forward_has_log_probs_and_entropies_over_what_is_kept(
    pair: Pair, use_reference: bool
) -> None:
    batch, trainer = masked_batch_near(pair, 46), pair.trainer
    got = trainer.forward(
        trainer.prepare_forward(batch), with_entropy=True, use_reference=use_reference
    )
    truth = hf.all_logprobs(pair.initial, paths_of(batch))
    assert got.entropy is not None
    for found, index in ((got.logprobs, 0), (got.entropy, 1)):
        expected = np.concatenate([each[index].numpy() for each in truth])
        assert np.abs(found - expected)[batch.loss_mask].max() < 1e-10


def test_tokens_that_are_not_trained_are_answered_over_the_whole_vocabulary(pair: Pair) -> None:
    """Also where they were trained but for being outside of their mask."""
    batch = masked_batch_near(pair, 47)
    outside = np.flatnonzero(batch.loss_mask)[::7]
    offsets = batch.mask_offsets
    assert offsets is not None
    assert batch.sampling_mask is not None
    kept = np.split(batch.sampling_mask, offsets[1:-1])
    for token in outside:
        kept[token] = np.zeros(0, np.int32)
    is_outside = np.zeros(len(batch.loss_mask), np.bool_)
    is_outside[outside] = True
    batch = with_kept(replace(batch, loss_mask=batch.loss_mask & ~is_outside), [*kept])
    batch = replace(batch, outside_mask=is_outside)
    report, _ = forward_backward(pair, batch, GRPO, logprobs_of=LogprobsOf.ALL)
    assert_close(pair.gradient_errors(), pair.tolerance)
    assert report.tokens_outside_mask == len(outside)
    (warning,) = [each for each in report.warnings if each.kind == "outside_sampling_mask"]
    assert warning.message.startswith(f"{len(outside)} tokens are outside")
    assert warning.offenders[0].token is not None
    answers = pair.trainer.found
    assert answers is not None
    assert answers.answers_2J is not None
    expected = np.concatenate(
        [each[0].numpy() for each in hf.all_logprobs(pair.oracle.model, paths_of(batch))]
    )
    is_asked = predicted_mask(batch)
    assert (is_asked & ~batch.loss_mask).any()
    assert np.abs(answers.answers_2J[0] - expected)[is_asked].max() < 1e-10


@pytest.mark.parametrize("tuning", [None, LoraTuning(rank=3, alpha=6.0)])
def test_three_steps_of_windows_of_several_calls(tmp_path: Path, tuning: LoraTuning | None) -> None:
    """Whose reference, of an adapter the base, is over what is kept too."""
    folder = write_folder(tmp_path / "base", "qwen3")
    pair = make_pair(folder, scratch=tmp_path / "adapter", tuning=tuning)
    optim = OptimStepConfig(learning_rate=1e-2)
    for seed in range(3):
        calls = [masked_batch_near(pair, 50 + 2 * seed + call) for call in range(2)]
        for batch, budget in zip(calls, (WHOLE, 40), strict=True):
            forward_backward(pair, batch, GRPO, micro_batch_tokens=budget)
        check_step(pair, optim, divide_by=oracle_loss(GRPO, calls[0]).divide_by)


def test_a_step_is_measured_over_what_is_kept(base: FolderBase) -> None:
    """The probe's rollouts are the beginnings of the batch's, with their masks."""
    trainer, batch = make_trainer(base), masked(make_batch(6))
    loss = make_loss(batch)
    optim = make_step(trainer, loss, learning_rate=0.0, max_grad_norm=1.0)
    report = trainer.update(trainer.prepare(batch, loss), optim)
    assert trainer.found is not None
    share = replace(report, update_norm=1.0, weight_norm=1.0)
    probe = probe_of(trainer.found, share)
    assert probe is not None
    assert probe.batch.sampling_mask is not None
    prepared = trainer.prepare_forward(probe.batch)
    # The learning rate was 0, so the weights after the step are those before it.
    after = trainer.forward(prepared, with_entropy=False, use_reference=False)
    figures = probe.figures(after.logprobs)
    assert abs(figures["step_kl"] or 0.0) < 1e-20
    unmasked = replace(probe.batch, sampling_mask=None, mask_offsets=None)
    other = trainer.forward(
        trainer.prepare_forward(unmasked), with_entropy=False, use_reference=False
    )
    assert (probe.figures(other.logprobs)["step_kl"] or 0.0) > 1e-3


@pytest.mark.more
@pytest.mark.parametrize("architecture", ["qwen3_moe", "gemma3", "deepseek_v3", "qwen3_5"])
def test_other_architectures(tmp_path: Path, architecture: str) -> None:
    folder = write_folder(tmp_path / "base", architecture)
    pair = make_pair(folder, scratch=tmp_path / "adapter")
    check_gradients(pair, masked_batch_near(pair, 60), GRPO, micro_batch_tokens=40)


@pytest.mark.parametrize("is_joint", [False, True])
def test_two_ranks_are_one_device(base: FolderBase, is_joint: bool) -> None:
    """A micro-batch each, or each micro-batch together, streamed."""
    alone, batch = make_trainer(base), masked(make_batch(6))
    loss = make_loss(batch, LossKind.GSPO, entropy_coefficient=0.1)
    with ranked(alone.spec, 2) as (many, _):
        if is_joint:
            plan = together(plan_of(batch, 16, EAGER), 2)
        else:
            plan = plan_of(batch, 40, num_ranks=2)
            assert {part.rank for part in plan.micro_batches} == {0, 1}
        report = many.forward_backward(many.prepare(batch, loss, plan))
        sums = [*many.ranks.all(Rank.sums_of, [*many.model.named_trainable()])]
    one = alone.forward_backward(alone.prepare(batch, loss, plan_of(batch, WHOLE)))
    assert report.entropy == pytest.approx(one.entropy, rel=1e-12)
    parameters = alone.model.named_trainable()
    got = {name: sum(each[i] for each in sums) for i, name in enumerate(parameters)}
    expected = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    assert_close(relative_errors(got, expected), 1e-10)  # type: ignore[arg-type]
