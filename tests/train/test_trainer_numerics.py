"""The trainer's numbers: log-probs of a Forward, bits, fingerprint, and bfloat16.

A packed run's gradients are as near to float32's as those of replicated runs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.spec import FolderBase, ModelDtype
from ratoon.train.gradient_window import WindowState
from ratoon.train.trainer import Trainer
from ratoon_kernels.tree_attention import block_flash
from ratoon_kernels.tree_attention.blocks import BlockMask
from ratoon_kernels.tree_attention.operands import Operands
from ratoon_proto.types import (
    CorrectionLevel,
    CorrectionMode,
    DivideBy,
    LossKind,
    RolloutCorrection,
    TokenWeight,
)
from tests.train.bf16_runs import (
    FORESTS,
    LONGEST,
    MAX_PARAMETER_RATIO,
    MAX_RATIO,
    SEEDS,
    Forest,
    Pair,
    assert_as_near_as_replicated,
    compare,
    make_pair,
    several_groups,
)
from tests.train.trainer_runs import (
    FROM_FORWARD,
    FROZEN,
    ON_POLICY,
    OUTCOMES,
    assert_equal,
    forward_backward,
    make_batch,
    make_loss,
    make_step,
    make_trainer,
    weights_of,
)


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
        forward, arrays = trainer.prepare_forward(batch), None
        if old is FROM_FORWARD:
            arrays = trainer.forward(forward, with_entropy=False, use_reference=False).logprobs
        step = make_step(trainer, loss)
        report = trainer.update(
            trainer.prepare(batch, loss, forward.plan, old_logprobs_J=arrays), step
        )
        assert report.ratio_min == report.ratio_max == 1.0
        assert report.correction_weight_mean != 1.0
        digests.append(trainer.state_digest())
    assert digests[0] == digests[1]


def test_forward_of_other_rollouts_is_refused(base: FolderBase) -> None:
    trainer, batch = make_trainer(base), make_batch(9)
    loss = make_loss(batch, old_logprobs=FROM_FORWARD)
    with pytest.raises(RatoonError) as caught:
        forward_backward(
            trainer, batch, loss, old_logprobs_J=np.zeros(len(batch.loss_mask) + 1, np.float32)
        )
    assert caught.value.field == "loss.old_logprobs.forward_operation_id"
    assert trainer.window_state is WindowState.EMPTY


def test_forward_needs_a_reference_to_use_one(base: FolderBase) -> None:
    spec = replace(make_trainer(base).spec, keep_reference=False)
    trainer, batch = Trainer.create(spec), make_batch(10)
    with pytest.raises(RatoonError) as caught:
        trainer.forward(trainer.prepare_forward(batch), with_entropy=False, use_reference=True)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT


def test_repeated_updates_give_the_same_bits(base: FolderBase) -> None:
    batch = make_batch(11)
    runs = []
    for _ in range(2):
        trainer = make_trainer(base, dtype=ModelDtype.FLOAT32, tokens=30)
        for _ in range(2):
            loss = make_loss(batch, kl=FROZEN, entropy_coefficient=0.01)
            step = make_step(trainer, loss)
            trainer.update(trainer.prepare(batch, loss), step)
        runs.append(weights_of(trainer))
    assert_equal(runs[0], runs[1])


@pytest.mark.parametrize("kind", list(LossKind))
def test_every_loss_trains_in_bfloat16(base: FolderBase, kind: LossKind) -> None:
    """Its gradient sums are near those of the same weights in float64, and a step is applied."""
    batch = make_batch(14, **OUTCOMES.get(kind, {}))
    low_precision, wide = (
        make_trainer(base, dtype=dtype, value_head=kind is LossKind.VALUE)
        for dtype in (ModelDtype.BFLOAT16, ModelDtype.FLOAT64)
    )
    with torch.no_grad():
        for name, parameter in wide.model.named_trainable().items():
            parameter.copy_(low_precision.model.named_trainable()[name])
    loss = make_loss(batch, kind, token_weight=TokenWeight.PER_TOKEN)
    constant = 3.0 if kind is LossKind.DR_GRPO else None
    by = DivideBy.TOKENS if constant is None else DivideBy.CONSTANT
    step = make_step(low_precision, loss, divide_by=by, divide_constant=constant)
    reports = [
        trainer.update(trainer.prepare(batch, loss), step) for trainer in (low_precision, wide)
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


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    return [make_pair("tiny", seed, device="cpu", backend="reference") for seed in SEEDS]


@pytest.mark.more
@pytest.mark.parametrize("forest", FORESTS)
def test_packed_error_is_that_of_replicated_runs(pairs: list[Pair], forest: Forest) -> None:
    found = [compare(pair, forest, seed) for seed, pair in zip(SEEDS, pairs, strict=True)]
    assert_as_near_as_replicated(found)


@pytest.mark.more
def test_a_loss_of_precision_is_seen(pairs: list[Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of more than one rollout rounds its output to 4 bits: far over the bound."""
    forward = block_flash.block_forward

    def coarse(block: Operands, mask: BlockMask) -> tuple[Tensor, Tensor]:
        out_QNH, lse_NQ = forward(block, mask)
        if len(block.end_T) > LONGEST:
            out_QNH = out_QNH.to(torch.float8_e4m3fn).to(out_QNH.dtype)
        return out_QNH, lse_NQ

    monkeypatch.setattr(block_flash, "block_forward", coarse)
    found = compare(pairs[0], several_groups, 0)
    assert found.ratio > 2 * MAX_RATIO
    assert found.worst_ratio > 2 * MAX_PARAMETER_RATIO
