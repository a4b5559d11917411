"""Decoders of a real model's shape, small, with random weights on the GPU; and steps of them.

Enter sizes, leaves a `PolicyModel` around a fresh module, or enters a forest, leaves gradients.
Invariant: the same sizes give the same weights, rounded to bfloat16, in any dtype.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from ratoon.model.attention import ATTENTION_NAME, register_tree_attention
from ratoon.model.lora import add_adapter
from ratoon.model.policy_model import PolicyModel, trained_parameters
from ratoon.model.spec import ModelDtype, ModelSpec, PresetBase
from ratoon_kernels import token_logprobs
from ratoon_proto.types import FullTuning, LoraTuning
from tests.kernels.forests import Forest

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
    tuning: LoraTuning | None = None,
) -> PolicyModel:
    """Heads of 128, two of them of keys and values; an adapter has values for B, too."""
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
        base=PresetBase(name="test"),
        tuning=tuning or FullTuning(),
        dtype=ModelDtype.BFLOAT16,
        seed=0,
    )
    adapter = None
    if tuning is not None:
        adapter = add_adapter(module, tuning, 0, "test")
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in trained_parameters(module, adapter).values():
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return PolicyModel(
        spec=spec, module=module.to(dtype), adapter=adapter, frozen=None, attention_backend=backend,
        deterministic=is_deterministic, compile_layers=is_compiled,
    )  # fmt: skip


class Step:
    """A forward and backward over a forest, each token but the last of it predicting."""

    def __init__(self, forest: Forest) -> None:
        count = forest.num_tokens
        generator = torch.Generator(DEVICE).manual_seed(1)
        self.tokens_T = torch.randint(0, VOCAB_SIZE, (count,), generator=generator, device=DEVICE)
        self.position_T = torch.arange(count, device=DEVICE) % 4096
        self.layout = forest.layout("cuda")
        self.rows_R = torch.arange(count - 1, device=DEVICE)
        self.weight_R = torch.randn(count - 1, generator=generator, device=DEVICE)
        self.temperature_R = torch.ones(count - 1, device=DEVICE)

    def run(self, policy: PolicyModel) -> None:
        """Leaves gradients in the parameters."""
        hidden_TD = policy.forward_hidden(self.tokens_T, self.position_T, self.layout)
        logprob_R, _ = token_logprobs(
            hidden_TD[:-1], policy.lm_head_VD, self.tokens_T[1:], self.rows_R, self.temperature_R
        )
        logprob_R.backward(self.weight_R)

    def gradients(self, policy: PolicyModel) -> dict[str, Tensor]:
        """Gradients of one run; they are removed from the parameters."""
        policy.module.zero_grad(set_to_none=True)
        self.run(policy)
        found = {name: cast("Tensor", p.grad) for name, p in policy.named_trainable().items()}
        policy.module.zero_grad(set_to_none=True)
        return found
