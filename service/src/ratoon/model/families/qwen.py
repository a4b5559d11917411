"""Qwen2 and Qwen3: dense decoders, some of whose layers may have a sliding window."""

from __future__ import annotations

from ratoon.model.families.family import Family, dense_by_layer

QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    models="Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen",
    layers=dense_by_layer,
)
QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    models="Qwen3 0.6B to 32B",
    layers=dense_by_layer,
)
