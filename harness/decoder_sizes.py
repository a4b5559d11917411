"""Sizes of decoders, from numbers as results and tests state them."""

from __future__ import annotations

from typing import Any

from ratoon.planner.activation_plan import DecoderSizes
from ratoon.planner.layer_kinds import Attention, Layer, Mlp


def uniform_sizes(
    *,
    num_layers: int,
    mlp_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_experts: int = 1,
    experts_per_token: int = 1,
    adapter_size: int = 0,
    expert_adapter_size: int = 0,
    **others: Any,
) -> DecoderSizes:
    """Sizes of a decoder whose layers are alike; `others` are fields of `DecoderSizes`.

    `mlp_size`: features that a token passes, over all its experts together.
    """
    mixer = Attention(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    mlp = Mlp(
        size=mlp_size // experts_per_token,
        num_experts=num_experts,
        experts_per_token=experts_per_token,
    )
    layer = Layer(
        mixer=mixer, mlp=mlp, adapter_size=adapter_size, expert_adapter_size=expert_adapter_size
    )
    return DecoderSizes(layers=(layer,) * num_layers, **others)
