"""Ranks that run micro-batches together: the updates of one device, whoever has which tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from ratoon.errors import ErrorCode, RatoonError
from ratoon.method_call import MethodCall
from ratoon.model.spec import FolderBase, ModelDtype
from ratoon.planner.costs import DEFAULT_COSTS, CostModel
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.packed import UpdatePlan
from ratoon.rollout.prefixes import sort_sequences
from ratoon.shards.sequence_group import own_keys
from ratoon.train import prepare
from ratoon.train.gradient_window import WindowState
from ratoon.train.loss.spec import Loss
from ratoon.train.ranks.group import Others
from ratoon.train.spec import NO_HOOKS, PassHooks, never_cancelled, no_progress
from ratoon.train.trainer import Trainer
from ratoon_proto.types import (
    CorrectionLevel,
    CorrectionMode,
    LoraTuning,
    LossKind,
    ParallelLayout,
    RolloutCorrection,
    Shard,
    StepReport,
)
from tests.plans import journaled, make_plan
from tests.tiny_models import ROUTED, write_folder
from tests.train.equivalence_runs import EAGER
from tests.train.rank_runs import PipePeer, ranked, together, weights_of
from tests.train.trainer_runs import (
    FROZEN,
    OUTCOMES,
    assert_close,
    assert_same_found,
    make_batch,
    make_loss,
    make_step,
    make_trainer,
)

# This correction needs the whole terms of each sequence.
_WHOLE_SEQUENCES = RolloutCorrection(
    mode=CorrectionMode.TRUNCATE, level=CorrectionLevel.SEQUENCE, high=1.5, low=0.0
)


def _plan(batch: RolloutBatch, loss: Loss, budget: int, costs: CostModel) -> UpdatePlan:
    kept_S = prepare.select(batch, loss, 0).kept_S & prepare.has_trained_tokens(batch)
    return make_plan(batch, sort_sequences(batch), kept_S, budget, costs)


def _update(
    trainer: Trainer,
    batch: RolloutBatch,
    loss: Loss,
    plan: UpdatePlan,
    hooks: PassHooks = NO_HOOKS,
) -> StepReport:
    divisor = {"divide_constant": 8.0} if loss.kind is LossKind.DR_GRPO else {}
    step = make_step(trainer, loss, **divisor)
    return trainer.update(trainer.prepare(batch, loss, plan), step, hooks)


def _assert_same_updates(
    alone: Trainer,
    many: Trainer,
    size: int,
    kinds: Sequence[LossKind],
    num_groups: int = 1,
    **loss_fields: Any,
) -> None:
    """At once and in stages, in turn."""
    for seed, kind in enumerate(kinds):
        costs, budget = ((DEFAULT_COSTS, 60), (EAGER, 24))[seed % 2]
        outcome = OUTCOMES.get(kind, {})
        batch = make_batch(seed, num_groups=2 + seed % 2, max_response=14, **outcome)
        fields = {} if kind is LossKind.CROSS_ENTROPY else loss_fields
        loss = make_loss(batch, kind, **fields)
        plan = _plan(batch, loss, budget, costs)
        assert costs is DEFAULT_COSTS or any(part.stages for part in plan.micro_batches)
        joint = together(plan, size, num_groups)
        one, many_report = _update(alone, batch, loss, plan), _update(many, batch, loss, joint)
        assert not one.skipped
        assert many_report.loss == pytest.approx(one.loss, rel=1e-9, abs=1e-12)
        assert many_report.grad_norm == pytest.approx(one.grad_norm, rel=1e-9)
        assert many_report.entropy == pytest.approx(one.entropy, rel=1e-9)
        assert many_report.trained_tokens == one.trained_tokens
        assert many_report.packed_tokens == one.packed_tokens
        assert_same_found(many.found, alone.found)
        busy = {part.rank for part in joint.micro_batches}
        assert [s > 0 for s in many_report.rank_seconds] == [
            rank - rank % size in busy for rank in range(size * num_groups)
        ]
        assert_close(weights_of(many), weights_of(alone))


@pytest.mark.parametrize("size", [2, 4])
def test_updates_of_every_loss_are_those_of_one_device(base: FolderBase, size: int) -> None:
    """Four query heads and two key heads: of four ranks two attend copies of one key head."""
    alone = make_trainer(base, value_head=True)
    with ranked(alone.spec, size) as (many, _):
        _assert_same_updates(alone, many, size, list(LossKind) if size == 2 else KINDS[:2])


# Losses of single tokens and of whole sequences, each twice, so that both are run at once and in
# stages.
KINDS = (LossKind.GRPO, LossKind.GSPO, LossKind.GSPO, LossKind.GRPO)


def test_terms_of_a_reference_an_entropy_and_a_whole_sequence(base: FolderBase) -> None:
    alone = make_trainer(base)
    with ranked(alone.spec, 2) as (two, _):
        fields: dict[str, Any] = {"kl": FROZEN, "entropy_coefficient": 0.01}
        _assert_same_updates(alone, two, 2, KINDS, **fields)
        fields["correction"] = _WHOLE_SEQUENCES
        _assert_same_updates(alone, two, 2, (LossKind.GRPO, LossKind.DAPO), **fields)


@pytest.mark.parametrize(
    ("architecture", "num_heads", "size", "shard"),
    [
        ("qwen3_moe", 4, 2, Shard.STATES),
        pytest.param("llama", 4, 4, Shard.STATES, marks=pytest.mark.more),
        pytest.param("qwen3_untied", 6, 2, Shard.STATES, marks=pytest.mark.more),
        ("qwen3_5", 4, 2, Shard.STATES),
        pytest.param("deepseek_v3", 4, 2, Shard.STATES, marks=pytest.mark.more),
        pytest.param("gpt_oss", 4, 2, Shard.STATES, marks=pytest.mark.more),
        *(pytest.param(name, 4, 2, Shard.WEIGHTS, marks=pytest.mark.more) for name in ROUTED),
        pytest.param("gemma3", 4, 2, Shard.STATES, marks=pytest.mark.more),
        pytest.param("qwen3_moe_mixed", 4, 2, Shard.WEIGHTS, marks=pytest.mark.more),
        pytest.param("qwen3_next", 4, 4, Shard.WEIGHTS, marks=pytest.mark.more),
    ],
)
def test_models_of_other_heads_and_with_experts(
    tmp_path: Path, architecture: str, num_heads: int, size: int, shard: Shard
) -> None:
    """`llama` has one key head, with six query heads a rank has one and a half groups, and `gemma3`
    has windows."""
    base = FolderBase(folder=str(write_folder(tmp_path, architecture, num_heads=num_heads)))
    alone = make_trainer(base)
    with ranked(alone.spec, size, 100, shard) as (many, _):
        _assert_same_updates(alone, many, size, KINDS[:2], kl=FROZEN)


@pytest.mark.parametrize("targets", [(), ("q_proj", "embed_tokens", "lm_head"), ("lm_head",)])
def test_adapters_and_groups_of_two_among_four(base: FolderBase, targets: tuple[str, ...]) -> None:
    alone = make_trainer(base, tuning=LoraTuning(rank=2, alpha=4.0, target_modules=targets))
    with ranked(alone.spec, 4) as (four, _):
        _assert_same_updates(alone, four, 2, KINDS[:2], num_groups=2, kl=FROZEN)


@pytest.mark.parametrize(
    "shard", [Shard.GRADIENTS, pytest.param(Shard.WEIGHTS, marks=pytest.mark.more)]
)
def test_what_is_sharded_over_groups_of_two_among_four(base: FolderBase, shard: Shard) -> None:
    """The two of a group have the same backwards, each of its own tokens."""
    alone = make_trainer(base)
    with ranked(alone.spec, 4, 100, shard) as (four, _):
        _assert_same_updates(alone, four, 2, KINDS, num_groups=2)
        _assert_same_updates(alone, four, 4, KINDS[:2])


def test_fewer_tokens_than_ranks(base: FolderBase) -> None:
    """Stages of one token, and a batch of two."""
    alone = make_trainer(base)
    with ranked(alone.spec, 4) as (four, _):
        for seed, fields in enumerate(({"max_response": 6}, {"max_prompt": 1, "num_groups": 1})):
            batch = make_batch(seed, **fields)
            loss = make_loss(batch, LossKind.GSPO)
            plan = _plan(batch, loss, 1, EAGER)
            sizes = [stage.num_tokens for part in plan.micro_batches for stage in part.stages]
            assert min(sizes, default=plan.packed_tokens) < 4 or seed
            _update(alone, batch, loss, plan)
            _update(four, batch, loss, together(plan, 4))
            assert_close(weights_of(four), weights_of(alone))


def test_a_forward_is_that_of_one_device(base: FolderBase) -> None:
    alone = make_trainer(base)
    with ranked(alone.spec, 2) as (two, _):
        batch = make_batch(9)
        for budget, costs in ((40, DEFAULT_COSTS), (16, EAGER)):
            plan = _plan(batch, make_loss(batch), budget, costs)
            for use_reference in (False, True):
                options: dict[str, Any] = {"with_entropy": True, "use_reference": use_reference}
                one = alone.forward(alone.prepare_forward(batch, plan), **options)
                mine = two.forward(two.prepare_forward(batch, together(plan, 2)), **options)
                assert mine.entropy is not None
                assert one.entropy is not None
                assert np.allclose(mine.logprobs, one.logprobs, rtol=1e-12, atol=1e-12)
                assert np.allclose(mine.entropy, one.entropy, rtol=1e-12, atol=1e-12)
                assert np.count_nonzero(one.logprobs) > 10


def test_the_same_again_has_the_same_bits(base: FolderBase) -> None:
    spec = make_trainer(base, dtype=ModelDtype.BFLOAT16).spec
    digests: list[str] = []
    for _ in range(2):
        with ranked(spec, 4) as (four, _):
            for seed, kind in enumerate(KINDS[:2]):
                batch = make_batch(seed)
                loss = make_loss(batch, kind)
                plan = _plan(batch, loss, *((40, DEFAULT_COSTS), (16, EAGER))[seed])
                _update(four, batch, loss, together(plan, 4))
            digests.append(four.state_digest())
    assert digests[0] == digests[1]


def test_its_own_plan_puts_ranks_together_for_one_group(base: FolderBase) -> None:
    """Where the policy names no number."""
    alone = make_trainer(base, tokens=1000)
    with ranked(alone.spec, 2) as (two, _):
        batch = make_batch(3, num_groups=1, max_prompt=400, max_response=4)
        loss = make_loss(batch)
        plan = two.prepare(batch, loss).plan
        assert (plan.sequence_ranks, len(plan.micro_batches)) == (2, 1)
        assert journaled(plan) == plan
        _update(two, batch, loss, plan)
        _update(alone, batch, loss, alone.prepare(batch, loss).plan)
        assert_close(weights_of(two), weights_of(alone))


def test_a_self_check_runs_on_one_rank(base: FolderBase) -> None:
    spec = replace(make_trainer(base).spec, self_check_every=1)
    with ranked(replace(spec, parallel=ParallelLayout(sequence_ranks=2)), 2) as (two, _):
        batch = make_batch(0)
        loss = make_loss(batch)
        report = _update(two, batch, loss, together(two.prepare(batch, loss).plan, 2))
        assert report.self_check is not None
        assert not report.self_check.exceeds_limits


def test_heads_that_ranks_do_not_divide_are_refused(base: FolderBase) -> None:
    spec = make_trainer(base).spec
    parallel = ParallelLayout(num_workers=3, sequence_ranks=3)
    with pytest.raises(RatoonError, match=r"the model's 4 query heads: 4 / 3 = 1\.33"):
        Trainer.create(replace(spec, parallel=parallel), Others(peers=[_NoPeer(), _NoPeer()]))


def test_each_rank_attends_the_keys_of_its_own_queries() -> None:
    for num_heads, num_kv_heads, size in ((32, 8, 4), (32, 8, 16), (4, 1, 4), (24, 6, 4)):
        own, of_key = num_heads // size, num_heads // num_kv_heads
        for index in range(size):
            keys = own_keys(num_heads, num_kv_heads, index, size)
            wanted = [head // of_key for head in range(index * own, (index + 1) * own)]
            assert list(np.repeat(keys, own // len(keys))) == wanted


def _cancelled_after(calls: int) -> Any:
    asked: list[int] = []

    def is_cancelled() -> bool:
        asked.append(1)
        return len(asked) > calls

    return is_cancelled


def test_a_cancelled_update_leaves_every_rank_as_it_was(base: FolderBase) -> None:
    """Between micro-batches and between stages."""
    with ranked(make_trainer(base).spec, 2) as (two, _):
        batch, before = make_batch(7), two.state_digest()
        loss = make_loss(batch, kl=FROZEN)
        for budget in (16, 40):
            plan = together(_plan(batch, loss, budget, EAGER), 2)
            with pytest.raises(RatoonError) as caught:
                _update(two, batch, loss, plan, PassHooks(is_cancelled=_cancelled_after(2)))
            assert caught.value.code is ErrorCode.CANCELLED
            assert two.window_state is WindowState.EMPTY
            assert two.state_digest() == before
        assert not _update(two, batch, loss, plan).skipped


def _yes() -> bool:
    return True


def test_a_rank_that_is_told_to_stop_stops_the_other(base: FolderBase) -> None:
    with ranked(make_trainer(base).spec, 2) as (two, (peer,)):
        batch = make_batch(7)
        loss = make_loss(batch)
        plan = together(_plan(batch, loss, 40, DEFAULT_COSTS), 2)
        for is_cancelled in (_yes, never_cancelled):
            hooks = PassHooks(is_cancelled=is_cancelled)
            peer.start(MethodCall("__setattr__", ("hooks", hooks), {})).result()
            if is_cancelled is _yes:
                with pytest.raises(RatoonError, match="cancelled after 0 of"):
                    _update(two, batch, loss, plan)
            else:
                assert not _update(two, batch, loss, plan).skipped


class BrokenError(Exception):
    """Error of one rank only."""


def _fail_between(done: int, _planned: int, _tokens: int) -> None:
    if done == 1:
        raise BrokenError


def _fail_in_a_layer(done: int, _planned: int, _tokens: int) -> None:
    """In the next one that is run, once."""
    patch = pytest.MonkeyPatch()

    def broken(*_: object) -> Tensor:
        patch.undo()
        raise BrokenError

    if done == 1:
        patch.setattr(Qwen3MLP, "forward", broken)


def _progress_of_leader(peer: PipePeer, failing: int, on_progress: Any) -> Any:
    """Has `on_progress` called on one rank: rank 1, or whoever passes it to its pass."""
    if failing == 0:
        return on_progress
    hooks = PassHooks(on_progress=on_progress)
    peer.start(MethodCall("__setattr__", ("hooks", hooks), {})).result()
    return no_progress


def test_the_error_of_one_rank_is_the_callers_and_changes_nothing(base: FolderBase) -> None:
    with ranked(make_trainer(base).spec, 2) as (two, (peer,)):
        batch, before = make_batch(6), two.state_digest()
        loss = make_loss(batch)
        plan = together(_plan(batch, loss, 16, DEFAULT_COSTS), 2)
        assert len(plan.micro_batches) > 2
        for failing, fail in product((0, 1), (_fail_between, _fail_in_a_layer)):
            on_progress = _progress_of_leader(peer, failing, fail)
            with pytest.raises(BrokenError):
                _update(two, batch, loss, plan, PassHooks(on_progress=on_progress))
            assert two.window_state is WindowState.EMPTY
            assert two.state_digest() == before
            _progress_of_leader(peer, failing, no_progress)
        assert not _update(two, batch, loss, plan).skipped


def test_a_rank_that_is_gone_is_an_error_and_no_wait(base: FolderBase) -> None:
    with ranked(make_trainer(base).spec, 2) as (two, (peer,)):
        batch = make_batch(0)
        loss = make_loss(batch)
        plan = together(_plan(batch, loss, 40, DEFAULT_COSTS), 2)
        _update(two, batch, loss, plan)
        peer.kill()
        with pytest.raises(Exception, match=r"copy between ranks|gone|pipe"):
            _update(two, batch, loss, plan)


class _NoPeer:
    """A rank that nothing is asked of."""

    def start(self, call: MethodCall[Any]) -> Any:
        raise AssertionError(call)

    def stop(self) -> None:
        raise AssertionError
