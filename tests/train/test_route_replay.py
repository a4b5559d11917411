"""Recorded routes: what is packed equals each rollout of Hugging Face alone with its own routes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ratoon.model.spec import FolderBase
from ratoon.planner.costs import CostModel
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.forest import build_forest
from ratoon.rollout.prefixes import sort_sequences
from ratoon.train import prepare
from ratoon_proto.types import (
    KlConfig,
    KlKind,
    LoraTuning,
    LossConfig,
    LossKind,
    OptimStepConfig,
    ReferenceKind,
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
    oracle_loss,
    plan_of,
    random_batch_near,
    run_two_ranks,
)
from tests.train.recorded_routes import TOP_K, routed, with_routes
from tests.train.trainer_runs import make_batch, make_loss

REQUEST = LossConfig(
    kind=LossKind.REINFORCE,
    kl=KlConfig(kind=KlKind.K2, coefficient=0.1, reference=ReferenceKind.FROZEN),
)


def _num_letters(batch: RolloutBatch, *, with_routes: bool) -> int:
    """Distinct prefixes of what is trained, by brute force."""
    seen: set[object] = set()
    for path in paths_of(batch):
        if not path.mask.any():
            continue
        prefix: tuple[object, ...] = (path.temperature,)
        for t, token in enumerate(path.tokens.tolist()):
            routes = path.routes
            has_row = with_routes and routes is not None
            prefix = (prefix, token, routes[t].tobytes() if has_row and routes is not None else b"")
            seen.add(prefix)
    return len(seen)


@pytest.mark.parametrize(
    ("seed", "budget", "costs"), [(index % 2, *cut) for index, cut in enumerate(CUTS.values())]
)
def test_loss_and_gradients_are_those_of_each_rollout_alone(
    expert_pair: Pair, seed: int, budget: int, costs: CostModel
) -> None:
    batch = routed(random_batch_near(expert_pair, seed))
    report, _ = forward_backward(expert_pair, batch, REQUEST, plan=plan_of(batch, budget, costs))
    assert_close(expert_pair.gradient_errors(), expert_pair.tolerance)
    packed = _num_letters(batch, with_routes=True)
    if budget == WHOLE:
        assert report.packed_tokens == packed
    assert report.route_conflicts == packed - _num_letters(batch, with_routes=False) > 0
    assert report.unshared_tokens > report.packed_tokens
    assert report.route_mismatch == pytest.approx(_mismatch(expert_pair, batch), rel=1e-12)


def _mismatch(expert_pair: Pair, batch: RolloutBatch) -> float:
    found: list[bool] = []
    for path in paths_of(batch):
        if not path.mask.any():
            continue
        assert path.routes is not None
        with torch.no_grad():
            logits = hf.router_logits(expert_pair.oracle.model, path)
        for layer, logits_TE in enumerate(logits):
            own_TC = logits_TE.topk(TOP_K).indices.sort(-1).values.numpy()
            given_TC = path.routes[:, layer]
            is_given_T = given_TC[:, 0] >= 0
            found += (own_TC != given_TC).any(1)[is_given_T].tolist()
    assert 0 < sum(found) < len(found)
    return sum(found) / len(found)


def test_agreeing_routes_share_all_that_tokens_share(expert_pair: Pair) -> None:
    plain = random_batch_near(expert_pair, 3)
    batch = routed(plain, agree=True)
    report, _ = forward_backward(expert_pair, batch, REQUEST)
    assert_close(expert_pair.gradient_errors(), expert_pair.tolerance)
    assert report.route_conflicts == 0
    assert report.packed_tokens == plan_of(plain, WHOLE).packed_tokens


def test_routes_of_the_model_itself_change_no_bit(expert_pair: Pair) -> None:
    plain = random_batch_near(expert_pair, 4)
    rows: list[tuple[int, NDArray[np.int64]]] = []
    for path in paths_of(plain):
        with torch.no_grad():
            logits = hf.router_logits(expert_pair.oracle.model, path)
        rows.append((0, torch.stack([x.topk(TOP_K).indices for x in logits], dim=1).numpy()))
    batch = with_routes(plain, rows)
    report, _ = forward_backward(expert_pair, batch, REQUEST)
    own = expert_pair.gradients()
    expert_pair.discard()
    other, _ = forward_backward(expert_pair, plain, REQUEST)
    assert report.route_mismatch == 0
    assert other.route_mismatch is None
    assert replace(report, route_mismatch=None, seconds=other.seconds, tokens_per_second=0.0) == (
        replace(other, tokens_per_second=0.0)
    )
    for name, grad in expert_pair.gradients().items():
        assert torch.equal(own[name], grad), name


def test_routes_change_the_gradient(expert_pair: Pair) -> None:
    """So that what is compared elsewhere is theirs."""
    plain = random_batch_near(expert_pair, 5)
    found = []
    for batch in (plain, routed(plain, agree=True)):
        forward_backward(expert_pair, batch, REQUEST)
        found.append(expert_pair.gradients())
        expert_pair.discard()
    assert min(relative_errors(*found).values()) > 1e-3


def test_a_forward_is_of_the_routes_and_a_reference_of_its_own(expert_pair: Pair) -> None:
    batch = routed(random_batch_near(expert_pair, 6))
    paths, trainer = paths_of(batch), expert_pair.trainer
    run = partial(trainer.forward, trainer.prepare_forward(batch), with_entropy=False)
    for use_reference in (False, True):
        got = run(use_reference=use_reference)
        seen = [replace(path, routes=None) for path in paths] if use_reference else paths
        expected = hf.all_logprobs(expert_pair.oracle.model, seen)
        truth = np.concatenate([logprob.numpy() for logprob, _ in expected])
        assert np.abs(got.logprobs - truth)[batch.loss_mask].max() < 1e-10


@pytest.mark.more
@pytest.mark.parametrize("tuning", [None, LoraTuning(rank=3, alpha=6.0)])
def test_three_steps_are_those_of_hugging_face(tmp_path: Path, tuning: LoraTuning | None) -> None:
    """Whose reference is the base, of an adapter by the same routers."""
    folder = write_folder(tmp_path / "base", "qwen3_moe")
    pair = make_pair(folder, scratch=tmp_path / "adapter", tuning=tuning)
    optim = OptimStepConfig(learning_rate=1e-2)
    for seed in range(3):
        batch = routed(random_batch_near(pair, 10 + seed))
        check_gradients(pair, batch, REQUEST, micro_batch_tokens=40)
        forward_backward(pair, batch, REQUEST, micro_batch_tokens=40)
        check_step(pair, optim, divide_by=oracle_loss(REQUEST, batch).divide_by)


@pytest.mark.more
@pytest.mark.parametrize("is_joint", [False, True])
def test_ranks_replay_as_one_device(tmp_path: Path, is_joint: bool) -> None:
    base = FolderBase(folder=str(write_folder(tmp_path, "qwen3_moe")))
    batch = routed(make_batch(6))
    loss = make_loss(batch, LossKind.REINFORCE)
    both, one = run_two_ranks(base, batch, loss, is_joint=is_joint)
    assert (both.route_mismatch, both.route_conflicts) == (one.route_mismatch, one.route_conflicts)


@pytest.mark.parametrize("seed", range(8))
def test_prefixes_are_shared_as_far_as_tokens_and_routes_agree(seed: int) -> None:
    """All that agree, whatever sorts between them."""
    batch = routed(make_batch(seed, num_groups=6, vocab_size=3, max_rollouts=9))
    prefixes = sort_sequences(batch)
    assert sorted(prefixes.order.tolist()) == list(range(batch.num_sequences))
    run = np.flatnonzero(prepare.has_trained_tokens(batch))
    forest = build_forest(batch, prefixes, run)
    assert forest.num_tokens == _num_letters(batch, with_routes=True)
    assert forest.num_tokens > _num_letters(batch, with_routes=False)
