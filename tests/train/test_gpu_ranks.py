"""Ranks on GPUs: NCCL copies what Gloo copies, beside the backward."""

from __future__ import annotations

import pytest

from ratoon.model.spec import FullTuning, ModelDtype, ModelSpec, PresetBase
from ratoon.train.config import AdamWConfig, OptimizerStates, Shard
from ratoon.train.spec import TrainerSpec
from ratoon.train.trainer import Trainer
from tests.train.rank_runs import REPEATABLE, ranked
from tests.train.test_ranks import _update

pytestmark = pytest.mark.multigpu
_SHARDS = pytest.mark.parametrize("shard", [Shard.STATES, Shard.GRADIENTS])


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
            _update(alone, seed, (0,))
            _update(two, seed, (seed % 2,))
            assert two.state_digest() == alone.state_digest()


@_SHARDS
def test_what_two_ranks_run_repeats_its_bits(spec: TrainerSpec, shard: Shard) -> None:
    alone = Trainer.create(spec)
    expected = [_update(alone, seed, (0,)).grad_norm for seed in range(3)]
    digests: list[str] = []
    for _ in range(2):
        with ranked(spec, 2, 1 << 18, shard) as (two, _):
            norms = [_update(two, seed, (0, 1)).grad_norm for seed in range(3)]
            digests.append(two.state_digest())
        assert norms == pytest.approx(expected, rel=0.05)
    assert digests[0] == digests[1]
