"""A loss of single tokens, computed with the LM head row by row: the bits of two phases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ratoon.model.spec import FolderBase
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.packed import UpdatePlan
from ratoon.rollout.prefixes import sort_sequences
from ratoon.train import passes, prepare
from ratoon.train.loss.compute import is_of_single_tokens
from ratoon.train.loss.spec import Loss
from ratoon.train.trainer import Trainer
from ratoon_kernels.token_logprobs import reference
from ratoon_proto.types import (
    CorrectionLevel,
    CorrectionMode,
    KlConfig,
    KlKind,
    LoraTuning,
    LossKind,
    OldLogprobs,
    OldLogprobsKind,
    ReferenceKind,
    RolloutCorrection,
    SharedTokens,
    StepReport,
)
from tests.model.builders import randomize
from tests.plans import make_plan
from tests.tiny_models import write_folder
from tests.train.equivalence_runs import EAGER
from tests.train.trainer_runs import OUTCOMES, gradients_of, make_batch, make_loss, make_trainer

FROZEN = KlConfig(kind=KlKind.K3, coefficient=0.2, reference=ReferenceKind.FROZEN)
WHOLE, BUDGET = 1 << 16, 60
NO_RATIO = (LossKind.REINFORCE, LossKind.CROSS_ENTROPY, LossKind.DISTILLATION)
CHANGES: list[dict[str, Any]] = [
    {"kind": LossKind.GRPO, "kl": FROZEN, "entropy_coefficient": 0.01},
    {"kind": LossKind.DAPO, "shared_tokens": SharedTokens.ONCE},
    {"kind": LossKind.CISPO},
    {"kind": LossKind.REINFORCE},
    {"kind": LossKind.IMPORTANCE_SAMPLING},
]


def _correction(level: CorrectionLevel) -> RolloutCorrection:
    return RolloutCorrection(mode=CorrectionMode.TRUNCATE, level=level, low=0.5, high=2.0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> FolderBase:
    folder = write_folder(tmp_path_factory.mktemp("rows") / "base", "qwen3_untied")
    return FolderBase(folder=str(folder))


@pytest.fixture(scope="module")
def trainer(base: FolderBase) -> Trainer:
    return make_trainer(base, tokens=WHOLE)


def _plan(batch: RolloutBatch, loss: Loss, budget: int) -> UpdatePlan:
    kept_S = prepare.select(batch, loss, 0).kept_S & prepare.has_trained_tokens(batch)
    return make_plan(batch, sort_sequences(batch), kept_S, budget, EAGER)


def _run(
    trainer: Trainer, batch: RolloutBatch, loss: Loss, budget: int
) -> tuple[dict[str, Tensor], StepReport]:
    trainer.discard_gradients()
    report = trainer.forward_backward(trainer.prepare(batch, loss, _plan(batch, loss, budget)))
    return gradients_of(trainer), report


def _few_rows_a_chunk(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    vocab_size = len(trainer.model.lm_head_VD)
    patch.setattr(reference, "LOGIT_BYTES", 3 * 8 * vocab_size)


@pytest.mark.parametrize("budget", [WHOLE, BUDGET])
@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: changes["kind"].value)
def test_gradients_have_the_bits_of_two_phases(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], budget: int
) -> None:
    """Three rows at a time; streamed, terms of a shared token may add up in another order."""
    _few_rows_a_chunk(monkeypatch, trainer)
    batch = make_batch(3)
    loss = make_loss(batch, **changes)
    assert is_of_single_tokens(loss)
    found, report = _run(trainer, batch, loss, budget)
    monkeypatch.setattr(passes, "is_of_single_tokens", lambda _loss: False)
    expected, expected_report = _run(trainer, batch, loss, budget)
    for name, gradient in expected.items():
        if budget == WHOLE:
            assert torch.equal(found[name], gradient), name
        torch.testing.assert_close(found[name], gradient, rtol=1e-11, atol=1e-14)
    for name in ("loss", "entropy", "kl", "ratio_max", "clip_fraction_high", "sampler_kl"):
        assert getattr(report, name) == pytest.approx(getattr(expected_report, name)), name


@pytest.mark.parametrize(
    "targets", [("q_proj", "down_proj"), ("q_proj", "embed_tokens", "lm_head"), ("lm_head",)]
)
def test_an_adapter_has_the_bits_of_two_phases(
    base: FolderBase, monkeypatch: pytest.MonkeyPatch, targets: tuple[str, ...]
) -> None:
    """The head is frozen: nothing of its weight is differentiated."""
    tuning = LoraTuning(rank=2, alpha=4, target_modules=targets)
    trainer = make_trainer(base, tokens=WHOLE, tuning=tuning)
    _few_rows_a_chunk(monkeypatch, trainer)
    randomize(trainer.model, 1)
    batch = make_batch(5)
    loss = make_loss(batch)
    found, _ = _run(trainer, batch, loss, WHOLE)
    assert trainer.model.lm_head_VD.grad is None
    monkeypatch.setattr(passes, "is_of_single_tokens", lambda _loss: False)
    expected, _ = _run(trainer, batch, loss, WHOLE)
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def test_tied_weights_add_up_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding's gradient comes in two parts then, so bits may differ, sums do not."""
    folder = write_folder(tmp_path / "tied", "qwen3")
    trainer = make_trainer(FolderBase(folder=str(folder)), tokens=WHOLE)
    batch = make_batch(5)
    loss = make_loss(batch)
    found, _ = _run(trainer, batch, loss, 40)
    monkeypatch.setattr(passes, "is_of_single_tokens", lambda _loss: False)
    expected, _ = _run(trainer, batch, loss, 40)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-15)


