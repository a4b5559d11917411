"""The config.json of versions: readers of transformers 4 and of 5 have the model that was trained.

transformers 4 is not needed here: a reader by hand knows its words alone, and computes rotary
frequencies by the papers' formulas.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ratoon.errors import ErrorCode
from ratoon.model.export import export_weights
from ratoon.model.policy_model import PolicyModel
from ratoon.model.spec import ModelDtype, PresetBase
from tests.model.builders import FULL, LORA, error_of, hidden_of, load
from tests.model.folder_words import SCALINGS, THETA, WORDS, read_config, say, write_config
from tests.model.packing import pack
from tests.tiny_models import ARCHITECTURES, write_folder

TOKENS = [int(token) for token in torch.randperm(64, generator=torch.Generator().manual_seed(5))]
ALL_ARCHITECTURES = (*ARCHITECTURES, "qwen3_moe_mixed")


def folder_of(tmp_path: Path, architecture: str, words: str, scaling: str) -> Path:
    folder = write_folder(tmp_path / f"{words}-{scaling}", architecture)
    write_config(folder, read_config(folder) | {"max_position_embeddings": 24})
    return say(folder, words, scaling)


def publish(model: PolicyModel, folder: Path) -> Path:
    folder.mkdir()
    export_weights(model, folder)
    return folder


def token_logprobs(logits_TV: Tensor) -> Tensor:
    rows = torch.log_softmax(logits_TV[:-1].float(), dim=-1)
    return rows.gather(1, torch.tensor(TOKENS)[1:, None])[:, 0]


def own_logprobs(model: PolicyModel) -> Tensor:
    with torch.no_grad():
        return token_logprobs(hidden_of(model, pack([TOKENS])) @ model.lm_head_VD.T)


def stock_logprobs(folder: Path) -> Tensor:
    stock = cast(Any, AutoModelForCausalLM).from_pretrained(
        folder, local_files_only=True, experts_implementation="eager"
    )
    with torch.no_grad():
        return token_logprobs(stock(torch.tensor([TOKENS])).logits[0])


def frequencies_by_hand(config: dict[str, Any]) -> tuple[Tensor, float]:
    """Rotary frequencies, and what angles' cosines are multiplied by, of a config.json of
    transformers 4, whose words alone are read."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    head_dim = config.get("qk_rope_head_dim", head_dim)
    head_dim = int(head_dim * config.get("partial_rotary_factor", 1))
    theta, scaling = config.get("rope_theta", 10_000.0), config.get("rope_scaling") or {}
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequency = theta**-exponent
    kind = scaling.get("type", scaling.get("rope_type", "default"))
    if kind == "default":
        return frequency, 1.0
    factor = scaling["factor"]
    if kind == "linear":
        return frequency / factor, 1.0
    original = scaling.get("original_max_position_embeddings", config["max_position_embeddings"])
    if kind == "llama3":
        # Llama 3.1: turns over the original length, between the two factors a linear blend.
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = original * frequency / (2 * math.pi)
        share = ((turns - low) / (high - low)).clamp(0, 1)
        return frequency * (share + (1 - share) / factor), 1.0
    assert kind == "yarn"
    # Peng et al., 2023 (arXiv:2309.00071), with the ramp over whole dimensions.
    bounds = [
        head_dim * math.log(original / (2 * math.pi * beta)) / (2 * math.log(theta))
        for beta in (scaling.get("beta_fast", 32), scaling.get("beta_slow", 1))
    ]
    start, stop = max(math.floor(bounds[0]), 0), min(math.ceil(bounds[1]), head_dim - 1)
    ramp = ((torch.arange(head_dim // 2) - start) / max(stop - start, 1e-3)).clamp(0, 1)
    return frequency * (1 - ramp + ramp / factor), 0.1 * math.log(factor) + 1


@pytest.mark.parametrize(
    ("architecture", "scaling", "words"),
    [
        *((architecture, "default", "new") for architecture in ALL_ARCHITECTURES),
        *((architecture, "yarn", "old") for architecture in ALL_ARCHITECTURES),
        *(("gemma3", "linear", words) for words in ("new", "both")),
        *(("llama", scaling, "both") for scaling in SCALINGS),
        *(("llama", scaling, "new") for scaling in SCALINGS if scaling != "default"),
        *(("qwen3_moe", "default", words) for words in ("old", "both")),
    ],
)
def test_version_is_the_model_in_both_words(
    tmp_path: Path, architecture: str, scaling: str, words: str
) -> None:
    """A reader with transformers 4 took 10000 for rope_theta, and no scaling; or failed on the
    number of experts."""
    model = load(folder_of(tmp_path, architecture, words, scaling), dtype=ModelDtype.FLOAT32)
    version = publish(model, tmp_path / "version")
    assert (stock_logprobs(version) - own_logprobs(model)).abs().max() <= 3e-5
    config = read_config(version)
    rotary = cast(Any, model.module).get_decoder().rotary_emb
    local = {"rope_theta": config.get("rope_local_base_freq"), "rope_scaling": None}
    by_prefix = {"": config}
    if "rope_local_base_freq" in config:
        # transformers 4 has one base for both kinds of olmo3's layers.
        assert architecture == "gemma3" or config["rope_local_base_freq"] == THETA
        by_prefix = {"full_attention_": config, "sliding_attention_": config | local}
    for prefix, words_of_kind in by_prefix.items():
        frequency, attention_factor = frequencies_by_hand(words_of_kind)
        found = getattr(rotary, f"{prefix}inv_freq").double()
        assert torch.allclose(found, frequency, rtol=1e-6, atol=0)
        assert getattr(rotary, f"{prefix}attention_scaling") == pytest.approx(attention_factor)
    assert config["torch_dtype"] == config["dtype"] == "float32"
    if architecture.startswith("qwen3_moe") or architecture == "gpt_oss":
        assert config["num_experts"] == config["num_local_experts"] == 4


@pytest.mark.parametrize("scaling", SCALINGS)
def test_reader_by_hand_knows_scalings_apart(tmp_path: Path, scaling: str) -> None:
    """Control: another theta, or the scaling left out, is seen."""
    config = read_config(folder_of(tmp_path, "llama", "old", scaling))
    frequency, _ = frequencies_by_hand(config)
    others = [config | {"rope_theta": 10_000.0}]
    others += [config | {"rope_scaling": None}] if SCALINGS[scaling] else []
    for other in others:
        assert not torch.allclose(frequencies_by_hand(other)[0], frequency, rtol=1e-2)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_every_word_is_read_to_the_same_bits(
    tmp_path: Path, architecture: str, scaling: str
) -> None:
    found: list[Tensor] = []
    for words in WORDS:
        model = load(folder_of(tmp_path, architecture, words, scaling))
        found.append(hidden_of(model, pack([TOKENS])).detach())
    assert all(torch.equal(hidden_TD, found[0]) for hidden_TD in found)


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_preset_is_the_model_in_both_words(tmp_path: Path, name: str) -> None:
    model = load(PresetBase(name=name), dtype=ModelDtype.BFLOAT16)
    config = read_config(publish(model, tmp_path / "version"))
    assert config["rope_parameters"] == {"rope_theta": 10_000.0, "rope_type": "default"}
    assert (config["rope_theta"], config["rope_scaling"]) == (10_000.0, None)
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"


@pytest.mark.parametrize("words", ["old", "new"])
def test_yarn_without_a_factor_has_one_in_the_version(tmp_path: Path, words: str) -> None:
    """transformers 5 takes null for max_position_embeddings over the original length, 4 fails."""
    folder = folder_of(tmp_path, "llama", words, "yarn")
    config = read_config(folder)
    config["rope_scaling" if words == "old" else "rope_parameters"]["factor"] = None
    write_config(folder, config)
    model = load(folder, dtype=ModelDtype.FLOAT32)
    version = publish(model, tmp_path / "version")
    for name in ("rope_scaling", "rope_parameters"):
        assert read_config(version)[name]["factor"] == 24 / 8
    assert torch.equal(stock_logprobs(version), own_logprobs(model))


def test_version_keeps_what_its_base_said(tmp_path: Path) -> None:
    """Defaults of another transformers, tokens, and the transformers that wrote the tokenizer: a
    reader that mends tokenizers of earlier ones asks which it was."""
    folder = folder_of(tmp_path, "qwen3", "old", "early yarn")
    said = read_config(folder) | {
        "pad_token_id": 7,
        "eos_token_id": [7, 9],
        "sliding_window": 4096,
        "use_sliding_window": False,
        "transformers_version": "4.51.0",
        "torch_dtype": "bfloat16",
        "made_by": "somebody",
    }
    write_config(folder, said)
    config = read_config(publish(load(folder, dtype=ModelDtype.FLOAT32), tmp_path / "version"))
    new = {"rope_parameters", "dtype", "torch_dtype"}
    assert {name: config[name] for name in said.keys() - new} == {
        name: value for name, value in said.items() if name not in new
    }
    assert config["torch_dtype"] == config["dtype"] == "float32"
    assert config["rope_parameters"] | {"type": "yarn"} == SCALINGS["early yarn"] | {
        "rope_type": "yarn",
        "rope_theta": THETA,
        "original_max_position_embeddings": 24,
    }


def test_version_of_a_version_says_the_same(tmp_path: Path) -> None:
    for number, scaling in enumerate(SCALINGS):
        folder = folder_of(tmp_path, "qwen3_moe", "old", scaling)
        first = publish(load(folder), tmp_path / f"{number}-first")
        second = publish(load(first), tmp_path / f"{number}-second")
        assert (first / "config.json").read_bytes() == (second / "config.json").read_bytes()


def test_version_does_not_say_where_its_base_was(tmp_path: Path) -> None:
    """transformers 4 wrote the path of the folder that a model was loaded from."""
    folder = folder_of(tmp_path, "llama", "old", "default")
    write_config(folder, read_config(folder) | {"_name_or_path": str(folder)})
    for name, tuning in (("full", FULL), ("lora", LORA)):
        version = publish(load(folder, tuning=tuning), tmp_path / name)
        for path in version.iterdir():
            assert str(tmp_path).encode() not in path.read_bytes(), path.name


LINEAR, YARN = SCALINGS["linear"], SCALINGS["yarn"]


@pytest.mark.parametrize(
    ("architecture", "scaling", "changes", "field"),
    [
        ("llama", "default", {"rope_theta": 10_000.0}, "rope_parameters.rope_theta"),
        # A scaling as model cards say to add it, to a folder that transformers 5 saved: it would
        # read 10000 for rope_theta, as that is in rope_parameters alone.
        ("qwen3", "default", {"rope_theta": None, "rope_scaling": YARN}, "rope_parameters."),
        (
            "qwen3",
            "default",
            {
                "rope_theta": None,
                "rope_parameters": {"rope_theta": THETA},
                "rope_scaling": LINEAR,
            },
            "rope_parameters.rope_theta",
        ),
        ("llama", "linear", {"rope_scaling": LINEAR | {"factor": 2.0}}, "rope_parameters.factor"),
        (
            "llama",
            "linear",
            {"rope_scaling": LINEAR | {"rope_theta": 5.0}},
            "rope_parameters.rope_theta",
        ),
        (
            "llama",
            "linear",
            {"rope_scaling": LINEAR | {"type": "yarn"}},
            "rope_parameters.rope_type",
        ),
        (
            "llama",
            "yarn",
            {"rope_scaling": YARN | {"beta_fast": 8.0}},
            "rope_parameters.beta_fast",
        ),
        ("qwen3_moe", "default", {"num_local_experts": 8}, "num_experts"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_words_that_disagree_are_refused(
    tmp_path: Path, architecture: str, scaling: str, changes: dict[str, Any], field: str
) -> None:
    folder = folder_of(tmp_path, architecture, "both", scaling)
    config = read_config(folder) | changes
    write_config(folder, {name: value for name, value in config.items() if value is not None})
    error = error_of(lambda: load(folder))
    assert error.code in (ErrorCode.INVALID_ARGUMENT, ErrorCode.UNSUPPORTED)
    assert error.field.startswith(f"config.{field}")
    assert error.field in error.message


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": THETA, "rope_scaling": SCALINGS["early linear"]},
        {"rope_parameters": SCALINGS["linear"]},
        {"rope_scaling": SCALINGS["linear"] | {"type": "linear", "rope_theta": THETA}},
    ],
    ids=["another name", "theta beside", "theta twice"],
)
def test_words_that_agree_are_taken(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = folder_of(tmp_path, "llama", "both", "linear")
    write_config(folder, read_config(folder) | changes)
    rope = load(folder).config.rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("linear", 4.0, THETA)
