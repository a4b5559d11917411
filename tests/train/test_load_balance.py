"""The balance loss of routers: value and gradients of the formula over each rollout run alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.spec import FolderBase
from ratoon.planner.costs import DEFAULT_COSTS, CostModel
from ratoon.rollout.batch import RolloutBatch
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.loss.spec import Loss
from ratoon_proto.types import LoraTuning, LossConfig, LossKind, SharedTokens, TokenWeight
from tests.equivalence import assert_close, paths_of, relative_errors
from tests.oracle import hf
from tests.tiny_models import ROUTED, write_folder
from tests.train.equivalence_runs import (
    CUTS,
    EAGER,
    WHOLE,
    Pair,
    default_divisor,
    forward_backward,
    make_pair,
    plan_of,
    random_batch_near,
)
from tests.train.rank_runs import ranked, together
from tests.train.recorded_routes import NUM_EXPERTS, TOP_K, routed
from tests.train.trainer_runs import make_batch, make_step, make_trainer

COEFFICIENT = 0.75
OF_TOKENS = LossConfig(kind=LossKind.REINFORCE, router_aux_loss_coefficient=COEFFICIENT)
REQUESTS = {
    "of_tokens": OF_TOKENS,
    "of_sequences": replace(OF_TOKENS, token_weight=TokenWeight.PER_SEQUENCE),
    "of_whole_sequences": replace(OF_TOKENS, shared_tokens=SharedTokens.ONCE),
}


def _loss(batch: RolloutBatch) -> Loss:
    return resolve_loss(OF_TOKENS, batch, has_frozen_reference=True)


def _balance_alone(model: nn.Module, batch: RolloutBatch, weight_S: list[float]) -> float:
    """The sum of w_s L_s, whose gradient times the coefficient is added to the parameters'."""
    total = 0.0
    for path, weight in zip(paths_of(batch), weight_S, strict=True):
        if not weight:
            continue
        loss = torch.zeros((), dtype=torch.float64)
        for p_TE, chosen_TC in hf.routes(model, path):
            num_experts = p_TE.shape[1]
            f_E = torch.bincount(chosen_TC.flatten(), minlength=num_experts).double()
            f_E = f_E * num_experts / chosen_TC.numel()
            loss = loss + (f_E * p_TE.mean(0)).sum()
        (COEFFICIENT * weight * loss).backward()
        total += weight * loss.item()
    return total


def _weights(request: LossConfig, batch: RolloutBatch) -> list[float]:
    """w_s by the definition; a token that is counted once is the first rollout's that has it."""
    seen: set[tuple[float, tuple[int, ...]]] = set()
    weights: list[float] = []
    for path in paths_of(batch):
        own = 0
        for t in path.trained.tolist():
            key = path.temperature, tuple(path.tokens[: len(path.prompt) + t + 1].tolist())
            own += key not in seen
            if request.shared_tokens is SharedTokens.ONCE:
                seen.add(key)
        is_mean = request.token_weight is TokenWeight.PER_SEQUENCE
        weights.append(float(own > 0) if is_mean else float(own))
    return weights


@pytest.mark.parametrize(
    ("name", "budget", "costs"),
    [
        *(("of_tokens", *cut) for cut in CUTS.values()),
        ("of_sequences", *CUTS["cut"]),
        ("of_whole_sequences", *CUTS["streamed"]),
    ],
)
def test_loss_and_gradients_are_those_of_each_rollout_alone(
    expert_pair: Pair, name: str, budget: int, costs: CostModel
) -> None:
    request, batch = REQUESTS[name], random_batch_near(expert_pair, 1)
    plan = plan_of(batch, budget, costs)
    report, sums = forward_backward(expert_pair, batch, request, plan=plan)
    assert report.unshared_tokens > report.packed_tokens
    weight_S = _weights(request, batch)
    total = _balance_alone(expert_pair.oracle.model, batch, weight_S)
    assert_close(expert_pair.gradient_errors(), expert_pair.tolerance)
    # Two layers, of 1 each where their load is even.
    assert report.router_aux_loss == pytest.approx(total / sum(weight_S), rel=1e-10)
    assert report.router_aux_loss is not None
    assert 2.0 < report.router_aux_loss < 2 * NUM_EXPERTS / TOP_K
    balance = COEFFICIENT * total / default_divisor(request, batch, sums)
    assert report.policy_gradient_loss is not None
    assert report.loss == pytest.approx(report.policy_gradient_loss + balance, rel=1e-10)


@pytest.mark.parametrize(("budget", "costs"), [(WHOLE, DEFAULT_COSTS), (16, EAGER)])
def test_with_recorded_routes_it_counts_those(
    expert_pair: Pair, budget: int, costs: CostModel
) -> None:
    batch = routed(random_batch_near(expert_pair, 1))
    plan = plan_of(batch, budget, costs)
    report, _ = forward_backward(expert_pair, batch, OF_TOKENS, plan=plan)
    assert report.route_mismatch
    weight_S = _weights(OF_TOKENS, batch)
    total = _balance_alone(expert_pair.oracle.model, batch, weight_S)
    assert_close(expert_pair.gradient_errors(), expert_pair.tolerance)
    assert report.router_aux_loss == pytest.approx(total / sum(weight_S), rel=1e-10)


