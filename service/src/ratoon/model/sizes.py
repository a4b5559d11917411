"""The sizes of a decoder that its bytes follow from, read off a transformers module."""

from __future__ import annotations

from typing import Any, cast

from transformers import PreTrainedConfig, PreTrainedModel

from ratoon.model.activation_plan import DecoderSizes


def decoder_sizes(module: PreTrainedModel) -> DecoderSizes:
    """Of a dense or routed decoder; call it once adapters are on and what is frozen is frozen."""
    config = cast("Any", module.config)
    weight = cast("Any", module.get_output_embeddings()).weight
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    experts_per_token = getattr(config, "num_experts_per_tok", None) or 1
    mlp_size = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    return DecoderSizes(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        mlp_size=mlp_size * experts_per_token,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        vocab_size=weight.shape[0],
        element_bytes=weight.element_size(),
        head_is_trained=weight.requires_grad,
    )


def wide_features(config: PreTrainedConfig) -> int:
    """Outputs of the widest products into the MLP; gate and up of routed experts are one."""
    any_config = cast("Any", config)
    moe_size = getattr(any_config, "moe_intermediate_size", None)
    return int(2 * moe_size if moe_size else any_config.intermediate_size)
