"""Qwen3-Next, and Qwen3.5 with experts: gated DeltaNet and gated attention, and experts by softmax
beside a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeExperts,
    Qwen3_5MoeGatedDeltaNet,
    Qwen3_5MoeTopKRouter,
)
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextExperts,
    Qwen3NextGatedDeltaNet,
    Qwen3NextTopKRouter,
)

from ratoon.model.config_fields import SIZE, Rule
from ratoon.model.families import qwen3_5, qwen3_moe
from ratoon.model.families.family import ATTENTION_MAPS, Family, stack
from ratoon.model.linear_attention import (
    project_apart,
    project_by_head,
    replace_linear_attention,
)
from ratoon.model.route_rules import by_softmax
from ratoon.model.router import replace_routers
from ratoon.model.safetensors_files import part_experts
from ratoon.planner.layer_kinds import Layer, Mlp

_SHARED: Mapping[str, Rule] = {"shared_expert_intermediate_size": SIZE}
# Qwen3.5 has experts in every layer, whose weights always sum to 1.
_EVERYWHERE = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")


def _check(config: Mapping[str, Any]) -> None:
    qwen3_5.check_delta(config)
    qwen3_moe.check_experts(config)
    if "mlp_only_layers" in config:
        qwen3_moe.check_dense_layers(config)


def _next_layers(config: Any) -> tuple[Layer, ...]:
    mlps = qwen3_moe.mlps(config, config.shared_expert_intermediate_size)
    return stack(qwen3_5.delta_mixers(config), mlps)


def _moe_layers(config: Any) -> tuple[Layer, ...]:
    routed = Mlp(
        size=config.moe_intermediate_size,
        num_experts=config.num_experts,
        experts_per_token=config.num_experts_per_tok,
        shared_size=config.shared_expert_intermediate_size,
    )
    return stack(qwen3_5.delta_mixers(config), [routed] * config.num_hidden_layers)


def _prepare_next(module: nn.Module) -> None:
    replace_linear_attention(module, Qwen3NextGatedDeltaNet, project_by_head)
    replace_routers(module, {Qwen3NextTopKRouter: by_softmax})


def _prepare_moe(module: nn.Module) -> None:
    replace_linear_attention(module, Qwen3_5MoeGatedDeltaNet, project_apart)
    replace_routers(module, {Qwen3_5MoeTopKRouter: by_softmax})


QWEN3_NEXT = Family(
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    models="Qwen3-Next-80B-A3B",
    layers=_next_layers,
    rules={**qwen3_5.RULES, **qwen3_moe.RULES, **_SHARED},
    read_rope=qwen3_5.read_delta_rope,
    check=_check,
    prepare=_prepare_next,
    experts=Qwen3NextExperts,
    exported=part_experts,
    adapted=(*ATTENTION_MAPS, "in_proj_qkvz", "in_proj_ba", "out_proj"),
)
QWEN3_5_MOE = Family(
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    models="Qwen3.5-35B-A3B, Qwen3.5-397B-A17B, Qwen3.6-35B-A3B (text)",
    layers=_moe_layers,
    rules={
        **qwen3_5.RULES,
        **{name: qwen3_moe.RULES[name] for name in (*_EVERYWHERE, "router_aux_loss_coef")},
        **_SHARED,
    },
    read_rope=qwen3_5.read_delta_rope,
    check=_check,
    prepare=_prepare_moe,
    experts=Qwen3_5MoeExperts,
    adapts_experts=False,
    exported=part_experts,
    adapted=qwen3_5.DELTA_MAPS,
)
