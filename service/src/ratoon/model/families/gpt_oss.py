"""gpt-oss: attention sinks, windows in every other layer, and experts with biases.

A released folder has its experts in MXFP4; they are read as bfloat16, and published so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter

from ratoon.model.config_fields import Rule, integer, number, or_null, read_rope
from ratoon.model.families.family import Family, check_heads, stack, windowed_by_layer
from ratoon.model.families.qwen3_moe import check_experts
from ratoon.model.route_rules import by_chosen
from ratoon.model.router import replace_routers
from ratoon.planner.layer_kinds import Layer, Mlp

_THETA = 150_000.0
# Rotary embeddings of a folder that has none of its own.
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_MXFP4 = Rule(
    expected="MXFP4, which is read as bfloat16",
    holds=lambda value: isinstance(value, dict) and value.get("quant_method") == "mxfp4",
)
_RULES: Mapping[str, Rule] = {
    "num_experts": integer(2, 4096),
    "num_experts_per_tok": integer(1, 4096),
    "swiglu_alpha": number(1e-3, 1e3),
    "swiglu_limit": number(1e-3, 1e6),
    "router_aux_loss_coef": number(0, 1e6),
    "quantization_config": or_null(_MXFP4),
}


def _read_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    given = config
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        given = {**config, "rope_parameters": _ROPE}
    return read_rope(given, config["max_position_embeddings"], theta=_THETA)


def _check(config: Mapping[str, Any]) -> None:
    check_heads(config)
    check_experts(config)


def _layers(config: Any) -> tuple[Layer, ...]:
    mlp = Mlp(
        size=config.intermediate_size,
        num_experts=config.num_local_experts,
        experts_per_token=config.num_experts_per_tok,
    )
    return stack(windowed_by_layer(config), [mlp] * config.num_hidden_layers)


def _prepare(module: nn.Module) -> None:
    replace_routers(module, {GptOssTopKRouter: by_chosen})


GPT_OSS = Family(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    models="gpt-oss-20b, gpt-oss-120b",
    layers=_layers,
    rules=_RULES,
    read_rope=_read_rope,
    check=_check,
    prepare=_prepare,
    experts=cast("type[nn.Module]", GptOssExperts),
    adapts_experts=False,
)