def test_logits_are_computed_once(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(3)
    calls: list[int] = []
    scaled_logits = reference._scaled_logits

    def counted(*args: Any) -> Tensor:
        calls.append(1)
        return scaled_logits(*args)

    monkeypatch.setattr(reference, "_scaled_logits", counted)
    _run(trainer, batch, make_loss(batch, LossKind.GRPO), WHOLE)
    assert len(calls) == 1
    _run(trainer, batch, make_loss(batch, LossKind.GSPO), WHOLE)
    assert len(calls) == 3


def test_what_depends_on_a_sequence_is_not_of_single_tokens() -> None:
    batch = make_batch(3)
    assert not is_of_single_tokens(make_loss(batch, LossKind.GSPO))
    loss = make_loss(batch, LossKind.GRPO)
    by_token = replace(loss, correction=_correction(CorrectionLevel.TOKEN))
    by_sequence = replace(loss, correction=_correction(CorrectionLevel.SEQUENCE))
    assert is_of_single_tokens(by_token)
    assert not is_of_single_tokens(by_sequence)


@pytest.mark.parametrize("kind", [kind for kind in LossKind if kind is not LossKind.VALUE])
def test_a_loss_called_of_single_tokens_is_one(
    trainer: Trainer, kind: LossKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row by row a loss of sequences has other gradients, and only such a loss has."""
    _few_rows_a_chunk(monkeypatch, trainer)
    batch = make_batch(7, **OUTCOMES.get(kind, {}))
    rng, size = np.random.default_rng(0), len(batch.response_tokens)
    batch = replace(batch, old_logprobs=rng.normal(-3, 0.5, size).astype(np.float32))
    changes = {} if kind in NO_RATIO else {"old_logprobs": OldLogprobs(kind=OldLogprobsKind.GIVEN)}
    loss = make_loss(batch, kind, **changes)
    found, _ = _run(trainer, batch, loss, WHOLE)
    monkeypatch.setattr(passes, "is_of_single_tokens", lambda _loss: True)
    by_rows, _ = _run(trainer, batch, loss, WHOLE)
    assert all(gradient.any() for name, gradient in found.items() if ".layers." in name)
    is_same = all(torch.equal(found[name], by_rows[name]) for name in found)
    assert is_same == is_of_single_tokens(loss)
