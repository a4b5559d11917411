"""Decoders of a real model's shape, small, with random weights on the GPU.

Enter sizes, leaves a `PolicyModel` around a fresh module. Invariant: the same sizes give the same
weights, rounded to bfloat16, in any dtype.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from ratoon.model.attention import ATTENTION_NAME, register_tree_attention
from ratoon.model.policy_model import PolicyModel
from ratoon.model.spec import FullTuning, ModelDtype, ModelSpec, PresetBase

DEVICE = torch.device("cuda")
VOCAB_SIZE = 32768


def make_policy(
    *,
    is_compiled: bool,
    layers: int = 4,
    hidden: int = 512,
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "cuda",
    is_deterministic: bool = False,
) -> PolicyModel:
    """Heads of 128, two of them of keys and values."""
    register_tree_attention()
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[DEVICE]), DEVICE:
        torch.manual_seed(0)
        module = cast("Any", AutoModelForCausalLM).from_config(
            config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME
        )
    spec = ModelSpec(
        base=PresetBase(name="test"), tuning=FullTuning(), dtype=ModelDtype.BFLOAT16, seed=0
    )
    return PolicyModel(
        spec=spec, module=module.to(dtype), adapter=None, frozen=None, attention_backend=backend,
        deterministic=is_deterministic, compile_layers=is_compiled,
    )  # fmt: skip
