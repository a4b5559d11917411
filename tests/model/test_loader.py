"""From a spec to a model: the same bits for the same spec, typed errors for what cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ratoon.errors import ErrorCode
from ratoon.model.experts import EXPERTS_NAME
from ratoon.model.spec import PRESET_NAMES, ModelDtype, PresetBase
from ratoon_proto.types import FullTuning, LoraTuning
from tests.model.builders import (
    FULL,
    LORA,
    LORA_ATTENTION,
    TINY,
    error_of,
    hidden_of,
    load,
)
from tests.model.packing import pack
from tests.tiny_models import ARCHITECTURES, ROUTED, WITH_EXPERTS, write_folder


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("tiny", 0.8e6, 1.2e6),
        ("small", 10e6, 15e6),
        ("tiny-qwen3.5", 0.8e6, 1.2e6),
        ("tiny-gpt-oss", 1.5e6, 2e6),
    ],
)
def test_preset_has_the_size_it_is_known_by(name: str, low: float, high: float) -> None:
    info = load(PresetBase(name=name), dtype=ModelDtype.FLOAT32).info()
    assert low <= info.num_parameters <= high
    assert info.num_trainable_parameters == info.num_parameters
    assert info.vocab_size == 260
    assert info.max_sequence_tokens >= 8192


@pytest.mark.parametrize(
    ("preset", "tuning", "seed"),
    [
        *(("tiny", tuning, seed) for tuning in (FULL, LORA) for seed in (0, 7, 2**64 - 1)),
        ("tiny-qwen3.5", FULL, 7),
        ("tiny-gpt-oss", FULL, 7),
    ],
)
def test_same_seed_gives_the_same_bits(
    preset: str, tuning: FullTuning | LoraTuning, seed: int
) -> None:
    base = PresetBase(name=preset)
    torch.manual_seed(1)
    first = load(base, dtype=ModelDtype.FLOAT32, seed=seed, tuning=tuning).module.state_dict()
    torch.manual_seed(2)
    second = load(base, dtype=ModelDtype.FLOAT32, seed=seed, tuning=tuning).module.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_another_seed_gives_other_weights_in_every_matrix() -> None:
    first = load(TINY, seed=0, tuning=LORA).module.state_dict()
    second = load(TINY, seed=1, tuning=LORA).module.state_dict()
    matrices = [n for n, value in first.items() if value.ndim == 2 and ".lora_B." not in n]
    assert len(matrices) == 2 + 2 * 4 * 7
    assert all(not torch.equal(first[name], second[name]) for name in matrices)


def test_loading_leaves_global_random_state(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "base", "qwen3_moe")
    before = torch.random.get_rng_state()
    load(TINY, tuning=LORA)
    load(folder)
    load(folder, tuning=LORA_ATTENTION)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_bfloat16_weights_are_the_rounded_float32_weights() -> None:
    exact = load(TINY, dtype=ModelDtype.FLOAT32).named_trainable()
    rounded = load(TINY, dtype=ModelDtype.BFLOAT16).named_trainable()
    assert exact.keys() == rounded.keys()
    for name, parameter in rounded.items():
        assert torch.equal(parameter, exact[name].to(torch.bfloat16)), name


def test_rotary_frequencies_stay_float32_in_bfloat16() -> None:
    """`module.to(bfloat16)` would round them, and the sampler's model would be another one."""
    buffers = dict(load(TINY, dtype=ModelDtype.BFLOAT16).module.named_buffers())
    exact = dict(load(TINY, dtype=ModelDtype.FLOAT32).module.named_buffers())
    frequencies = buffers["model.rotary_emb.inv_freq"]
    assert frequencies.dtype is torch.float32
    assert torch.equal(frequencies, exact["model.rotary_emb.inv_freq"])


def test_first_logits_are_nearly_uniform() -> None:
    """A fresh policy explores: no token starts with a probability far from 1/260."""
    model = load(TINY, dtype=ModelDtype.FLOAT32)
    hidden_TD = hidden_of(model, pack([list(range(32, 120))]))
    probability_TV = torch.softmax(hidden_TD @ model.lm_head_VD.T, dim=-1)
    assert probability_TV.max() < 10 / 260
    assert probability_TV.min() > 0.1 / 260


def test_unknown_preset_is_named() -> None:
    error = error_of(lambda: load(PresetBase(name="huge")))
    assert (error.code, error.field) == (ErrorCode.INVALID_ARGUMENT, "preset")
    assert (error.got, error.expected) == ("'huge'", ", ".join(PRESET_NAMES))


def test_unavailable_attention_backend_is_refused_with_its_reason() -> None:
    error = error_of(lambda: load(TINY, attention_backend="nonsense"))
    assert (error.code, error.field) == (ErrorCode.UNSUPPORTED, "attention_backend")
    assert "nonsense" in error.message


def test_named_attention_backend_is_the_one_used() -> None:
    assert load(TINY, attention_backend="reference").info().attention_backend == "reference"


def test_float32_folder_loads_as_bfloat16(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "base", "llama")
    stored = load_file(folder / "model.safetensors")
    for name, parameter in load(folder, dtype=ModelDtype.BFLOAT16).named_trainable().items():
        assert torch.equal(parameter, stored[name].to(torch.bfloat16)), name


