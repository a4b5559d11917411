"""Small trainers and what is done with them: shared by the tests of the trainer and checkpoints.

In: a model folder and a few options. Out: trainers, batches, losses. Invariant: the same options
give the same trainer and the same batch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratoon.model.spec import FolderBase, ModelDtype, ModelSpec, PresetBase
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.raw import RawGroup, RawRollout
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.loss.spec import Loss, OptimStep
from ratoon.train.optim.resolve import resolve_optim
from ratoon.train.optim.state import OptimizerState
from ratoon.train.rollout_figures import FoundRollouts
from ratoon.train.spec import NO_HOOKS, PassHooks, TrainerSpec
from ratoon.train.trainer import Trainer
from ratoon_proto.types import (
    AdamWConfig,
    DistillationConfig,
    Divergence,
    FullTuning,
    KlConfig,
    KlKind,
    LoraTuning,
    LossConfig,
    LossKind,
    OldLogprobs,
    OldLogprobsKind,
    OptimStepConfig,
    ReferenceKind,
    StepReport,
    ValueLossConfig,
)
from tests import builders

ON_POLICY = OldLogprobs(kind=OldLogprobsKind.ON_POLICY)
FROM_FORWARD = OldLogprobs(kind=OldLogprobsKind.FROM_FORWARD, forward_operation_id="op-1")
FROZEN = KlConfig(kind=KlKind.K3, coefficient=0.2, reference=ReferenceKind.FROZEN)

# What a batch of a loss has in place of advantages.
OUTCOMES: dict[LossKind, dict[str, Any]] = {
    LossKind.CROSS_ENTROPY: {"outcome": "weights"},
    LossKind.DISTILLATION: {"outcome": "none", "num_teacher_tokens": 5},
    LossKind.VALUE: {"outcome": "none", "with_returns": True},
}

SHORT = builders.limits(vocab_size=64, max_sequence_tokens=12)


def make_trainer(
    base: FolderBase | PresetBase,
    *,
    dtype: ModelDtype = ModelDtype.FLOAT64,
    tokens: int = 64,
    tuning: FullTuning | LoraTuning | None = None,
    value_head: bool = False,
) -> Trainer:
    tuning = tuning or FullTuning()
    return Trainer.create(
        TrainerSpec(
            model=ModelSpec(base=base, tuning=tuning, dtype=dtype, seed=0, value_head=value_head),
            optimizer=AdamWConfig(weight_decay=0.1),
            deterministic=True,
            micro_batch_tokens=tokens,
            keep_reference=True,
            attention_backend="",
            device="cpu",
            num_threads=1,
        )
    )


def make_batch(seed: int, **knobs: Any) -> RolloutBatch:
    fields: dict[str, Any] = {"num_groups": 4, "outcome": "advantages"}
    return builders.random_batch(np.random.default_rng(seed), **(fields | knobs))


def bad_groups() -> tuple[list[RawGroup], list[RawGroup]]:
    """A request with a rollout for each reason, and the same without them.

    Group 0 loses one of four, group 1 one of two and so both, group 2 all of one, group 3 four of
    seven, group 4 none.
    """
    rng = np.random.default_rng(5)

    def one(**changes: Any) -> RawRollout:
        length = int(changes.pop("length", rng.integers(2, 6)))
        raw = builders.rollout(rng.integers(0, 64, length), policy_version=9, **changes)
        return builders.dressed(raw, rng, outcome="reward", with_logprobs=True)

    def nan(raw: RawRollout) -> RawRollout:
        assert raw.sampler_logprobs is not None
        return replace(raw, sampler_logprobs=raw.sampler_logprobs * np.float32("nan"))

    good = [[one() for _ in range(num)] for num in (3, 1, 0, 3, 3)]
    stale = replace(one(), policy_version=3)
    bad = [
        [(1, nan(one()))],
        [(0, replace(one(), reward=float("inf")))],
        [(0, one(length=40))],
        [(0, stale), (2, replace(one(), reward=float("nan"))), (5, stale), (6, nan(one()))],
        [],
    ]
    sent, left = [], []
    for g, (rollouts, worse) in enumerate(zip(good, bad, strict=True)):
        every = list(rollouts)
        for place, raw in worse:
            every.insert(place, raw)
        sent.append(builders.group([1, 2 + g], every, f"group-{g}"))
        if g not in (1, 2):
            left.append(builders.group([1, 2 + g], rollouts, f"group-{g}"))
    return sent, left


def make_loss(batch: RolloutBatch, kind: LossKind = LossKind.GRPO, **changes: Any) -> Loss:
    fields: dict[str, Any] = {"old_logprobs": ON_POLICY}
    if kind in (LossKind.REINFORCE, LossKind.CROSS_ENTROPY):
        fields = {}
    if kind is LossKind.DISTILLATION:
        fields = {"distillation": DistillationConfig(Divergence.JENSEN_SHANNON, beta=0.3)}
    if kind is LossKind.VALUE:
        fields = {"value": ValueLossConfig(clip=0.4)}
    return resolve_loss(
        LossConfig(kind=kind, **(fields | changes)),
        batch,
        has_frozen_reference=True,
        has_value_head=kind is LossKind.VALUE,
    )


def make_step(trainer: Trainer, loss: Loss, **changes: Any) -> OptimStep:
    fields: dict[str, Any] = {"learning_rate": 1e-2}
    return resolve_optim(
        OptimStepConfig(**(fields | changes)), loss.normalisation, trainer.spec.optimizer
    )


def forward_backward(
    trainer: Trainer,
    batch: RolloutBatch,
    loss: Loss,
    old_logprobs_J: NDArray[np.floating] | None = None,
    hooks: PassHooks = NO_HOOKS,
) -> StepReport:
    prepared = trainer.prepare(batch, loss, old_logprobs_J=old_logprobs_J)
    return trainer.forward_backward(prepared, hooks)


def update(
    trainer: Trainer, seed: int, *, learning_rate: float = 1e-2, **loss_fields: Any
) -> StepReport:
    """An update of the batch of `seed`, which is not skipped."""
    batch = make_batch(seed)
    loss = make_loss(batch, **loss_fields)
    step = make_step(trainer, loss, learning_rate=learning_rate)
    report = trainer.update(trainer.prepare(batch, loss), step)
    assert not report.skipped
    return report


def gradients_of(trainer: Trainer) -> dict[str, Tensor]:
    found = {}
    for name, parameter in trainer.model.named_trainable().items():
        assert parameter.grad is not None
        found[name] = parameter.grad.clone()
    return found


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    """Copies; masters where they are tensors of their own."""
    return state_of(trainer).weights


def state_of(trainer: Trainer) -> OptimizerState:
    """A copy, of a trainer of one rank."""
    return trainer.ranks.own.optimizer.state().on_host()


def assert_equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name


def assert_close(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    """rel-L2 <= 1e-10 per parameter, relative at least to a millionth of all."""
    total = math.sqrt(sum(float(tensor.square().sum()) for tensor in two.values()))
    assert total > 0
    for name, tensor in one.items():
        scale = max(float(two[name].norm()), 1e-6 * total)
        assert float((tensor - two[name]).norm()) <= 1e-10 * scale, name


def assert_same_found(found: FoundRollouts | None, other: FoundRollouts | None) -> None:
    """Two passes over one batch found the same of every token, and so of every rollout."""
    assert found is not None
    assert other is not None
    assert not np.isnan(other.columns_4J[0]).all()
    np.testing.assert_allclose(found.columns_4J, other.columns_4J, rtol=1e-8, atol=1e-10)
    for name in ("gap_max_S", "ratio_max_S", "clipped_S", "weight_share_S"):
        mine, theirs = getattr(found.figures, name), getattr(other.figures, name)
        np.testing.assert_allclose(mine, theirs, rtol=1e-8, atol=1e-10, err_msg=name)
