"""The other side of the model's tests: a stock Hugging Face model, one unpadded forward a sequence.

In: a model folder (and an adapter folder), sequences. Out: hidden states, log-probs, gradients.
Invariant: nothing of ours is imported here. A float64 model is float64 throughout: modules that ask
for float32 whatever the dtype (norms, rotary angles, router) get float64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.oracle.hf import double_names, in_double
from tests.oracle.merged_lora import has_experts, merge


def load_stock(
    folder: Path, *, dtype: torch.dtype, adapter: Path | None = None, attention: str = "sdpa"
) -> nn.Module:
    """The folder's model with torch's own attention, and with a trainable adapter if given; with
    transformers' attention where torch has none, for sinks."""
    auto: Any = AutoModelForCausalLM
    has_sinks = AutoConfig.from_pretrained(folder).model_type == "gpt_oss"
    model = auto.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation="eager" if has_sinks else attention,
        experts_implementation="eager",
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
    in_double(model)
    forward = model.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        with double_names():
            return forward(*args, **kwargs)

    cast(Any, model).forward = run
    return model
