"""Qwen3-MoE: routed experts by softmax, which dense layers may stand between."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

from ratoon.errors import invalid
from ratoon.model.config_fields import FLAG, MAX_LAYERS, SIZE, integer, list_of, number, or_null
from ratoon.model.families.family import Family, check_heads, softmax_attention, stack
from ratoon.model.route_rules import by_softmax
from ratoon.model.router import replace_routers
from ratoon.model.safetensors_files import part_experts
from ratoon.planner.layer_kinds import Layer, Mlp

# Bound on the routed experts of all layers together, each of which has its own tensors.
_MAX_EXPERTS = 2**16
RULES = {
    "num_experts": integer(2, 4096),
    "num_experts_per_tok": integer(1, 4096),
    "moe_intermediate_size": SIZE,
    "decoder_sparse_step": integer(1, 2**20),
    "mlp_only_layers": or_null(list_of(integer(0, MAX_LAYERS - 1), MAX_LAYERS)),
    "norm_topk_prob": FLAG,
    "router_aux_loss_coef": number(0, 1e6),
}


def check_experts(config: Mapping[str, Any], name: str = "num_experts") -> None:
    """Raises INVALID_ARGUMENT for more experts than there may be.

    `name`: the field that says how many a layer has.
    """
    num_experts, layers = config[name], config["num_hidden_layers"]
    if num_experts * layers > _MAX_EXPERTS:
        expected = f"at most {_MAX_EXPERTS} in all layers"
        raise invalid(f"config.{name}", f"{num_experts} in each of {layers}", expected)
    if config["num_experts_per_tok"] > num_experts:
        expected = f"at most {name}, {num_experts}"
        raise invalid("config.num_experts_per_tok", config["num_experts_per_tok"], expected)


def check_dense_layers(config: Mapping[str, Any]) -> None:
    """Raises INVALID_ARGUMENT for a dense layer that the model does not have."""
    for layer in config["mlp_only_layers"] or []:
        if layer >= config["num_hidden_layers"]:
            expected = f"below num_hidden_layers, {config['num_hidden_layers']}"
            raise invalid("config.mlp_only_layers", layer, expected)


def _check(config: Mapping[str, Any]) -> None:
    check_heads(config)
    check_experts(config)
    check_dense_layers(config)


def mlps(config: Any, shared_size: int = 0) -> list[Mlp]:
    """MLP of each layer."""
    dense = Mlp(size=config.intermediate_size)
    routed = Mlp(
        size=config.moe_intermediate_size,
        num_experts=config.num_experts,
        experts_per_token=config.num_experts_per_tok,
        shared_size=shared_size,
    )
    step, dense_layers = config.decoder_sparse_step, {*config.mlp_only_layers}
    return [
        dense if index in dense_layers or (index + 1) % step else routed
        for index in range(config.num_hidden_layers)
    ]


def _prepare(module: nn.Module) -> None:
    replace_routers(module, {Qwen3MoeTopKRouter: by_softmax})


def _layers(config: Any) -> tuple[Layer, ...]:
    mixer = softmax_attention(config, config.sliding_window)
    return stack([mixer] * config.num_hidden_layers, mlps(config))


QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    models="Qwen3-30B-A3B, Qwen3-235B-A22B",
    layers=_layers,
    rules=RULES,
    check=_check,
    prepare=_prepare,
    experts=Qwen3MoeExperts,
    exported=part_experts,
)
