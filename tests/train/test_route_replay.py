"""Recorded routes: what is packed equals each rollout of Hugging Face alone with its own routes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ratoon.model.spec import FolderBase, LoraTuning
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.costs import DEFAULT_COSTS, CostModel
from ratoon.rollout.forest import build_forest
from ratoon.rollout.packed import UpdatePlan
from ratoon.rollout.plan import make_plan
from ratoon.rollout.prefixes import sort_sequences
from ratoon.train import prepare
from ratoon.train.config import KlConfig, KlKind, LossKind, LossRequest, OptimRequest, ReferenceKind
from ratoon.train.loss.resolve import resolve_loss
from tests.equivalence import assert_close, paths_of, relative_errors
from tests.oracle import hf
from tests.tiny_models import write_folder
from tests.train.equivalence_runs import (
    WHOLE,
    Pair,
    check_gradients,
    check_step,
    forward_backward,
    make_pair,
    oracle_loss,
    random_batch_near,
)
from tests.train.rank_runs import ranked
from tests.train.test_sequence_ranks import _together
from tests.train.test_streaming import EAGER
from tests.train.trainer_runs import make_batch, make_loss, make_trainer

LAYERS, NUM_EXPERTS, TOP_K = 2, 4, 2
REQUEST = LossRequest(
    kind=LossKind.REINFORCE,
    kl=KlConfig(kind=KlKind.K2, coefficient=0.1, reference=ReferenceKind.FROZEN),
)
CUTS = [(WHOLE, DEFAULT_COSTS), (40, DEFAULT_COSTS), (16, EAGER), (1, EAGER)]


@pytest.fixture(scope="module")
def shared_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("replay")
    return make_pair(write_folder(root / "base", "qwen3_moe"), scratch=root / "adapter")


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    yield shared_pair
    shared_pair.discard()


def _with_routes(
    batch: RolloutBatch, rows: Sequence[tuple[int, NDArray[np.int64]]]
) -> RolloutBatch:
    """Of each sequence the first token with a row, and its rows."""
    joined = np.concatenate([np.sort(part, axis=2) for _, part in rows])
    return replace(
        batch,
        routed_experts=joined.astype(np.uint8),
        route_first=np.array([first for first, _ in rows], np.int64),
        route_offsets=np.cumsum([0, *(len(part) for _, part in rows)]).astype(np.int64),
    )


def _routed(batch: RolloutBatch, *, agree: bool = False) -> RolloutBatch:
    """Random experts. Equal prefixes have equal ones, but where a rollout changes its mind.

    The last token has no row, as of samplers; some rollouts have none of their prompt, or at all.
    """
    rows: list[tuple[int, NDArray[np.int64]]] = []
    for s, path in enumerate(paths_of(batch)):
        tokens = path.tokens
        changes_at = len(tokens) if agree or s % 3 else len(tokens) // 2
        part = np.zeros((len(tokens), LAYERS, TOP_K), np.int64)
        for t in range(len(tokens)):
            mind = s if t >= changes_at else 0
            seed = [mind, int(path.temperature * 100), *tokens[: t + 1].tolist()]
            keys = np.random.default_rng(seed).random((LAYERS, NUM_EXPERTS))
            part[t] = keys.argsort(-1)[:, :TOP_K]
        stop = len(tokens) if agree else max(len(tokens) - 1, 0)
        first = min(len(path.prompt), stop) if s % 7 == 5 and not agree else 0
        stop = first if s % 11 == 7 and not agree else stop
        rows.append((first, part[first:stop]))
    return _with_routes(batch, rows)


def _plan(
    batch: RolloutBatch, budget: int, costs: CostModel = DEFAULT_COSTS, num_ranks: int = 1
) -> UpdatePlan:
    kept_S, prefixes = prepare.has_trained_tokens(batch), sort_sequences(batch)
    return make_plan(batch, prefixes, kept_S, budget, costs, num_ranks=num_ranks)


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


@pytest.mark.parametrize(("budget", "costs"), CUTS)
@pytest.mark.parametrize("seed", range(2))
def test_loss_and_gradients_are_those_of_each_rollout_alone(
    pair: Pair, seed: int, budget: int, costs: CostModel
) -> None:
    batch = _routed(random_batch_near(pair, seed))
    loss = resolve_loss(REQUEST, batch, has_frozen_reference=True)
    plan = _plan(batch, budget, costs)
    assert (costs is EAGER) == any(part.stages for part in plan.micro_batches)
    report = pair.trainer.forward_backward(batch, loss, plan)
    paths = paths_of(batch)
    frozen = hf.all_logprobs(pair.initial, [replace(path, routes=None) for path in paths])
    with_reference = [
        replace(path, reference=logprob.numpy())
        for path, (logprob, _) in zip(paths, frozen, strict=True)
    ]
    pair.oracle.forward_backward(with_reference, oracle_loss(REQUEST, batch))
    assert_close(pair.gradient_errors(), pair.tolerance)
    packed = _num_letters(batch, with_routes=True)
    if budget == WHOLE:
        assert report.packed_tokens == packed
    assert report.route_conflicts == packed - _num_letters(batch, with_routes=False) > 0
    assert report.unshared_tokens > report.packed_tokens
    assert report.route_mismatch == pytest.approx(_mismatch(pair, batch), rel=1e-12)


def _mismatch(pair: Pair, batch: RolloutBatch) -> float:
    found: list[bool] = []
    for path in paths_of(batch):
        if not path.mask.any():
            continue
        assert path.routes is not None
        with torch.no_grad():
            logits = hf.router_logits(pair.oracle.model, path)
        for layer, logits_TE in enumerate(logits):
            own_TC = logits_TE.topk(TOP_K).indices.sort(-1).values.numpy()
            given_TC = path.routes[:, layer]
            is_given_T = given_TC[:, 0] >= 0
            found += (own_TC != given_TC).any(1)[is_given_T].tolist()
    assert 0 < sum(found) < len(found)
    return sum(found) / len(found)


def test_agreeing_routes_share_all_that_tokens_share(pair: Pair) -> None:
    plain = random_batch_near(pair, 3)
    batch = _routed(plain, agree=True)
    report, _ = forward_backward(pair, batch, REQUEST)
    assert_close(pair.gradient_errors(), pair.tolerance)
    assert report.route_conflicts == 0
    assert report.packed_tokens == _plan(plain, WHOLE).packed_tokens


def test_routes_of_the_model_itself_change_no_bit(pair: Pair) -> None:
    plain = random_batch_near(pair, 4)
    rows: list[tuple[int, NDArray[np.int64]]] = []
    for path in paths_of(plain):
        with torch.no_grad():
            logits = hf.router_logits(pair.oracle.model, path)
        rows.append((0, torch.stack([x.topk(TOP_K).indices for x in logits], dim=1).numpy()))
    batch = _with_routes(plain, rows)
    report, _ = forward_backward(pair, batch, REQUEST)
    own = {name: grad.clone() for name, grad in pair.gradients().items()}
    pair.discard()
    other, _ = forward_backward(pair, plain, REQUEST)
    assert report.route_mismatch == 0
    assert other.route_mismatch is None
    assert replace(report, route_mismatch=None, seconds=other.seconds, tokens_per_second=0.0) == (
        replace(other, tokens_per_second=0.0)
    )
    for name, grad in pair.gradients().items():
        assert torch.equal(own[name], grad), name


def test_routes_change_the_gradient(pair: Pair) -> None:
    """So that what is compared elsewhere is theirs."""
    plain = random_batch_near(pair, 5)
    found = []
    for batch in (plain, _routed(plain, agree=True)):
        forward_backward(pair, batch, REQUEST)
        found.append({name: grad.clone() for name, grad in pair.gradients().items()})
        pair.discard()
    assert min(relative_errors(*found).values()) > 1e-3


def test_log_probs_of_a_forward_are_of_the_routes_and_of_a_reference_its_own(pair: Pair) -> None:
    batch = _routed(random_batch_near(pair, 6))
    paths = paths_of(batch)
    plan = pair.trainer.plan_forward(batch)
    for use_reference in (False, True):
        got = pair.trainer.forward(batch, plan, with_entropy=False, use_reference=use_reference)
        routed = [replace(path, routes=None) for path in paths] if use_reference else paths
        expected = hf.all_logprobs(pair.oracle.model, routed)
        truth = np.concatenate([logprob.numpy() for logprob, _ in expected])
        mask_J = batch.loss_mask
        assert np.abs(got.logprobs - truth)[mask_J].max() < 1e-10


@pytest.mark.more
@pytest.mark.parametrize("tuning", [None, LoraTuning(rank=3, alpha=6.0)])
def test_three_steps_are_those_of_hugging_face(tmp_path: Path, tuning: LoraTuning | None) -> None:
    """Whose reference is the base, of an adapter by the same routers."""
    folder = write_folder(tmp_path / "base", "qwen3_moe")
    pair = make_pair(folder, scratch=tmp_path / "adapter", tuning=tuning)
    optim = OptimRequest(learning_rate=1e-2)
    for seed in range(3):
        batch = _routed(random_batch_near(pair, 10 + seed))
        check_gradients(pair, batch, REQUEST, micro_batch_tokens=40)
        forward_backward(pair, batch, REQUEST, micro_batch_tokens=40)
        check_step(pair, optim, divide_by=oracle_loss(REQUEST, batch).divide_by)


@pytest.mark.more
@pytest.mark.parametrize("is_joint", [False, True])
def test_ranks_replay_as_one_device(tmp_path: Path, is_joint: bool) -> None:
    base = FolderBase(folder=str(write_folder(tmp_path, "qwen3_moe")))
    alone, batch = make_trainer(base), _routed(make_batch(6))
    loss = make_loss(batch, LossKind.REINFORCE)
    with ranked(alone.spec, 2) as (many, _):
        if is_joint:
            plan = _together(_plan(batch, 16, EAGER), 2)
        else:
            plan = _plan(batch, 40, num_ranks=2)
            assert {part.rank for part in plan.micro_batches} == {0, 1}
        report = many.forward_backward(batch, loss, plan)
        sums = [*many.ranks.all("sums_of", [*many.model.named_trainable()])]
    one = alone.forward_backward(batch, loss, _plan(batch, WHOLE))
    assert (report.route_mismatch, report.route_conflicts) == (
        one.route_mismatch,
        one.route_conflicts,
    )
    parameters = alone.model.named_trainable()
    got = {name: sum(each[i] for each in sums) for i, name in enumerate(parameters)}
    expected = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    assert_close(relative_errors(got, expected), 1e-10)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(20))
def test_prefixes_are_shared_as_far_as_tokens_and_routes_agree(seed: int) -> None:
    """All that agree, whatever sorts between them."""
    batch = _routed(make_batch(seed, num_groups=6, vocab_size=3, max_rollouts=9))
    prefixes = sort_sequences(batch)
    assert sorted(prefixes.order.tolist()) == list(range(batch.num_sequences))
    run = np.flatnonzero(prepare.has_trained_tokens(batch))
    forest = build_forest(batch, prefixes, run)
    assert forest.num_tokens == _num_letters(batch, with_routes=True)
    assert forest.num_tokens > _num_letters(batch, with_routes=False)
