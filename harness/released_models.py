"""Configurations of released models, with the sizes that their folders state.

In: a model's name. Out: its configuration of transformers, a new one each time, of as many layers
as asked for. Invariant: what is not stated here is the configuration class's own default, which is
that of the release.
"""

from __future__ import annotations

from collections.abc import Callable

from transformers import (
    Gemma3TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    PreTrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)


def _qwen3_5(hidden: int, layers: int, heads: int, mlp: int, *, ties: bool) -> PreTrainedConfig:
    return Qwen3_5TextConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=4, head_dim=256, intermediate_size=mlp, vocab_size=248_320,
        linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
        linear_value_head_dim=128, linear_conv_kernel_dim=4, max_position_embeddings=262_144,
        rope_parameters={
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25
        },
        tie_word_embeddings=ties,
    )  # fmt: skip


def _qwen3_5_moe(layers: int) -> PreTrainedConfig:
    return Qwen3_5MoeTextConfig(
        hidden_size=2048, num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=2,
        head_dim=256, moe_intermediate_size=512, shared_expert_intermediate_size=512,
        num_experts=256, num_experts_per_tok=8, vocab_size=248_320, linear_num_key_heads=16,
        linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
        linear_conv_kernel_dim=4, max_position_embeddings=262_144,
        rope_parameters={
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25
        },
        tie_word_embeddings=False,
    )  # fmt: skip


def _gpt_oss(layers: int) -> PreTrainedConfig:
    return GptOssConfig(
        hidden_size=2880, num_hidden_layers=layers, num_attention_heads=64, num_key_value_heads=8,
        head_dim=64, intermediate_size=2880, num_local_experts=32, num_experts_per_tok=4,
        sliding_window=128, vocab_size=201_088, tie_word_embeddings=False,
    )  # fmt: skip


def _gemma3(layers: int) -> PreTrainedConfig:
    return Gemma3TextConfig(
        hidden_size=3840, num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=8,
        head_dim=256, intermediate_size=15_360, sliding_window=1024, vocab_size=262_208,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        },
        tie_word_embeddings=True,
    )  # fmt: skip


def _glm4_moe(layers: int) -> PreTrainedConfig:
    return Glm4MoeConfig(
        hidden_size=4096, num_hidden_layers=layers, num_attention_heads=96, num_key_value_heads=8,
        head_dim=128,  # pyright: ignore[reportCallIssue] - taken, and not in its signature
        intermediate_size=10_944, moe_intermediate_size=1408, n_routed_experts=128,
        num_experts_per_tok=8, n_shared_experts=1, first_k_dense_replace=1, n_group=1,
        topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.0, attention_bias=True,
        use_qk_norm=False, vocab_size=151_552, tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5
        },
    )  # fmt: skip


# Layers of the release, and the configuration with any number of them.
RELEASED: dict[str, tuple[int, Callable[[int], PreTrainedConfig]]] = {
    "Qwen3.5-4B": (32, lambda layers: _qwen3_5(2560, layers, 16, 9216, ties=True)),
    "Qwen3.5-9B": (32, lambda layers: _qwen3_5(4096, layers, 16, 12_288, ties=False)),
    "Qwen3.5-35B-A3B": (40, _qwen3_5_moe),
    "gpt-oss-20b": (24, _gpt_oss),
    "Gemma-3-12B": (48, _gemma3),
    "GLM-4.5-Air": (46, _glm4_moe),
}


def released(name: str, num_layers: int | None = None) -> PreTrainedConfig:
    """The configuration of a released model; `num_layers`: another number than it has."""
    layers, configured = RELEASED[name]
    return configured(num_layers or layers)
