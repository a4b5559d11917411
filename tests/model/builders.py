"""Short ways to a policy model, for the model's tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ratoon.errors import RatoonError
from ratoon.model.loader import read_model
from ratoon.model.policy_model import PolicyModel
from ratoon.model.spec import FolderBase, ModelDtype, ModelSpec, PresetBase
from ratoon.planner.activation_plan import Kept, peak_bytes
from ratoon_proto.types import FullTuning, LoraTuning
from tests.model.packing import Packed

FULL = FullTuning()
LORA = LoraTuning(rank=3, alpha=6.0)
LORA_ATTENTION = dataclasses.replace(LORA, target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))
LORA_HEADS = dataclasses.replace(LORA, target_modules=("v_proj", "embed_tokens", "lm_head"))
LORA_EXPERTS = dataclasses.replace(LORA, target_modules=("gate_proj", "up_proj", "down_proj"))
TINY = PresetBase(name="tiny")


def load(
    base: Path | PresetBase,
    *,
    tuning: FullTuning | LoraTuning = FULL,
    dtype: ModelDtype = ModelDtype.FLOAT64,
    seed: int = 1,
    attention_backend: str = "",
    keep_reference: bool = False,
    publishes_merged: bool = False,
    compile_layers: bool = False,
    deterministic: bool = True,
    device: str = "cpu",
    value_head: bool = False,
) -> PolicyModel:
    spec = ModelSpec(
        base=FolderBase(folder=str(base)) if isinstance(base, Path) else base,
        tuning=tuning,
        dtype=dtype,
        seed=seed,
        value_head=value_head,
    )
    host = read_model(spec, keep_reference=keep_reference, publishes_merged=publishes_merged)
    return host.place(
        torch.device(device),
        attention_backend=attention_backend,
        deterministic=deterministic,
        compile_layers=compile_layers,
    )


def hidden_of(model: PolicyModel, packed: Packed) -> Tensor:
    return model.forward_hidden(packed.tokens_T, packed.position_T, packed.layout)


def logits_of(model: PolicyModel, packed: Packed) -> Tensor:
    """Logits [T, V], with what an adapter of the LM head adds."""
    hidden_TD, head = hidden_of(model, packed), model.lm_head
    logits_TV, term = hidden_TD @ head.weight_VD.T, head.term(hidden_TD)
    return logits_TV if term is None else logits_TV + term.u_RA @ term.b_VA.T


def least_bytes(model: PolicyModel, packed: Packed) -> int:
    """The budget in which every layer keeps the least."""
    tokens = len(packed.tokens_T)
    kept = (Kept.ATTENTION,) * model.sizes.num_layers
    return peak_bytes(model.sizes, kept, tokens, tokens)


def randomize(model: PolicyModel, seed: int, scale: float = 0.3) -> None:
    """Give every trained parameter new values, zero for none."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.named_trainable().values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def error_of(call: Callable[[], object]) -> RatoonError:
    with pytest.raises(RatoonError) as caught:
        call()
    return caught.value
