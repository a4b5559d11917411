"""Reads the sizes that decide a decoder's bytes from a transformers module."""

from __future__ import annotations

from typing import Any, cast

from transformers import PreTrainedModel

from ratoon.model.activation_plan import DecoderSizes


def decoder_sizes(module: PreTrainedModel) -> DecoderSizes:
    """Sizes of a dense or routed decoder; call it after adapters are attached and weights are
    frozen."""
    config = cast("Any", module.config)
    weight = cast("Any", module.get_output_embeddings()).weight
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_experts = getattr(config, "num_experts", None) or 1
    experts_per_token = config.num_experts_per_tok if num_experts > 1 else 1
    mlp_size = config.intermediate_size
    if num_experts > 1:
        # Some layers may be dense.
        routed_size = experts_per_token * config.moe_intermediate_size
        has_dense = config.decoder_sparse_step > 1 or config.mlp_only_layers
        mlp_size = max(routed_size, mlp_size) if has_dense else routed_size
    layer = cast("Any", module).get_decoder().layers[0]
    factors = [p for name, p in layer.named_parameters() if ".lora_A." in name]
    adapter_size = sum(p.shape[0] for p in factors if p.ndim == 2)
    adapter_rows = sum(p.shape[1] for p in factors if p.ndim == 3)
    return DecoderSizes(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        mlp_size=mlp_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        vocab_size=weight.shape[0],
        element_bytes=weight.element_size(),
        head_is_trained=weight.requires_grad,
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        adapter_size=adapter_size,
        expert_adapter_size=experts_per_token * adapter_rows,
    )