@pytest.mark.parametrize("architecture", ROUTED)
def test_routers_of_other_kinds_replay_and_are_balanced(tmp_path: Path, architecture: str) -> None:
    """Scores that are sigmoids are balanced as their shares of the sum, as in DeepSeek-V3."""
    folder = write_folder(tmp_path / "base", architecture)
    pair = make_pair(folder, scratch=tmp_path / "adapter")
    layers, num_experts = (2, 4) if architecture == "gpt_oss" else (1, 6)
    batch = routed(random_batch_near(pair, 1), layers=layers, num_experts=num_experts)
    report, _ = forward_backward(pair, batch, OF_TOKENS, plan=plan_of(batch, 16, EAGER))
    assert report.route_mismatch
    weight_S = _weights(OF_TOKENS, batch)
    total = _balance_alone(pair.oracle.model, batch, weight_S)
    assert_close(pair.gradient_errors(), pair.tolerance)
    assert report.router_aux_loss == pytest.approx(total / sum(weight_S), rel=1e-10)


def test_the_gradient_without_it_is_another(expert_pair: Pair) -> None:
    batch = random_batch_near(expert_pair, 1)
    with_it, without = (
        _gradients(expert_pair, batch, coefficient) for coefficient in (COEFFICIENT, 0.0)
    )
    errors = relative_errors(with_it, without)
    assert max(error for name, error in errors.items() if ".gate." in name) > 0.1


def _gradients(expert_pair: Pair, batch: RolloutBatch, coefficient: float) -> dict[str, Tensor]:
    request = replace(OF_TOKENS, router_aux_loss_coefficient=coefficient)
    report, _ = forward_backward(expert_pair, batch, request)
    assert (report.router_aux_loss is None) == (coefficient == 0)
    found = expert_pair.gradients()
    expert_pair.discard()
    return found


def test_an_adapter_gets_its_gradient(tmp_path: Path) -> None:
    tuning = LoraTuning(rank=2, alpha=4.0, target_modules=("q_proj", "v_proj"))
    folder = write_folder(tmp_path / "base", "qwen3_moe")
    pair = make_pair(folder, scratch=tmp_path / "adapter", tuning=tuning)
    batch = random_batch_near(pair, 2)
    forward_backward(pair, batch, OF_TOKENS, plan=plan_of(batch, 16, EAGER))
    _balance_alone(pair.oracle.model, batch, _weights(OF_TOKENS, batch))
    assert_close(pair.gradient_errors(), pair.tolerance)


def test_rollouts_without_an_advantage_are_run(expert_pair: Pair) -> None:
    batch = random_batch_near(expert_pair, 3)
    batch = replace(batch, advantages=np.zeros_like(batch.advantages))
    loss = _loss(batch)
    prepared = expert_pair.trainer.prepare(batch, loss)
    assert not prepared.not_run_S.any()
    report = expert_pair.trainer.forward_backward(prepared)
    total = _balance_alone(expert_pair.oracle.model, batch, _weights(REQUESTS["of_tokens"], batch))
    assert report.policy_gradient_loss == 0
    assert report.loss is not None
    assert report.loss > 0
    assert report.router_aux_loss == pytest.approx(total / report.trained_tokens, rel=1e-10)
    # The experts of the last layer have none.
    got, expected = (
        {name: grad for name, grad in side.gradients().items() if ".gate." in name}
        for side in (expert_pair, expert_pair.oracle)
    )
    assert len(got) == 2
    assert_close(relative_errors(got, expected), expert_pair.tolerance)


@pytest.mark.parametrize(
    ("architecture", "budget"),
    [
        ("qwen3_moe", 16),
        pytest.param("qwen3_moe", 60, marks=pytest.mark.more),
        *(pytest.param(name, 16, marks=pytest.mark.more) for name in ROUTED),
    ],
)
@pytest.mark.parametrize("is_joint", [False, True])
def test_ranks_balance_as_one(
    tmp_path: Path, architecture: str, is_joint: bool, budget: int
) -> None:
    """Each with micro-batches of its own; and each a share of the tokens of all nodes."""
    alone = make_trainer(FolderBase(folder=str(write_folder(tmp_path, architecture))))
    batch = make_batch(6, max_response=14)
    loss = _loss(batch)
    costs = EAGER if budget == 16 else DEFAULT_COSTS
    plan = plan_of(batch, budget, costs)
    many_plan = together(plan, 2) if is_joint else plan_of(batch, budget, costs, num_ranks=2)
    step = make_step(alone, loss)
    with ranked(alone.spec, 2) as (many, _):
        found = many.update(many.prepare(batch, loss, many_plan), step)
    one = alone.update(alone.prepare(batch, loss, plan), step)
    assert found.router_aux_loss == pytest.approx(one.router_aux_loss, rel=1e-10)
    assert found.loss == pytest.approx(one.loss, rel=1e-10)
    assert found.grad_norm == pytest.approx(one.grad_norm, rel=1e-10)


def test_it_is_refused_where_nothing_routes(tmp_path: Path) -> None:
    trainer = make_trainer(FolderBase(folder=str(write_folder(tmp_path, "qwen3"))))
    batch = make_batch(0)
    with pytest.raises(RatoonError) as caught:
        trainer.prepare(batch, _loss(batch))
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert caught.value.field == "loss.router_aux_loss_coefficient"