def drop_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def add_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.sinks"] = torch.zeros(4)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def reshape_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.zeros(17)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": ["LlamaFor')


def list_config(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def wrong_type(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": "wide"}))


@pytest.mark.parametrize(
    ("damage", "field"),
    [
        (drop_weight, "model_folder['model.layers.1.self_attn.q_proj.weight']"),
        (add_weight, "model_folder['model.layers.0.self_attn.sinks']"),
        (reshape_weight, "model_folder['model.norm.weight']"),
        (truncate, "model_folder/model.safetensors"),
        (remove_config, "model_folder/config.json"),
        (break_config, "model_folder/config.json"),
        (list_config, "model_folder/config.json"),
        (remove_weights, "model_folder"),
        (wrong_type, "config.hidden_size"),
    ],
)
def test_damaged_folder_is_a_typed_error(
    tmp_path: Path, damage: Callable[[Path], None], field: str
) -> None:
    folder = write_folder(tmp_path / "base", "llama")
    damage(folder)
    error = error_of(lambda: load(folder))
    assert (error.code, error.field) == (ErrorCode.INVALID_ARGUMENT, field)
    assert error.got
    assert error.expected


def test_missing_folder_is_a_typed_error(tmp_path: Path) -> None:
    error = error_of(lambda: load(tmp_path / "nowhere"))
    assert (error.code, error.field) == (ErrorCode.INVALID_ARGUMENT, "model_folder")
    assert str(tmp_path) not in error.message


def test_tied_configuration_with_a_head_of_its_own_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "base", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    error = error_of(lambda: load(folder))
    assert (error.code, error.field) == (ErrorCode.UNSUPPORTED, "config.tie_word_embeddings")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_experts_run_as_ours_in_every_architecture_that_has_them(
    tmp_path: Path, architecture: str
) -> None:
    """Architectures without experts refuse to be told how to run them."""
    module = load(write_folder(tmp_path / "base", architecture)).module
    is_ours = module.config._experts_implementation == EXPERTS_NAME
    assert is_ours == (architecture in (*WITH_EXPERTS, *ROUTED))


def test_fused_experts_load_as_those_of_one_tensor_each(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "base", "qwen3_moe")
    expected = load(folder).module.state_dict()
    assert "model.layers.0.mlp.experts.gate_up_proj" in expected
    weights = folder / "model.safetensors"
    assert not expected.keys() <= load_file(weights).keys()
    save_file({name: value.float() for name, value in expected.items()}, weights)
    found = load(folder).module.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_names_of_a_decoder_without_its_head_are_taken(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "base", "qwen3")
    stored = load_file(folder / "model.safetensors")
    short = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    short["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(short, folder / "model.safetensors", {"format": "pt"})
    found = load(folder, dtype=ModelDtype.FLOAT32).named_trainable()
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], value) for name, value in stored.items())


@pytest.mark.parametrize(
    ("architecture", "name", "again"),
    [
        ("qwen3", "model.norm.weight", "norm.weight"),
        (
            "qwen3_moe",
            "model.layers.1.mlp.experts.down_proj",
            "model.layers.1.mlp.experts.3.down_proj.weight",
        ),
    ],
)
def test_a_tensor_under_two_names_is_refused(
    tmp_path: Path, architecture: str, name: str, again: str
) -> None:
    folder = write_folder(tmp_path / "base", architecture)
    whole = load(folder, dtype=ModelDtype.FLOAT32).module.state_dict()
    weights = load_file(folder / "model.safetensors") | {name: whole[name].clone()}
    weights.setdefault(again, torch.zeros(16))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    error = error_of(lambda: load(folder))
    assert (error.code, error.got) == (ErrorCode.INVALID_ARGUMENT, "there twice")
    assert error.field.startswith("model_folder['")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 2.0**127])
@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("llama", "lm_head.weight"),
        ("qwen2", "model.layers.1.self_attn.k_proj.bias"),
        ("qwen3_moe", "model.layers.1.mlp.experts.3.up_proj.weight"),
    ],
)
def test_a_weight_that_is_not_finite_is_named(
    tmp_path: Path, architecture: str, name: str, value: float
) -> None:
    """One NaN in one row of a head made a policy whose log-probs were all NaN."""
    folder = write_folder(tmp_path / "base", architecture)
    weights = load_file(folder / "model.safetensors")
    weights[name].view(-1)[-1] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for dtype in (ModelDtype.FLOAT32, ModelDtype.BFLOAT16):
        error = error_of(partial(load, folder, dtype=dtype))
        assert (error.code, error.field) == (ErrorCode.INVALID_ARGUMENT, f"model_folder[{name!r}]")
        assert "not finite" in error.got


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float8_e4m3fn, torch.bool])
def test_weights_that_are_no_floats_of_16_bits_or_more_are_refused(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    folder = write_folder(tmp_path / "base", "llama")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(16).to(dtype)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    error = error_of(lambda: load(folder))
    assert (error.code, error.field) == (
        ErrorCode.UNSUPPORTED,
        "model_folder['model.norm.weight']",
    )


def test_sizes_are_those_of_the_files_before_anything_is_allocated(tmp_path: Path) -> None:
    """A size that only the configuration has was allocated before it was refused."""
    folder = write_folder(tmp_path / "base", "llama")
    config = json.loads((folder / "config.json").read_text())
    huge = {"intermediate_size": 2**20, "vocab_size": 2**24, "hidden_size": 2**20}
    for name, value in huge.items():
        (folder / "config.json").write_text(json.dumps(config | {name: value}))
        assert error_of(lambda: load(folder)).field.startswith("model_folder['")
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1024}))
    assert error_of(lambda: load(folder)).field == "model_folder"
