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
from ratoon.rollout.forest import build_forest, pack
from ratoon.rollout.prefixes import sort_sequences
from ratoon.rollout.selection import predicted_mask
from ratoon.rollout.serial import batch_from_bytes, batch_to_bytes
from ratoon.train.loss.resolve import resolve_loss
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
    CUTS,
    WHOLE,
    Pair,
    check_gradients,
    check_step,
    forward_backward,
    make_pair,
    make_request,
    oracle_loss,
    plan_of,
    run_two_ranks,
)
from tests.train.recorded_masks import masked, masked_batch_near, split_tokens, with_kept
from tests.train.trainer_runs import make_batch, make_loss, make_step, make_trainer

FROZEN_K3 = KlConfig(kind=KlKind.K3, coefficient=0.2, reference=ReferenceKind.FROZEN)
FULL: dict[str, Any] = {"kl": FROZEN_K3, "entropy_coefficient": 0.05}
GIVEN_OLD = OldLogprobs(kind=OldLogprobsKind.GIVEN)
GRPO = LossConfig(kind=LossKind.GRPO, **FULL)


Row = tuple[LossConfig, int, str]


def _rows() -> Iterator[tuple[str, Row]]:
    """The request, the seed of its batch and a cut, by turns where the row is not about it."""
    requests = {
        f"{kind}": make_request(kind, **FULL)
        for kind in LossKind
        if kind not in (LossKind.CROSS_ENTROPY, LossKind.DISTILLATION, LossKind.VALUE)
    }
    for kind in (LossKind.GRPO, LossKind.GSPO):
        requests[f"{kind} once"] = make_request(kind, shared_tokens=SharedTokens.ONCE, **FULL)
        for cut in CUTS:
            yield f"{kind} {cut}", (make_request(kind, **FULL), 42, cut)
    for level in (CorrectionLevel.TOKEN, CorrectionLevel.SEQUENCE):
        rule = CorrectionMask(level=level, low=0.7, high=1.4)
        requests[f"grpo masked by {level}"] = make_request(
            LossKind.GRPO, old_logprobs=GIVEN_OLD, correction_mask=rule
        )
    for index, (name, request) in enumerate(requests.items()):
        yield name, (request, 40 + index % 2, list(CUTS)[index % len(CUTS)])


ROWS = dict(_rows())


@pytest.mark.parametrize("name", ROWS)
def test_gradients_and_figures_are_those_of_each_rollout_alone(pair: Pair, name: str) -> None:
    request, seed, cut = ROWS[name]
    batch = masked_batch_near(pair, seed)
    check_gradients(pair, batch, request, plan=plan_of(batch, *CUTS[cut]))


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
        found.append(pair.gradients())
        pair.discard()
    assert min(relative_errors(*found).values()) > 1e-3


def test_a_mask_of_the_whole_vocabulary_changes_no_bit(pair: Pair) -> None:
    batch = masked_batch_near(pair, 44)
    whole = with_kept(batch, [np.arange(64) if on else np.zeros(0, int) for on in batch.loss_mask])
    reports = []
    found = []
    for each in (whole, whole, replace(batch, sampling_mask=None, mask_offsets=None)):
        reports.append(forward_backward(pair, each, GRPO)[0])
        found.append(pair.gradients())
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
        found.append(pair.gradients())
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


@pytest.mark.parametrize(
    "tuning",
    [
        None,
        LoraTuning(rank=3, alpha=6.0),
        LoraTuning(rank=3, alpha=6.0, target_modules=("o_proj", "embed_tokens", "lm_head")),
    ],
)
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
    batch = masked(make_batch(6))
    loss = make_loss(batch, LossKind.GSPO, entropy_coefficient=0.1)
    both, one = run_two_ranks(base, batch, loss, is_joint=is_joint)
    assert both.entropy == pytest.approx(one.entropy, rel=1e-12)
