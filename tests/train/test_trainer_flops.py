"""FLOPs and MFU against a geometry worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ratoon.model.spec import FolderBase
from ratoon.planner.layer_kinds import Attention, Layer, Mlp
from ratoon.train import report as flops
from ratoon_proto.types import LoraTuning
from tests.model.test_activation_plan import QWEN3_8B
from tests.rollout import oracle
from tests.train.trainer_runs import make_batch, make_trainer

# Response lengths of a recorded group of 32 with a prompt of 5,059 tokens.
_PROMPT = 5059
_LENGTHS = np.array(
    [
        *(1432, 1866, 504, 379, 1588, 411, 152, 218, 918, 416, 1770, 1826, 1456, 378, 1575, 297),
        *(1503, 1944, 1503, 731, 753, 1311, 1448, 1925, 457, 1940, 1655, 941, 1483, 1106, 1185),
        1193,
    ]
)
# The geometry of Qwen3-8B.
_PER_LAYER = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
_SIZES = flops.Geometry(
    layer_parameters=36 * _PER_LAYER,
    trained_layer_parameters=36 * _PER_LAYER,
    head_is_trained=True,
    layers=QWEN3_8B.layers,
    hidden_size=4096,
    vocab_size=151936,
)


def test_training_flops_give_the_known_hardware_mfu() -> None:
    """The group takes 4.69 s on an H200, where its de-duplicated work is half the peak."""
    tokens = _PROMPT + int(_LENGTHS.sum())
    assert tokens == 41_323
    causal = _PROMPT * (_PROMPT + 1) // 2 + int((_LENGTHS * _PROMPT).sum())
    causal += int((_LENGTHS * (_LENGTHS + 1) // 2).sum())
    work = flops.Work(tokens=tokens, rows=int(_LENGTHS.sum()), pairs=causal)
    share = flops.utilisation(flops.training_flops(_SIZES, work), 4.69, 989e12)
    assert share == pytest.approx(0.50, abs=0.005)


def test_flops_by_hand() -> None:
    mixer = Attention(num_heads=3, num_kv_heads=3, head_dim=4)
    sizes = flops.Geometry(
        layer_parameters=1000,
        trained_layer_parameters=100,
        head_is_trained=False,
        layers=(Layer(mixer=mixer, mlp=Mlp(size=9)),) * 2,
        hidden_size=5,
        vocab_size=7,
    )
    work = flops.Work(tokens=10, rows=6, pairs=55)
    assert flops.training_flops(sizes, work) == (
        10 * (4 * 1000 + 2 * 100) + 4 * 7 * 5 * 6 + 14 * 4 * 3 * 2 * 55
    )
    assert flops.forward_flops(sizes, work) == 2 * 10 * 1000 + 2 * 7 * 5 * 6 + 4 * 4 * 3 * 2 * 55


def test_flops_of_layers_with_a_window_by_hand() -> None:
    """Ten tokens with a window of 4: 34 of 55 pairs are within it."""
    full = Attention(num_heads=3, num_kv_heads=3, head_dim=4)
    near = Attention(num_heads=3, num_kv_heads=3, head_dim=4, value_dim=6, window=4)
    sizes = flops.Geometry(
        layer_parameters=0,
        trained_layer_parameters=0,
        head_is_trained=False,
        layers=tuple(Layer(mixer=mixer, mlp=Mlp(size=9)) for mixer in (full, near, near)),
        hidden_size=5,
        vocab_size=7,
    )
    work = flops.Work(tokens=10, rows=0, pairs=55, near_pairs=34)
    pair_flops = 4 * 3 * 55 + 2 * 5 * 3 * 34
    assert flops.forward_flops(sizes, work) == 4 * pair_flops
    assert flops.training_flops(sizes, work) == 14 * pair_flops


@pytest.mark.parametrize("window", [1, 3, 10, 1000])
def test_packed_work_counts_the_pairs_within_the_window(base: FolderBase, window: int) -> None:
    trainer, batch = make_trainer(base, tokens=30), make_batch(0)
    run = trainer.prepare_forward(batch)
    plan = run.plan
    assert len(plan.micro_batches) > 1
    work = flops.packed_work(run, 5, window)
    pairs = sum(
        oracle.num_packed_pairs(batch, part.sequences, window) for part in plan.micro_batches
    )
    assert (work.near_pairs, work.rows, work.tokens) == (pairs, 5, plan.packed_tokens)
    assert work.pairs == plan.packed_pairs
    assert (work.near_pairs == work.pairs) == (window == 1000)
    logical = flops.logical_work(batch, plan, window)
    lengths = [len(batch.sequence_tokens(s)) for part in plan.micro_batches for s in part.sequences]
    assert logical.near_pairs == sum(length * min(length, window) for length in lengths)


def test_geometry_is_read_off_the_model(base: FolderBase) -> None:
    """Two layers of hidden size 16, 4 heads of 8, 2 kv heads, MLP 24, vocabulary 64, tied."""
    per_layer = 16 * 32 * 2 + 16 * 16 * 2 + 3 * 16 * 24 + 2 * 16 + 2 * 8
    full = flops.geometry(make_trainer(base).model)
    assert full.layer_parameters == full.trained_layer_parameters == 2 * per_layer + 16
    mixer = Attention(num_heads=4, num_kv_heads=2, head_dim=8)
    assert [layer.mixer for layer in full.layers] == [mixer, mixer]
    assert (full.hidden_size, full.vocab_size, full.head_is_trained) == (16, 64, True)
    trainer = make_trainer(base, tuning=LoraTuning(rank=2, alpha=4.0))
    lora = flops.geometry(trainer.model)
    assert lora.trained_layer_parameters == trainer.info().num_trainable_parameters
    assert lora.layer_parameters == full.layer_parameters + lora.trained_layer_parameters
    assert not lora.head_is_trained
    targets = ("q_proj", "embed_tokens", "lm_head")
    tuning = LoraTuning(rank=2, alpha=4.0, target_modules=targets)
    heads = flops.geometry(make_trainer(base, tuning=tuning).model)
    # A of the embedding is looked up; what the head's adapter has runs with its rows alone.
    of_layers = 2 * 2 * (16 + 32) + 2 * 16
    assert heads.trained_layer_parameters == of_layers
    assert heads.layer_parameters == full.layer_parameters + of_layers
    assert heads.head_adapter_parameters == 2 * (16 + 64)
    work = flops.Work(tokens=0, rows=10, pairs=0)
    frozen = replace(heads, head_adapter_size=0)
    for count, per_weight in ((flops.training_flops, 6), (flops.forward_flops, 2)):
        assert count(heads, work) - count(frozen, work) == per_weight * 2 * (16 + 64) * 10


def test_logical_work_is_replicated_and_not_causal(base: FolderBase) -> None:
    trainer, batch = make_trainer(base, tokens=30), make_batch(0)
    plan = trainer.prepare_forward(batch).plan
    work = flops.logical_work(batch, plan)
    lengths = [len(batch.sequence_tokens(s)) for part in plan.micro_batches for s in part.sequences]
    assert work.tokens == sum(lengths) == plan.unshared_tokens
    assert work.pairs == sum(length**2 for length in lengths)
    assert work.rows == batch.loss_mask.sum()


def test_peak_is_unknown_on_a_cpu() -> None:
    assert flops.peak_flops(torch.device("cpu"), torch.bfloat16) is None
    assert flops.utilisation(1e12, 1.0, None) is None
    assert flops.utilisation(1e12, 0.0, 1e12) is None
    assert flops.utilisation(5e11, 2.0, 1e12) == 0.25
