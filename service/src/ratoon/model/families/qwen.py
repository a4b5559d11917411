"""Qwen2 and Qwen3: dense decoders, some of whose layers may have a sliding window."""

from __future__ import annotations

from typing import Any

from ratoon.model.families.family import Family, stack, windowed_by_layer
from ratoon.planner.layer_kinds import Layer, Mlp


def _layers(config: Any) -> tuple[Layer, ...]:
    mlp = Mlp(size=config.intermediate_size)
    return stack(windowed_by_layer(config), [mlp] * config.num_hidden_layers)


QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    models="Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen",
    layers=_layers,
)
QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    models="Qwen3 0.6B to 32B",
    layers=_layers,
)
