"""Llama and Mistral: dense decoders; all layers of Mistral may have one sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratoon.errors import invalid
from ratoon.model.families.family import Family, alike, check_heads, softmax_attention
from ratoon.planner.layer_kinds import Layer


def _check_llama(config: Mapping[str, Any]) -> None:
    check_heads(config)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if hidden % heads:  # transformers divides even where head_dim is given.
        raise invalid("config.num_attention_heads", heads, f"a divisor of hidden_size, {hidden}")


def _mistral_layers(config: Any) -> tuple[Layer, ...]:
    return alike(config, softmax_attention(config, config.sliding_window))


LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    models="Llama 2, 3, 3.1, 3.2 (text)",
    layers=lambda config: alike(config, softmax_attention(config)),
    check=_check_llama,
)
MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    models="Mistral 7B, Ministral 8B, Mistral Small (text)",
    layers=_mistral_layers,
)
