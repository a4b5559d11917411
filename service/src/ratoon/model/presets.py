"""The built-in models: Qwen3-style decoders over bytes, with random weights that a seed decides."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.attention import ATTENTION_NAME
from ratoon.model.seeding import tensor_generator
from ratoon.model.spec import PRESET_NAMES
from ratoon.model.tokenizer import BOS_TOKEN, EOS_TOKEN, PAD_TOKEN, VOCAB_SIZE

_EMBEDDING_STD = 0.02


def preset_config(name: str) -> Qwen3Config:
    """The shape of a preset: `tiny` learns in seconds on a CPU, `small` is for benchmarks there."""
    if name == "tiny":
        return _config(hidden=128, intermediate=512, layers=4, heads=4, kv_heads=2, head_dim=32)
    if name == "small":
        return _config(hidden=384, intermediate=1024, layers=8, heads=6, kv_heads=2, head_dim=64)
    raise RatoonError(
        ErrorCode.INVALID_ARGUMENT,
        f"preset: got {name!r}, expected one of {', '.join(PRESET_NAMES)}",
        field="preset",
        got=repr(name),
        expected=", ".join(PRESET_NAMES),
    )


def build_preset(name: str, seed: int) -> PreTrainedModel:
    """A preset's module with the weights of `seed`, float32, on the CPU."""
    with torch.random.fork_rng(devices=[]):
        module = cast("Any", AutoModelForCausalLM).from_config(
            preset_config(name), attn_implementation=ATTENTION_NAME
        )
    _initialize(module, seed)
    return module


def _config(
    *, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int
) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=32_768,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        attention_dropout=0.0,
        pad_token_id=PAD_TOKEN,
        bos_token_id=BOS_TOKEN,
        eos_token_id=EOS_TOKEN,
    )


@torch.no_grad()
def _initialize(module: PreTrainedModel, seed: int) -> None:
    """Linear maps keep the variance of their input; those that write to the residual stream, two a
    layer, are scaled down by 1 / sqrt(2 layers) (Radford et al., 2019)."""
    residual_scale = 1 / math.sqrt(2 * module.config.num_hidden_layers)
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1:
            nn.init.ones_(parameter)
            continue
        if name.endswith("embed_tokens.weight"):
            std = _EMBEDDING_STD
        else:
            std = 1 / math.sqrt(parameter.shape[1])
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std *= residual_scale
        _fill_normal(parameter, std, tensor_generator(seed, name))


def _fill_normal(parameter: Tensor, std: float, generator: torch.Generator) -> None:
    parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
