"""What is packed between the plan and the device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.spec import FolderBase
from ratoon.rollout.packed import Stage, UpdatePlan
from ratoon.train.gradient_window import WindowState
from tests.train.trainer_runs import make_batch, make_loss, make_trainer


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
