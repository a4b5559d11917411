"""Llama and Mistral: dense decoders; all layers of Mistral may have one sliding window."""

from __future__ import annotations

from typing import Any

from ratoon.model.families.family import Family, alike, check_divided_heads, softmax_attention
from ratoon.planner.layer_kinds import Layer


def _mistral_layers(config: Any) -> tuple[Layer, ...]:
    return alike(config, softmax_attention(config, config.sliding_window))


LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    models="Llama 2, 3, 3.1, 3.2 (text)",
    layers=lambda config: alike(config, softmax_attention(config)),
    check=check_divided_heads,
)
MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    models="Mistral 7B, Ministral 8B, Mistral Small (text)",
    layers=_mistral_layers,
)
