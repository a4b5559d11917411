"""DeepSeek-V3 and Moonlight: multi-head latent attention, and routed experts beside shared ones.

The correction bias by which a router chooses is moved by pre-training's own balancing. It is read,
and passes into each version as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Experts,
    DeepseekV3TopkRouter,
)

from ratoon.errors import invalid
from ratoon.model.config_fields import (
    FLAG,
    MAX_LAYERS,
    SIZE,
    Rule,
    integer,
    number,
    or_null,
    word,
)
from ratoon.model.families.family import Family, stack
from ratoon.model.families.qwen3_moe import check_experts
from ratoon.model.route_rules import by_sigmoid
from ratoon.model.router import replace_routers
from ratoon.model.safetensors_files import part_experts
from ratoon.planner.layer_kinds import Attention, Latent, Layer, Mlp

_EXPERTS = "n_routed_experts"
ROUTED_RULES: Mapping[str, Rule] = {
    _EXPERTS: integer(2, 4096),
    "n_shared_experts": integer(1, 64),
    "num_experts_per_tok": integer(1, 4096),
    "moe_intermediate_size": SIZE,
    "norm_topk_prob": FLAG,
    "routed_scaling_factor": number(2.0**-20, 2.0**20),
    "n_group": integer(1, 4096),
    "topk_group": integer(1, 4096),
    # Layers that predict further tokens: not trained.
    "num_nextn_predict_layers": integer(0, MAX_LAYERS),
    "num_mtp_layers": integer(0, MAX_LAYERS),
    # Folders say these for other readers; transformers has no other.
    "scoring_func": word("sigmoid"),
    "topk_method": word("noaux_tc"),
    "moe_layer_freq": integer(1, 1),
}
DENSE_FIRST: Mapping[str, Rule] = {"first_k_dense_replace": integer(0, MAX_LAYERS - 1)}
_DIM = integer(1, 4096)
LATENT_RULES: Mapping[str, Rule] = {
    "q_lora_rank": or_null(SIZE),
    "kv_lora_rank": SIZE,
    "qk_nope_head_dim": _DIM,
    "qk_rope_head_dim": Rule(
        expected="an even number in [2, 4096]: pairs are rotated",
        holds=lambda value: integer(2, 4096).holds(value) and not int(str(value)) % 2,
    ),
    "v_head_dim": _DIM,
    "rope_interleave": FLAG,
}
# Linear maps of latent attention: queries directly or by a latent, keys and values by one.
LATENT_MAPS = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


def check_routed(config: Mapping[str, Any]) -> None:
    """Raises INVALID_ARGUMENT for groups that do not divide experts, or leave too few."""
    check_experts(config, _EXPERTS)
    experts, groups = config[_EXPERTS], config["n_group"]
    if experts % groups or (experts == groups and groups > 1):
        expected = f"a divisor of the {experts} experts that leaves two or more in a group"
        raise invalid("config.n_group", groups, expected)
    if config["topk_group"] > groups:
        raise invalid("config.topk_group", config["topk_group"], f"at most n_group, {groups}")
    most, chosen = config["topk_group"] * (experts // groups), config["num_experts_per_tok"]
    if chosen > most:
        expected = f"at most {most}, the experts of topk_group groups"
        raise invalid("config.num_experts_per_tok", chosen, expected)


def check_dense_first(config: Mapping[str, Any]) -> None:
    """Raises INVALID_ARGUMENT where all layers are dense."""
    dense, layers = config["first_k_dense_replace"], config["num_hidden_layers"]
    if dense >= layers:
        expected = f"below num_hidden_layers, {layers}"
        raise invalid("config.first_k_dense_replace", dense, expected)


def check_latent(config: Mapping[str, Any]) -> None:
    """Raises INVALID_ARGUMENT for fields that latent attention does not have."""
    heads, rotary = config["num_attention_heads"], config["qk_rope_head_dim"]
    if config["num_key_value_heads"] not in (None, heads):
        expected = f"num_attention_heads, {heads}: a latent is expanded to a key of each head"
        raise invalid("config.num_key_value_heads", config["num_key_value_heads"], expected)
    if config.get("head_dim") not in (None, rotary):
        expected = f"qk_rope_head_dim, {rotary}: what is rotated of a head"
        raise invalid("config.head_dim", config["head_dim"], expected)


def _check(config: Mapping[str, Any]) -> None:
    check_latent(config)
    check_routed(config)
    check_dense_first(config)


def latent_attention(config: Any) -> Attention:
    """Attention whose keys and values are expanded from a latent."""
    heads, rotary = config.num_attention_heads, config.qk_rope_head_dim
    return Attention(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=config.qk_nope_head_dim + rotary,
        value_dim=config.v_head_dim,
        latent=Latent(query_rank=config.q_lora_rank, rank=config.kv_lora_rank, rotary_dim=rotary),
    )


def routed_mlp(config: Any) -> Mlp:
    """Routed experts beside shared ones, which are one MLP."""
    return Mlp(
        size=config.moe_intermediate_size,
        num_experts=config.n_routed_experts,
        experts_per_token=config.num_experts_per_tok,
        shared_size=config.moe_intermediate_size * config.n_shared_experts,
    )


def dense_first(config: Any, mixer: Attention) -> tuple[Layer, ...]:
    """Layers with this mixer: the first ones dense, and the others with experts."""
    layers, dense = config.num_hidden_layers, config.first_k_dense_replace
    mlps = [Mlp(size=config.intermediate_size)] * dense + [routed_mlp(config)] * (layers - dense)
    return stack([mixer] * layers, mlps)


def _prepare(module: nn.Module) -> None:
    replace_routers(module, {DeepseekV3TopkRouter: by_sigmoid})


DEEPSEEK_V3 = Family(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    models="Moonlight-16B-A3B, DeepSeek-V3, DeepSeek-R1 (in bfloat16)",
    layers=lambda config: dense_first(config, latent_attention(config)),
    rules={**ROUTED_RULES, **DENSE_FIRST, **LATENT_RULES},
    check=_check,
    prepare=_prepare,
    experts=DeepseekV3Experts,
    exported=part_experts,
    adapted=LATENT_MAPS,
)
