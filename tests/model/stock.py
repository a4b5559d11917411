"""The other side of the model's tests: a stock Hugging Face model, one unpadded forward a sequence.

In: a model folder (and an adapter folder), sequences. Out: hidden states, log-probs, gradients.
Invariant: nothing of ours is imported here. A float64 model is float64 throughout: the modules that
compute in float32 whatever the dtype (norms, rotary angles, router) are replaced by their formulas.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.oracle.merged_lora import has_experts, merge


def load_stock(
    folder: Path, *, dtype: torch.dtype, adapter: Path | None = None, attention: str = "sdpa"
) -> nn.Module:
    """The folder's model with torch's own attention, and with a trainable adapter if given."""
    model = cast(Any, AutoModelForCausalLM).from_pretrained(
        folder, dtype=dtype, attn_implementation=attention, experts_implementation="eager"
    )
    # A sequence has no padding: all of its tokens have gradients.
    model.get_input_embeddings().padding_idx = None
    if adapter is not None and has_experts(adapter):
        model = merge(model, adapter)
    elif adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(
            model, str(adapter), is_trainable=True, autocast_adapter_dtype=False
        )
    return in_float64(model) if dtype is torch.float64 else model


def sequence_outputs(model: nn.Module, sequence: list[int]) -> tuple[Tensor, Tensor]:
    """Final hidden states [P, D] and the log-probs [P - 1] of all tokens but the first."""
    ids = torch.tensor([sequence])
    output = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    logprobs = torch.log_softmax(output.logits[0, :-1], dim=-1)
    return output.hidden_states[-1][0], logprobs.gather(1, ids[0, 1:, None])[:, 0]


def in_float64(model: nn.Module) -> nn.Module:
    """The model, which then computes in float64 throughout."""
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            cast(Any, module).forward = partial(_rms_norm, module)
        elif kind.endswith("RotaryEmbedding"):
            cast(Any, module).forward = partial(_rotary, module)
        elif kind.endswith("TopKRouter"):
            cast(Any, module).forward = partial(_router, module)
    return model


def _rms_norm(module: Any, x: Tensor) -> Tensor:
    mean_square = x.square().mean(-1, keepdim=True)
    if type(module).__name__.startswith("Gemma"):
        return (1 + module.weight) * x / torch.sqrt(mean_square + module.eps)
    return module.weight * x / torch.sqrt(mean_square + module.variance_epsilon)


def _rotary(
    module: Any, _x: Tensor, position_ids: Tensor, layer_type: str = ""
) -> tuple[Tensor, Tensor]:
    of_layer = f"{layer_type}_" if layer_type else ""
    frequencies, scaling = (
        getattr(module, f"{of_layer}{name}") for name in ("inv_freq", "attention_scaling")
    )
    angles = position_ids[..., None].double() * frequencies.double()
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos() * scaling, angles.sin() * scaling


def _router(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = x.reshape(-1, x.shape[-1]) @ module.weight.T
    scores, experts = torch.softmax(logits, dim=-1).topk(module.top_k, dim=-1)
    if module.norm_topk_prob:
        scores = scores / scores.sum(-1, keepdim=True)
    return logits, scores, experts
