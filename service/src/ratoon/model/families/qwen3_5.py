"""Qwen3.5: gated DeltaNet, and gated attention of large heads in every fourth layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import nn
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from ratoon.errors import invalid
from ratoon.model.config_fields import (
    FLAG,
    FULL,
    MAX_LAYERS,
    Rule,
    integer,
    list_of,
    or_null,
    partial_rotary,
    read_rope,
    word,
)
from ratoon.model.families.family import (
    ATTENTION_MAPS,
    Family,
    check_heads,
    softmax_attention,
    stack,
)
from ratoon.model.linear_attention import project_apart, replace_linear_attention
from ratoon.planner.layer_kinds import GatedDelta, Layer, Mixer, Mlp

_LINEAR = "linear_attention"
# Part of a head that is rotated where a folder does not say.
_ROTATED, _NUM_AXES = 0.25, 3
_HEADS, _HEAD_DIM = integer(1, 4096), integer(1, 1024)
_SECTIONS = list_of(integer(0, 4096), 3)
# Axes of positions that images have; a text token's three positions are one.
_AXES: Mapping[str, Rule] = {
    "mrope_section": Rule(
        expected="three integers in [0, 4096]",
        holds=lambda value: _SECTIONS.holds(value) and len(cast("list[int]", value)) == _NUM_AXES,
    ),
    "mrope_interleaved": FLAG,
}
RULES: Mapping[str, Rule] = {
    # The gate of the norm, and the convolution, are SiLU whatever this says.
    "hidden_act": word("silu", "swish"),
    "layer_types": or_null(list_of(word(_LINEAR, FULL), MAX_LAYERS)),
    "full_attention_interval": or_null(integer(1, MAX_LAYERS)),
    "linear_conv_kernel_dim": integer(2, 16),
    "linear_key_head_dim": _HEAD_DIM,
    "linear_value_head_dim": _HEAD_DIM,
    "linear_num_key_heads": _HEADS,
    "linear_num_value_heads": _HEADS,
    # Other readers of a folder ask for it; transformers always has the gate.
    "attn_output_gate": Rule(expected="true", holds=lambda value: value is True),
}


def check_delta(config: Mapping[str, Any]) -> None:
    """Raises INVALID_ARGUMENT for heads that do not divide, and for layers stated twice and
    differently."""
    check_heads(config)
    heads, key_heads = config["linear_num_value_heads"], config["linear_num_key_heads"]
    if heads % key_heads:
        expected = f"a divisor of linear_num_value_heads, {heads}"
        raise invalid("config.linear_num_key_heads", key_heads, expected)
    types, interval = config.get("layer_types"), config.get("full_attention_interval")
    if types is not None and interval is not None:
        expected = [_LINEAR if index % interval else FULL for index in range(1, 1 + len(types))]
        if types != expected:
            raise invalid(
                "config.full_attention_interval", interval, "what layer_types says, or none"
            )


def read_delta_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary embeddings of the layers with full attention. Raises UNSUPPORTED."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rules = {**partial_rotary(head_dim), **_AXES}
    rope = read_rope(config, config["max_position_embeddings"], rules=rules)
    return {"partial_rotary_factor": _ROTATED, **rope}


def delta_mixers(config: Any) -> list[Mixer]:
    """Mixer of each layer."""
    by_type: dict[str, Mixer] = {
        FULL: softmax_attention(config, is_gated=True),
        _LINEAR: GatedDelta(
            num_heads=config.linear_num_value_heads,
            num_key_heads=config.linear_num_key_heads,
            key_dim=config.linear_key_head_dim,
            value_dim=config.linear_value_head_dim,
            taps=config.linear_conv_kernel_dim,
        ),
    }
    return [by_type[kind] for kind in config.layer_types]


def _layers(config: Any) -> tuple[Layer, ...]:
    mlp = Mlp(size=config.intermediate_size)
    return stack(delta_mixers(config), [mlp] * config.num_hidden_layers)


def _prepare(module: nn.Module) -> None:
    replace_linear_attention(module, Qwen3_5GatedDeltaNet, project_apart)


DELTA_MAPS = (*ATTENTION_MAPS, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
QWEN3_5 = Family(
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    models="Qwen3.5, Qwen3.6 (dense, text)",
    layers=_layers,
    rules=RULES,
    read_rope=read_delta_rope,
    check=check_delta,
    prepare=_prepare,
    adapted=DELTA_MAPS,
)
