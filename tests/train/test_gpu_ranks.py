"""Ranks on GPUs: NCCL copies what Gloo copies, beside the backward."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ratoon.model.spec import ModelDtype, ModelSpec, PresetBase
from ratoon.train.spec import OptimizerStates, TrainerSpec
from ratoon.train.trainer import Trainer
from ratoon_proto.types import AdamWConfig, FullTuning, ParallelLayout, Shard
from tests.train.rank_runs import REPEATABLE, ranked, update_over
from tests.train.trainer_runs import make_batch, make_loss, make_step

pytestmark = pytest.mark.multigpu
_SHARDS = pytest.mark.parametrize("shard", list(Shard))


@pytest.fixture
def spec(monkeypatch: pytest.MonkeyPatch) -> TrainerSpec:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", REPEATABLE)
    return TrainerSpec(
        model=ModelSpec(
            base=PresetBase(name="small"), tuning=FullTuning(), dtype=ModelDtype.BFLOAT16, seed=0
        ),
        optimizer=AdamWConfig(),
        deterministic=True,
        micro_batch_tokens=32,
        keep_reference=False,
        attention_backend="",
        device="cuda:0",
        num_threads=1,
        optimizer_states=OptimizerStates.BF16_SPLIT_8BIT,
    )


@_SHARDS
def test_a_shared_out_step_has_the_bits_of_a_whole_one(spec: TrainerSpec, shard: Shard) -> None:
    """One rank runs everything, and either steps what is its own."""
    with ranked(spec, 1, 1 << 18) as (alone, _), ranked(spec, 2, 1 << 18, shard) as (two, _):
        for seed in range(3):
            update_over(alone, seed, (0,))
            update_over(two, seed, (seed % 2,))
            assert two.state_digest() == alone.state_digest()


@_SHARDS
def test_what_two_ranks_run_repeats_its_bits(spec: TrainerSpec, shard: Shard) -> None:
    alone = Trainer.create(spec)
    expected = [update_over(alone, seed, (0,)).grad_norm for seed in range(3)]
    digests: list[str] = []
    for _ in range(2):
        with ranked(spec, 2, 1 << 18, shard) as (two, _):
            norms = [update_over(two, seed, (0, 1)).grad_norm for seed in range(3)]
            digests.append(two.state_digest())
        assert norms == pytest.approx(expected, rel=0.05)
    assert digests[0] == digests[1]


def test_what_two_ranks_run_together_repeats_its_bits(spec: TrainerSpec) -> None:
    """By plans of their own, each micro-batch on both."""
    batch = make_batch(0)
    loss = make_loss(batch)
    alone = Trainer.create(spec)
    expected = update_over(alone, 0, (0,)).grad_norm
    together = replace(spec, parallel=ParallelLayout(sequence_ranks=2))
    digests: list[str] = []
    for _ in range(2):
        with ranked(together, 2, 1 << 18) as (two, _):
            plan = two.prepare(batch, loss).plan
            assert plan.sequence_ranks == 2
            report = two.update(two.prepare(batch, loss, plan), make_step(two, loss))
            assert report.grad_norm == pytest.approx(expected, rel=0.05)
            digests.append(two.state_digest())
    assert digests[0] == digests[1]
