"""What reports say of routers: figures of the tokens of each rollout run alone by Hugging Face."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from ratoon.model.spec import FolderBase
from ratoon.planner.costs import DEFAULT_COSTS, CostModel
from ratoon.rollout.batch import RolloutBatch
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.loss.spec import Loss
from ratoon.train.spec import PassHooks
from ratoon.train.trainer import Trainer
from ratoon_proto.types import (
    KlConfig,
    KlKind,
    LossConfig,
    LossKind,
    ReferenceKind,
    RouterReport,
    StepReport,
)
from tests.equivalence import paths_of
from tests.oracle import hf
from tests.tiny_models import write_folder
from tests.train.equivalence_runs import (
    EAGER,
    WHOLE,
    Pair,
    plan_of,
    random_batch_near,
    run_two_ranks,
)
from tests.train.recorded_routes import NUM_EXPERTS, TOP_K
from tests.train.trainer_runs import make_batch, make_step, make_trainer

# With a reference, which has routers of its own.
REQUEST = LossConfig(
    kind=LossKind.REINFORCE,
    kl=KlConfig(kind=KlKind.K2, coefficient=0.1, reference=ReferenceKind.FROZEN),
)


def _expected(model: nn.Module, batches: Sequence[RolloutBatch]) -> list[RouterReport]:
    """By transformers' own routers; of layers with experts, in order."""
    logits: list[list[torch.Tensor]] = []
    for batch in batches:
        for path in paths_of(batch):
            if not path.mask.any():
                continue
            with torch.no_grad():
                logits.append(hf.router_logits(model, path))
    reports: list[RouterReport] = []
    for index, of_layer in enumerate(zip(*logits, strict=True)):
        logits_TE = torch.cat(of_layer)
        p_TE = logits_TE.softmax(-1)
        load_E = torch.bincount(p_TE.topk(TOP_K).indices.flatten(), minlength=NUM_EXPERTS)
        reports.append(
            RouterReport(
                layer=index,
                max_load=float(load_E.max()) / (len(logits_TE) * TOP_K / NUM_EXPERTS),
                unused_experts=int((load_E == 0).sum()),
                entropy=float(-(p_TE * p_TE.log()).sum(-1).mean()),
            )
        )
    return reports


def _loss(batch: RolloutBatch) -> Loss:
    return resolve_loss(REQUEST, batch, has_frozen_reference=True)


def _run(
    trainer: Trainer, batch: RolloutBatch, budget: int = WHOLE, costs: CostModel = DEFAULT_COSTS
) -> StepReport:
    plan = plan_of(batch, budget, costs)
    return trainer.forward_backward(trainer.prepare(batch, _loss(batch), plan))


def _assert_routers(report: StepReport, expected: Sequence[RouterReport]) -> None:
    assert len(report.routers) == len(expected) > 0
    for got, truth in zip(report.routers, expected, strict=True):
        assert (got.layer, got.unused_experts) == (truth.layer, truth.unused_experts)
        assert got.max_load == pytest.approx(truth.max_load, rel=1e-15)
        assert got.entropy == pytest.approx(truth.entropy, rel=1e-10)


@pytest.mark.parametrize(
    ("seed", "budget", "costs"),
    [(0, WHOLE, DEFAULT_COSTS), (1, 40, DEFAULT_COSTS), (0, 16, EAGER)],
)
def test_routers_count_each_rollout_alone_however_it_is_cut(
    expert_pair: Pair, seed: int, budget: int, costs: CostModel
) -> None:
    batch = random_batch_near(expert_pair, seed)
    report = _run(expert_pair.trainer, batch, budget, costs)
    assert report.unshared_tokens > report.packed_tokens
    expected = _expected(expert_pair.oracle.model, [batch])
    assert len({each.max_load for each in expected} | {1.0}) == 3
    _assert_routers(report, expected)


def test_a_step_reports_its_window_and_no_other(expert_pair: Pair) -> None:
    batches = [random_batch_near(expert_pair, seed) for seed in (2, 3)]
    _run(expert_pair.trainer, random_batch_near(expert_pair, 4))
    expert_pair.trainer.discard_gradients()
    for batch in batches:
        _run(expert_pair.trainer, batch, 40)
    step = make_step(expert_pair.trainer, _loss(batches[0]), learning_rate=0.0)
    report = expert_pair.trainer.optim_step(step)
    _assert_routers(report, _expected(expert_pair.oracle.model, batches))


def test_a_pass_that_stops_half_way_leaves_no_counts(expert_pair: Pair) -> None:
    batch = random_batch_near(expert_pair, 5)
    plan = plan_of(batch, 40)
    assert len(plan.micro_batches) > 1

    def fail(done: int, _planned: int, _tokens: int) -> None:
        if done:
            raise OSError("stopped")

    with pytest.raises(OSError, match="stopped"):
        expert_pair.trainer.forward_backward(
            expert_pair.trainer.prepare(batch, _loss(batch), plan), PassHooks(on_progress=fail)
        )
    expert_pair.discard()
    _assert_routers(_run(expert_pair.trainer, batch), _expected(expert_pair.oracle.model, [batch]))


@pytest.mark.parametrize("is_joint", [False, True])
def test_routers_of_ranks_add_up(tmp_path: Path, is_joint: bool) -> None:
    """Where ranks run micro-batches of their own, and where they run each together."""
    base = FolderBase(folder=str(write_folder(tmp_path, "qwen3_moe")))
    batch = make_batch(6)
    both, one = run_two_ranks(base, batch, _loss(batch), is_joint=is_joint)
    _assert_routers(both, one.routers)


def test_layers_without_experts_have_no_router(tmp_path: Path) -> None:
    mixed = FolderBase(folder=str(write_folder(tmp_path / "mixed", "qwen3_moe_mixed")))
    report = _run(make_trainer(mixed), make_batch(6))
    assert [each.layer for each in report.routers] == [1]
    dense = FolderBase(folder=str(write_folder(tmp_path / "dense", "qwen3")))
    assert _run(make_trainer(dense), make_batch(6)).routers == ()
