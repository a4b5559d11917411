"""The built-in models: small decoders over bytes, of several families, and their tokenizer's files.

Weights are random, decided by the seed.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.families import family_of
from ratoon.model.folder_model import implementations
from ratoon.model.spec import PRESET_NAMES
from ratoon.model.tokenizer import BOS_TOKEN, EOS_TOKEN, PAD_TOKEN, preset_tokenizer

VOCAB_SIZE = 260
# A turn is <|bos|>ROLE, a newline and its text, and ends with <|eos|> and a newline.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|bos|>{{ message['role'] }}\n{{ message['content'] }}<|eos|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}"
)
_EMBEDDING_STD = 0.02
# Ends of names of linear maps that write to the residual stream.
_RESIDUAL = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")


def tensor_generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator for the tensor `name` of a model with this seed (unsigned, 64 bits)."""
    generator = torch.Generator(device="cpu")
    generator.manual_seed(xxhash.xxh3_64_intdigest(f"{seed}/{name}".encode()))
    return generator


def write_tokenizer(folder: Path) -> None:
    """Write the tokenizer's files in the form that `AutoTokenizer` of transformers 4 and of 5
    reads.

    transformers 5 accepts the older names of two settings; 4 fails on the newer ones.
    """
    byte_tokenizer().save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer; `write_tokenizer` writes it for others."""
    return PreTrainedTokenizerFast(
        tokenizer_object=preset_tokenizer(),
        chat_template=CHAT_TEMPLATE,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        additional_special_tokens=["<|sep|>"],
        clean_up_tokenization_spaces=False,
    )


def preset_config(name: str) -> PreTrainedConfig:
    """The shape of a preset: those named `tiny` learn in a minute or two on a CPU, `small` is for
    benchmarks there.

    `tiny` and `small` are of Qwen3. `tiny-qwen3.5` has three layers of gated DeltaNet and one of
    gated attention, `tiny-gpt-oss` sinks, windows in every other layer, and routed experts.
    """
    match name:
        case "tiny":
            return Qwen3Config(**_words(), **_sizes(hidden=128, layers=4, heads=4, head_dim=32))
        case "small":
            sizes = _sizes(hidden=384, layers=8, heads=6, head_dim=64)
            return Qwen3Config(**_words(), **{**sizes, "intermediate_size": 1024})
        case "tiny-qwen3.5":
            return Qwen3_5TextConfig(
                **_words(),
                **_sizes(hidden=128, layers=4, heads=4, head_dim=32),
                linear_num_key_heads=2,
                linear_num_value_heads=4,
                linear_key_head_dim=32,
                linear_value_head_dim=32,
            )
        case "tiny-gpt-oss":
            sizes = _sizes(hidden=128, layers=4, heads=4, head_dim=32)
            return GptOssConfig(
                **_words(),
                **{**sizes, "intermediate_size": 128},
                num_local_experts=8,
                num_experts_per_tok=2,
                sliding_window=32,
            )
        case _:
            raise RatoonError(
                ErrorCode.INVALID_ARGUMENT,
                f"preset: got {name!r}, expected one of {', '.join(PRESET_NAMES)}",
                field="preset",
                got=repr(name),
                expected=", ".join(PRESET_NAMES),
            )


def build_preset(name: str, seed: int) -> PreTrainedModel:
    """A preset's module with the weights of `seed`, float32, on the CPU."""
    config = preset_config(name)
    family = family_of(config)
    with torch.random.fork_rng(devices=[]):
        module = cast("Any", AutoModelForCausalLM).from_config(config, **implementations(family))
    _initialize(module, seed)
    family.prepare(module)
    return module


def _words() -> dict[str, Any]:
    """What all presets say; configurations change what they are given."""
    return {
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 32_768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "tie_word_embeddings": True,
        "attention_dropout": 0.0,
        "pad_token_id": PAD_TOKEN,
        "bos_token_id": BOS_TOKEN,
        "eos_token_id": EOS_TOKEN,
    }


def _sizes(*, hidden: int, layers: int, heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
    }


@torch.no_grad()
def _initialize(module: PreTrainedModel, seed: int) -> None:
    """Linear maps keep the variance of their input; those that write to the residual stream, two a
    layer, are scaled down by 1 / sqrt(2 layers) (Radford et al., 2019).

    Norms are as transformers makes them, which is without chance.
    """
    residual_scale = 1 / math.sqrt(2 * module.config.num_hidden_layers)
    for name, parameter in module.named_parameters():
        generator = tensor_generator(seed, name)
        # Decays as Mamba-2 begins with them (Dao and Gu, 2024, arXiv:2405.21060): rates within
        # [1, 16], and steps within [0.001, 0.1], which are the softplus of what is stored.
        if name.endswith(".A_log"):
            parameter.copy_(1 + 15 * torch.rand(parameter.shape, generator=generator)).log_()
        elif name.endswith(".dt_bias"):
            step = 10 ** (2 * torch.rand(parameter.shape, generator=generator) - 3)
            parameter.copy_(step + torch.log(-torch.expm1(-step)))
        elif name.endswith((".sinks", "bias")):
            nn.init.zeros_(parameter)
        elif parameter.ndim > 1:
            std = 1 / math.sqrt(_inputs(name, parameter))
            if name.endswith("embed_tokens.weight"):
                std = _EMBEDDING_STD
            elif name.endswith(_RESIDUAL):
                std *= residual_scale
            _fill_normal(parameter, std, generator)


def _inputs(name: str, weight: Tensor) -> int:
    """Elements that one output of a weight reads; a convolution has one channel for each."""
    return weight.shape[-1 if name.endswith("conv1d.weight") else 1]


def _fill_normal(parameter: Tensor, std: float, generator: torch.Generator) -> None:
    parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
