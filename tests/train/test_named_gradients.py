"""Gradient sums as a file, and their norms: named and shaped as exported weights are.

Nothing changes by reading them, and norms depend on no size of blocks.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.export import export_weights
from ratoon.model.spec import FolderBase, ModelDtype
from ratoon.shards.parts import parts_of
from ratoon.train.named_gradients import part_norms, tensor_norms
from ratoon.train.trainer import Trainer
from ratoon_proto.types import LoraTuning, TensorGradNorm
from tests.tiny_models import write_folder
from tests.train.trainer_runs import (
    assert_equal,
    forward_backward,
    make_batch,
    make_loss,
    make_step,
    make_trainer,
    weights_of,
)

LORA = LoraTuning(rank=2, alpha=4.0, target_modules=("q_proj", "down_proj"))


def filled(base: Path, *, dtype: ModelDtype = ModelDtype.FLOAT32, **options: Any) -> Trainer:
    """With two forward-backwards in its window."""
    trainer = make_trainer(FolderBase(folder=str(base)), dtype=dtype, **options)
    for seed in (1, 2):
        batch = make_batch(seed)
        forward_backward(trainer, batch, make_loss(batch))
    return trainer


def exported(trainer: Trainer, folder: Path) -> tuple[str, ...]:
    """Names of the tensors in exported weights, and the folder that has them."""
    folder.mkdir()
    export_weights(trainer.model, folder)
    (file,) = folder.glob("*.safetensors")
    return tuple(load_file(file))


def written(trainer: Trainer, names: tuple[str, ...], path: Path) -> dict[str, Tensor]:
    trainer.write_gradients(path, names)
    tensors = load_file(path)
    path.unlink()
    return tensors


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        ("qwen3", ModelDtype.BFLOAT16),
        ("llama", ModelDtype.FLOAT32),
        ("qwen3_moe", ModelDtype.FLOAT32),
    ],
)
def test_a_folder_with_gradients_for_weights_loads_as_the_sums(
    tmp_path: Path, architecture: str, dtype: ModelDtype
) -> None:
    """transformers puts experts together again as it does those of weights."""
    trainer = filled(write_folder(tmp_path / "base", architecture), dtype=dtype)
    names = exported(trainer, tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    path.unlink()
    trainer.write_gradients(path, names)
    tensors = load_file(path)
    assert tensors.keys() == {*names}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    assert trainer.gradient_bytes(names) == num_bytes
    config = tmp_path / "out" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "float32"}))
    loaded = cast(Any, AutoModelForCausalLM).from_pretrained(tmp_path / "out", dtype="float32")
    sums = trainer.ranks.own.gradients.sums()
    assert_equal({name: value.detach() for name, value in loaded.named_parameters()}, sums)
    assert all(float(each.abs().max()) > 0 for each in sums.values())


def test_one_expert_is_a_part_of_its_fused_parameter(tmp_path: Path) -> None:
    trainer = filled(write_folder(tmp_path / "base", "qwen3_moe"))
    experts = "model.layers.1.mlp.experts"
    names = (f"{experts}.2.up_proj.weight", f"{experts}.0.down_proj.weight")
    tensors = written(trainer, names, tmp_path / "g")
    sums = trainer.ranks.own.gradients.sums()
    gate_up, down = sums[f"{experts}.gate_up_proj"], sums[f"{experts}.down_proj"]
    assert tensors.keys() == {*names}
    assert torch.equal(tensors[names[0]], gate_up[2].chunk(2)[1])
    assert torch.equal(tensors[names[1]], down[0])
    assert trainer.gradient_bytes(names) == 4 * sum(each.numel() for each in tensors.values())


def test_an_adapters_gradients_have_the_names_of_its_file(tmp_path: Path) -> None:
    trainer = filled(write_folder(tmp_path / "base", "qwen3"), tuning=LORA)
    names = exported(trainer, tmp_path / "out")
    assert "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight" in names
    tensors = written(trainer, names, tmp_path / "g")
    sums = trainer.ranks.own.gradients.sums()
    assert_equal({name.replace(".default", ""): each for name, each in sums.items()}, tensors)
    step = make_step(trainer, make_loss(make_batch(1)), tensor_grad_norms=True)
    report = trainer.optim_step(step)
    assert {each.name for each in report.tensor_grad_norms} == {*names}


def test_an_experts_factor_is_a_part_of_its_fused_one(tmp_path: Path) -> None:
    tuning = LoraTuning(rank=2, alpha=4.0)
    trainer = filled(write_folder(tmp_path / "base", "qwen3_moe"), tuning=tuning)
    experts = "base_model.model.model.layers.1.mlp.experts"
    names = (f"{experts}.2.up_proj.lora_B.weight", f"{experts}.0.down_proj.lora_A.weight")
    assert {*names} < {*exported(trainer, tmp_path / "out")}
    tensors = written(trainer, names, tmp_path / "g")
    sums = trainer.ranks.own.gradients.sums()
    assert tensors.keys() == {*names}
    assert torch.equal(tensors[names[0]], sums[f"{experts}.up_proj.lora_B.weight"][2])
    assert torch.equal(tensors[names[1]], sums[f"{experts}.down_proj.lora_A.weight"][0])


def test_experts_are_one_tensor_in_the_report(tmp_path: Path) -> None:
    trainer = filled(write_folder(tmp_path / "base", "qwen3_moe"))
    step = make_step(trainer, make_loss(make_batch(1)), tensor_grad_norms=True)
    names = [each.name for each in trainer.optim_step(step).tensor_grad_norms]
    assert names == list(trainer.model.named_trainable())


@pytest.mark.parametrize("dtype", [ModelDtype.FLOAT32, ModelDtype.BFLOAT16])
def test_a_read_changes_no_bit_of_what_follows(tmp_path: Path, dtype: ModelDtype) -> None:
    base = write_folder(tmp_path / "base", "qwen3_moe")
    read, unread = filled(base, dtype=dtype), filled(base, dtype=dtype)
    names = exported(read, tmp_path / "out")
    written(read, names, tmp_path / "g")
    batch = make_batch(3)
    loss = make_loss(batch)
    for trainer in (read, unread):
        forward_backward(trainer, batch, loss)
        trainer.optim_step(make_step(trainer, loss))
    assert_equal(weights_of(read), weights_of(unread))
    assert read.state_digest() == unread.state_digest()


def test_what_no_gradient_has_reached_is_zero_and_stays_untouched(tmp_path: Path) -> None:
    """Rollouts without an advantage count, and are not run."""
    base = FolderBase(folder=str(write_folder(tmp_path / "base", "qwen3")))
    trainer = make_trainer(base, dtype=ModelDtype.FLOAT32)
    batch = make_batch(1)
    assert batch.advantages is not None
    batch.advantages[:] = np.zeros_like(batch.advantages)
    forward_backward(trainer, batch, make_loss(batch))
    tensors = written(trainer, ("model.norm.weight",), tmp_path / "g")
    assert float(tensors["model.norm.weight"].abs().max()) == 0.0
    assert trainer.window_counters.tokens > 0
    assert all(each.grad is None for each in trainer.model.named_trainable().values())


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.9.mlp.up_proj.weight", "x" * 999])
def test_a_name_that_is_not_exported_is_refused(tmp_path: Path, name: str) -> None:
    """Embeddings are tied here: the head is no tensor of its own."""
    trainer = filled(write_folder(tmp_path / "base", "qwen3"))
    with pytest.raises(RatoonError) as caught:
        trainer.gradient_bytes(("model.norm.weight", name))
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_ARGUMENT, "names[1]")
    assert name[:70] in caught.value.got
    assert len(caught.value.got) <= 80


def test_only_a_whole_window_is_read(tmp_path: Path) -> None:
    trainer = filled(write_folder(tmp_path / "base", "qwen3"))
    loss = make_loss(make_batch(1))
    trainer._window.begin(loss)
    reads = (
        lambda: trainer.window_counters,
        lambda: trainer.write_gradients(tmp_path / "g", ("model.norm.weight",)),
    )
    for code in (ErrorCode.WINDOW_POISONED, ErrorCode.WINDOW_EMPTY):
        for one in reads:
            with pytest.raises(RatoonError) as caught:
                one()
            assert caught.value.code is code
        trainer.discard_gradients()
    assert not (tmp_path / "g").exists()


def _norms(
    sums: dict[str, Tensor], divisor: float, part: int = 2**25
) -> tuple[TensorGradNorm, ...]:
    parts = {one.name: one.of(sums[one.parameter]) for one in parts_of(sums, part)}
    return tensor_norms(part_norms(parts).values(), {name: name for name in sums}, divisor)


@pytest.mark.parametrize("part", [1, 7, 2**25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_do_not_depend_on_parts(part: int, dtype: torch.dtype) -> None:
    sums = {
        "b": torch.tensor([[3.0, -4.0], [0.0, 0.0]], dtype=dtype),
        "a": torch.arange(-20.0, 12.0, dtype=dtype).reshape(4, 8),
        # Squares of these are no float32.
        "large": torch.full((3,), 1e30, dtype=dtype),
        "small": torch.full((3,), 1e-30, dtype=dtype),
    }
    found = {each.name: (each.norm, each.max_abs) for each in _norms(sums, 2.0, part)}
    assert list(found) == list(sums)
    assert found["b"] == (2.5, 2.0)
    square = sum(float(number) ** 2 for number in range(-20, 12))
    assert found["a"] == pytest.approx((math.sqrt(square) / 2, 10.0), rel=1e-12)
    assert found["large"] == pytest.approx((math.sqrt(3) * 5e29, 5e29), rel=1e-6)
    assert found["small"] == pytest.approx((math.sqrt(3) * 5e-31, 5e-31), rel=1e-6)


def test_what_is_not_finite_is_said_of_its_tensor() -> None:
    sums = {
        "nan": torch.tensor([1.0, math.nan, 2.0]),
        "infinite": torch.tensor([1.0, -math.inf]),
        "fine": torch.tensor([1.0]),
    }
    nan, infinite, fine = _norms(sums, 1.0)
    assert math.isnan(nan.norm)
    assert math.isnan(nan.max_abs)
    assert (infinite.norm, infinite.max_abs) == (math.inf, math.inf)
    assert (fine.norm, fine.max_abs) == (1.0, 1.0)
