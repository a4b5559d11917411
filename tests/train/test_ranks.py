"""Policies of several ranks: the updates of one, whoever runs what and keeps what."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ratoon.model.spec import FolderBase, LoraTuning, ModelDtype
from ratoon.train.config import LossKind, OptimizerStates
from tests.train.rank_runs import ranked
from tests.train.trainer_runs import (
    assert_close,
    make_batch,
    make_loss,
    make_step,
    make_trainer,
)


def _spread(plan, num_ranks):
    parts = tuple(replace(p, rank=i % num_ranks) for i, p in enumerate(plan.micro_batches))
    return replace(plan, micro_batches=parts)


def _update(trainer, seed, num_ranks):
    batch = make_batch(seed)
    loss = make_loss(batch)
    plan = _spread(trainer.prepare(batch, loss).plan, num_ranks)
    assert len(plan.micro_batches) > 2
    report = trainer.update(batch, loss, make_step(trainer, loss), plan)
    assert not report.skipped
    return report


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_three_updates_are_those_of_one_rank(base: FolderBase, num_ranks: int) -> None:
    alone = make_trainer(base, tokens=32)
    with ranked(alone.spec, num_ranks) as (trainer, _):
        for seed in range(3):
            one, many = _update(alone, seed, 1), _update(trainer, seed, num_ranks)
            assert many.loss == pytest.approx(one.loss, rel=1e-12)
            assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-10)
        assert_close(
            {n: p.detach() for n, p in trainer.model.named_trainable().items()},
            {n: p.detach() for n, p in alone.model.named_trainable().items()},
        )
        print(trainer.state_digest())
