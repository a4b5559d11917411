"""GLM-4.5 and later: experts by sigmoid beside a shared one, behind full attention in most models,
and behind multi-head latent attention in GLM-4.7-Flash."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeExperts, Glm4MoeTopkRouter
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import (
    Glm4MoeLiteExperts,
    Glm4MoeLiteTopkRouter,
)

from ratoon.errors import invalid
from ratoon.model.config_fields import FLAG, MAX_LAYERS, list_of, or_null, word
from ratoon.model.families.deepseek_v3 import (
    DENSE_FIRST,
    LATENT_MAPS,
    LATENT_RULES,
    ROUTED_RULES,
    check_dense_first,
    check_latent,
    check_routed,
    dense_first,
    latent_attention,
    routed_mlp,
)
from ratoon.model.families.family import (
    Family,
    check_heads,
    read_partial_rope,
    softmax_attention,
    stack,
)
from ratoon.model.route_rules import by_sigmoid
from ratoon.model.router import replace_routers
from ratoon.model.safetensors_files import part_experts
from ratoon.planner.layer_kinds import Layer, Mlp

# Part of a head that is rotated where a folder does not say.
_ROTATED = 0.5
_DENSE, _SPARSE = "dense", "sparse"


def _check(config: Mapping[str, Any]) -> None:
    check_heads(config)
    check_routed(config)
    check_dense_first(config)


def _read_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"partial_rotary_factor": _ROTATED, **read_partial_rope(config)}


def _check_lite(config: Mapping[str, Any]) -> None:
    check_latent(config)
    check_routed(config)
    types, layers = config["mlp_layer_types"], config["num_hidden_layers"]
    if types is None:
        types = [_DENSE] + [_SPARSE] * (layers - 1)
    if len(types) != layers:
        expected = f"one for each of {layers} layers"
        raise invalid("config.mlp_layer_types", f"{len(types)} of them", expected)
    if _SPARSE not in types:
        raise invalid("config.mlp_layer_types", "dense alone", f"a layer of {_SPARSE} ones")


def _lite_layers(config: Any) -> tuple[Layer, ...]:
    by_type = {_DENSE: Mlp(size=config.intermediate_size), _SPARSE: routed_mlp(config)}
    mlps = [by_type[kind] for kind in config.mlp_layer_types]
    return stack([latent_attention(config)] * len(mlps), mlps)


def _prepare(module: nn.Module) -> None:
    replace_routers(module, {Glm4MoeTopkRouter: by_sigmoid, Glm4MoeLiteTopkRouter: by_sigmoid})


GLM4_MOE = Family(
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    models="GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7",
    layers=lambda config: dense_first(config, softmax_attention(config)),
    rules={**ROUTED_RULES, **DENSE_FIRST, "use_qk_norm": FLAG},
    read_rope=_read_rope,
    check=_check,
    prepare=_prepare,
    experts=Glm4MoeExperts,
    exported=part_experts,
)
GLM4_MOE_LITE = Family(
    architecture="Glm4MoeLiteForCausalLM",
    model_type="glm4_moe_lite",
    models="GLM-4.7-Flash",
    layers=_lite_layers,
    rules={
        **ROUTED_RULES,
        **LATENT_RULES,
        "mlp_layer_types": or_null(list_of(word(_DENSE, _SPARSE), MAX_LAYERS)),
    },
    check=_check_lite,
    prepare=_prepare,
    experts=Glm4MoeLiteExperts,
    exported=part_experts,
    adapted=LATENT_MAPS,
)
