"""Very small Hugging Face folders with random weights, for tests that compare with stock models.

In: an architecture's name and a seed. Out: a folder written by `save_pretrained`, float32.
Invariant: nothing of ours is imported here, and no weight is zero or one: norms and biases are
random too.
"""

from __future__ import annotations

import functools
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV3Config,
    Gemma3Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    LlamaConfig,
    Mistral3Config,
    MistralConfig,
    Olmo3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

# It is the padding, too, as in many folders of the hub.
EOS_TOKEN = 7
# Key heads of another size than values, and fewer; two heads of keys for four of values.
_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_SHARED: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 12,
}
# Routers by sigmoids with a correction bias, beside shared experts; gpt_oss has biases and sinks.
ROUTED = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "gpt_oss")
# Routers by softmax, beside a shared expert but in the first.
WITH_EXPERTS = ("qwen3_moe", "qwen3_5_moe", "qwen3_next")
# All but those with latent attention have grouped queries; qwen3, mistral and gemma3 tie the
# embeddings. The first of the two layers of olmo3, gemma3 and gpt_oss has a window, shorter than
# most prompts. And there is qwen3_moe_mixed.
ARCHITECTURES = (
    *("qwen3", "qwen3_untied", "qwen2", "llama", "mistral", "qwen3_moe", "olmo3", "gemma3"),
    *(*ROUTED, "qwen3_5", *WITH_EXPERTS[1:]),
)
WINDOW = 3

# Models with a tower, of which only the decoder is trained.
WRAPPED = ("mistral3", "gemma3_vl", "qwen3_5_vl", "qwen3_5_moe_vl")
IMAGE_TOKEN, VIDEO_TOKEN = 11, 12
_TOWER: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}


def write_folder(
    folder: Path, architecture: str, *, vocab_size: int = 64, num_heads: int = 4, seed: int = 0
) -> Path:
    """A model of two layers and hidden size 16 at `folder`; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _files_of(architecture, vocab_size, num_heads, seed).items():
        (folder / name).write_bytes(content)
    return folder


@functools.cache
def _files_of(architecture: str, vocab_size: int, num_heads: int, seed: int) -> dict[str, bytes]:
    """Made once a process: most tests want a folder of their own with the same model."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        kind = AutoModelForImageTextToText if architecture in WRAPPED else AutoModelForCausalLM
        model = cast(Any, kind).from_config(_config(architecture, vocab_size, num_heads))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                is_matrix = parameter.ndim > 1
                noise = torch.randn_like(parameter) * (0.25 if is_matrix else 0.1)
                parameter.copy_(noise if is_matrix else 1 + noise)
                if name.endswith(".A_log"):
                    # With more, no state would last for a fork.
                    parameter.sub_(3)
            for name, buffer in model.named_buffers():
                if name.endswith("correction_bias"):
                    buffer.copy_(0.2 * torch.randn_like(buffer))
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def _config(architecture: str, vocab_size: int, num_heads: int) -> PretrainedConfig:
    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads // 2,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": False,
        "pad_token_id": EOS_TOKEN,
        "bos_token_id": None,
        "eos_token_id": EOS_TOKEN,
    }
    if architecture == "qwen3":
        return Qwen3Config(**{**common, "head_dim": 8, "tie_word_embeddings": True})
    if architecture == "qwen3_untied":
        return Qwen3Config(**{**common, "head_dim": 8})
    if architecture == "qwen2":
        return Qwen2Config(**common)
    if architecture == "llama":
        return LlamaConfig(**{**common, "num_key_value_heads": 1})
    if architecture == "mistral":
        return MistralConfig(**{**common, "sliding_window": None, "tie_word_embeddings": True})
    if architecture in WRAPPED:
        return _wrapped(architecture, vocab_size, num_heads)
    if architecture in ROUTED:
        return _routed(architecture, common)
    windowed = {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    if architecture == "olmo3":
        return Olmo3Config(**{**common, **windowed})
    if architecture == "gemma3":
        # The root of the hidden size, by which embeddings are scaled, has no end.
        own = {"hidden_size": 20, "head_dim": 8, "query_pre_attn_scalar": 6}
        return Gemma3TextConfig(**{**common, **windowed, **own, "tie_word_embeddings": True})
    if architecture == "qwen3_5":
        return Qwen3_5TextConfig(**common | _DELTA)
    if architecture == "qwen3_5_moe":
        return Qwen3_5MoeTextConfig(**common | _DELTA | _SHARED)
    if architecture == "qwen3_next":
        # The other way round, and its layer of full attention has a dense MLP.
        types = {"layer_types": ["full_attention", "linear_attention"], "mlp_only_layers": [0]}
        return Qwen3NextConfig(**common | _DELTA | _SHARED | types)
    assert architecture in ("qwen3_moe", "qwen3_moe_mixed")
    experts: dict[str, Any] = {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    }
    # The first of the two layers is dense, and wider than the experts of a token.
    mixed = {"mlp_only_layers": [0], "intermediate_size": 48}
    return Qwen3MoeConfig(**common | experts | (mixed if architecture.endswith("mixed") else {}))


def _wrapped(architecture: str, vocab_size: int, num_heads: int) -> PretrainedConfig:
    """The decoder of another architecture and a tower of one layer."""
    own = "mistral" if architecture == "mistral3" else architecture.removesuffix("_vl")
    text = _config(own, vocab_size, num_heads)
    if architecture == "mistral3":
        text.tie_word_embeddings = False
        tower = _TOWER | {"model_type": "pixtral", "head_dim": 4}
        return Mistral3Config(
            text_config=text,
            vision_config=tower,
            image_token_index=IMAGE_TOKEN,
            tie_word_embeddings=False,
        )
    if architecture == "gemma3_vl":
        tower = _TOWER | {"model_type": "siglip_vision_model"}
        return Gemma3Config(
            text_config=text,
            vision_config=tower,
            mm_tokens_per_image=4,
            image_token_index=IMAGE_TOKEN,
            boi_token_index=IMAGE_TOKEN,
            eoi_token_index=IMAGE_TOKEN,
        )
    tower = {
        "depth": 1,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_heads": 2,
        "out_hidden_size": 16,
        "patch_size": 4,
        "num_position_embeddings": 16,
    }
    kind = Qwen3_5Config if architecture == "qwen3_5_vl" else Qwen3_5MoeConfig
    return kind(
        text_config=text,
        vision_config=tower,
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        vision_start_token_id=13,
        vision_end_token_id=14,
        tie_word_embeddings=False,
    )


def _routed(architecture: str, common: dict[str, Any]) -> PretrainedConfig:
    """The first layer is dense, but not of gpt_oss."""
    if architecture == "gpt_oss":
        own = {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            # Gates and rows of these weights are clamped, too.
            "swiglu_limit": 0.5,
        }
        return GptOssConfig(**common | own)
    experts: dict[str, Any] = {
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "routed_scaling_factor": 1.5,
        "num_nextn_predict_layers": 0,
    }
    if architecture == "glm4_moe":
        return Glm4MoeConfig(**common | experts | {"head_dim": 8, "use_qk_norm": True})
    latent: dict[str, Any] = {
        "num_key_value_heads": common["num_attention_heads"],
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    }
    if architecture == "glm4_moe_lite":
        return Glm4MoeLiteConfig(**common | experts | latent)
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 8192,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    }
    # As Moonlight, whose queries have no latent.
    own: dict[str, Any] = {
        "n_group": 3,
        "topk_group": 2,
        "q_lora_rank": None,
        "rope_parameters": yarn,
        "first_k_dense_replace": 1,
    }
    return DeepseekV3Config(**common | experts | latent | own)
