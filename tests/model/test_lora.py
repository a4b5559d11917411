"""Adapters: where they may sit, and how they start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ratoon.errors import ErrorCode
from ratoon.model.spec import LoraTuning, ModelDtype
from tests.model.builders import LORA, LORA_ATTENTION, TINY, error_of, hidden_of, load
from tests.model.packing import branching_sequences, pack
from tests.tiny_models import write_folder

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}


def targets(names: list[str]) -> set[str]:
    return {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in names}


def test_default_targets_are_every_linear_map(tmp_path: Path) -> None:
    model = load(write_folder(tmp_path / "base", "qwen3"), tuning=LORA)
    assert targets(list(model.named_trainable())) == ATTENTION | MLP
    assert len(model.named_trainable()) == 2 * 2 * len(ATTENTION | MLP)


def test_lora_without_targets_is_refused_where_experts_would_stay_as_they_are(
    tmp_path: Path,
) -> None:
    """Attention alone was adapted, and nothing said that nine tenths of the model were not."""
    folder = write_folder(tmp_path / "base", "qwen3_moe")
    error = error_of(lambda: load(folder, tuning=LORA))
    assert (error.code, error.field) == (ErrorCode.UNSUPPORTED, "tuning.lora.target_modules")
    assert "experts" in error.message
    assert "k_proj, o_proj, q_proj, v_proj" in error.expected


def test_named_targets_adapt_the_attention_of_a_model_with_experts(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "base", "qwen3_moe")
    model = load(folder, tuning=LORA_ATTENTION)
    assert targets(list(model.named_trainable())) == ATTENTION
    assert len(model.named_trainable()) == 2 * 2 * len(ATTENTION)


def test_named_targets_are_the_only_ones() -> None:
    tuning = LoraTuning(rank=2, alpha=4.0, target_modules=("v_proj", "q_proj"))
    model = load(TINY, tuning=tuning)
    assert targets(list(model.named_trainable())) == {"q_proj", "v_proj"}


@pytest.mark.parametrize(
    ("architecture", "target"),
    [
        ("qwen3", "lm_head"),
        ("qwen3", "embed_tokens"),
        ("qwen3", "proj"),
        ("qwen3", "q_norm"),
        ("qwen3_moe", "gate_proj"),
        ("qwen3_moe", "down_proj"),
        ("qwen3_moe", "gate_up_proj"),
        ("qwen3_moe", "gate"),
    ],
)
def test_other_targets_are_refused_by_index(tmp_path: Path, architecture: str, target: str) -> None:
    folder = write_folder(tmp_path / "base", architecture)
    tuning = LoraTuning(rank=2, alpha=4.0, target_modules=("q_proj", target))
    error = error_of(lambda: load(folder, tuning=tuning))
    assert (error.code, error.field) == (
        ErrorCode.UNSUPPORTED,
        "tuning.lora.target_modules[1]",
    )
    assert (error.got, error.expected.split()[0]) == (target, "one")


@pytest.mark.parametrize(
    ("rank", "alpha", "field"),
    [
        (0, 4.0, "rank"),
        (-1, 4.0, "rank"),
        (2, 0.0, "alpha"),
        (2, float("nan"), "alpha"),
        (2, float("inf"), "alpha"),
    ],
)
def test_rank_and_alpha_out_of_range_are_refused(rank: int, alpha: float, field: str) -> None:
    error = error_of(lambda: load(TINY, tuning=LoraTuning(rank=rank, alpha=alpha)))
    assert (error.code, error.field) == (ErrorCode.INVALID_ARGUMENT, f"tuning.lora.{field}")


def test_fresh_adapter_changes_nothing() -> None:
    packed = pack(branching_sequences(0))
    plain = hidden_of(load(TINY), packed)
    assert torch.equal(hidden_of(load(TINY, tuning=LORA), packed), plain)


def test_adapter_scale_is_alpha_over_rank() -> None:
    """y = W x + alpha / rank * B A x, at one projection of known input."""
    model = load(TINY, tuning=LoraTuning(rank=4, alpha=10.0))
    layer = model.module.get_submodule("model.layers.0.self_attn.q_proj")
    a_RD = model.named_trainable()[
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    ]
    b_DR = model.named_trainable()[
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight"
    ]
    with torch.no_grad():
        b_DR.fill_(0.25)
    x_TD = torch.randn(3, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight = layer.get_submodule("base_layer").get_parameter("weight")
    expected = x_TD @ weight.T + (10.0 / 4) * (x_TD @ a_RD.T) @ b_DR.T
    assert torch.allclose(layer(x_TD), expected, rtol=1e-12, atol=1e-12)


def test_adapter_has_the_dtype_of_its_base() -> None:
    model = load(TINY, tuning=LORA, dtype=ModelDtype.BFLOAT16)
    assert {p.dtype for p in model.named_trainable().values()} == {torch.bfloat16}


def test_base_of_an_adapted_preset_is_the_full_preset_of_its_seed() -> None:
    """A reader of adapters gets the base so, see docs/api.md."""
    full = dict(load(TINY).module.named_parameters())
    adapted = load(TINY, tuning=LORA).module.named_parameters()
    base = {name.replace(".base_layer", ""): p for name, p in adapted if ".lora_" not in name}
    assert base.keys() == full.keys()
    assert all(torch.equal(base[name], parameter) for name, parameter in full.items())
