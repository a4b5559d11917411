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
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Olmo3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

# It is the padding, too, as in many folders of the hub.
EOS_TOKEN = 7
# All have grouped queries; qwen3, mistral and gemma3 tie the embeddings. The first of two layers of
# olmo3 and gemma3 has a window, shorter than most prompts. And there is qwen3_moe_mixed.
ARCHITECTURES = (
    *("qwen3", "qwen3_untied", "qwen2", "llama", "mistral", "qwen3_moe", "olmo3", "gemma3"),
)
WINDOW = 3


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
        model = cast(Any, AutoModelForCausalLM).from_config(
            _config(architecture, vocab_size, num_heads)
        )
        with torch.no_grad():
            for parameter in model.parameters():
                is_matrix = parameter.ndim > 1
                noise = torch.randn_like(parameter) * (0.25 if is_matrix else 0.1)
                parameter.copy_(noise if is_matrix else 1 + noise)
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
