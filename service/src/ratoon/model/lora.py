"""Low-rank adapters (Hu et al., 2021, arXiv:2106.09685) on the linear maps of a decoder, by peft.

All that needs peft is here: other modules import this one late, for workers without adapters.

A is random from (seed, name), B is zero, so that at first the adapter changes nothing. Adapters
have the dtype of the base; the optimizer keeps its masters in float32.
"""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import Tensor, nn
from transformers import PreTrainedModel

from ratoon.errors import invalid, shown
from ratoon.model.seeding import tensor_generator
from ratoon.model.spec import LoraTuning
from ratoon.model.support import unsupported

CONFIG_NAME = "adapter_config.json"
# Of its configuration: what decides how its tensors enter the model.
_MEANING = ("r", "rank_pattern", "lora_alpha", "alpha_pattern", "use_rslora", "use_dora")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


def add_adapter(module: PreTrainedModel, tuning: LoraTuning, seed: int, name: str) -> PeftModel:
    """Put a fresh adapter on `module`, in place; `name` is what the adapter says that its base is.

    Raises INVALID_ARGUMENT for a rank or alpha out of range, UNSUPPORTED for a target module that
    is not a linear map of attention or MLP (the LM head, embeddings, fused experts), and for none
    named where the model has experts.
    """
    if tuning.rank < 1:
        raise invalid("tuning.lora.rank", tuning.rank, "at least 1")
    if not (math.isfinite(tuning.alpha) and tuning.alpha > 0):
        raise invalid("tuning.lora.alpha", tuning.alpha, "a finite number above 0")
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=tuning.rank,
        lora_alpha=cast("int", tuning.alpha),
        lora_dropout=0.0,
        bias="none",
        target_modules=resolve_targets(module, tuning.target_modules),
        init_lora_weights=False,
    )
    with torch.random.fork_rng(devices=[]):
        model = get_peft_model(cast("Any", module), config, autocast_adapter_dtype=False)
    assert isinstance(model, PeftModel)
    config.base_model_name_or_path = name
    _initialize(model, seed)
    return model


def resolve_targets(module: PreTrainedModel, requested: tuple[str, ...]) -> list[str]:
    """Names of the linear maps to adapt, sorted; every one of attention and MLP where none is
    requested.

    Experts are fused parameters and no linear maps: most of such a model would stay as it is, so
    attention alone is adapted only by name.
    """
    has_experts = any(name.endswith(".experts") for name, _ in module.named_modules())
    available = _available_targets(module, _ATTENTION if has_experts else _ATTENTION + _MLP)
    if has_experts and not requested:
        raise unsupported(
            "tuning.lora.target_modules",
            "none for a model with experts, which no adapter reaches",
            f"the projections of attention by name, of {', '.join(available)}",
        )
    for index, target in enumerate(requested):
        if target not in available:
            raise unsupported(
                f"tuning.lora.target_modules[{index}]", target, f"one of {', '.join(available)}"
            )
    return sorted(set(requested)) or available


def check_adapter_config(adapter: PeftModel, folder: Path) -> None:
    """Check that an adapter folder's values mean there what they mean here.

    Raises INVALID_ARGUMENT for another rank or scale, and where adapter_config.json is unreadable.
    """
    try:
        given = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
        got = {name: given.get(name) for name in _MEANING}
    except (OSError, ValueError, AttributeError) as err:
        raise invalid("model_folder", f"no readable {CONFIG_NAME}", "an adapter's") from err
    config = adapter.peft_config["default"]
    for name, value in got.items():
        own = getattr(config, name)
        if (value or None) != (own or None):
            raise invalid(f"model_folder/{CONFIG_NAME}: {name}", shown(value), f"{own}")


def export_config(adapter: PeftModel, folder: Path) -> None:
    """Write an adapter's configuration as peft does."""
    config = copy.copy(adapter.peft_config["default"])
    config.inference_mode = True
    # peft keeps a set, whose order differs between processes; files of equal weights are equal.
    cast("Any", config).target_modules = sorted(cast("Any", config).target_modules)
    config.save_pretrained(str(folder))


def adapter_tensors(adapter: PeftModel, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Some of `named_trainable()`'s values by the names of peft's files."""
    return get_peft_model_state_dict(adapter, state_dict=values, save_embedding_layers=False)


def _available_targets(module: PreTrainedModel, names: tuple[str, ...]) -> list[str]:
    linear = {n.rsplit(".", 1)[-1] for n, m in module.named_modules() if isinstance(m, nn.Linear)}
    return sorted(linear.intersection(names))


@torch.no_grad()
def _initialize(model: PeftModel, seed: int) -> None:
    """A uniform on +-1/sqrt(fan in), B zero."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if ".lora_B." in name:
            parameter.zero_()
            continue
        assert ".lora_A." in name, name
        bound = 1 / math.sqrt(parameter.shape[1])
        uniform = torch.rand(parameter.shape, generator=tensor_generator(seed, name))
        parameter.copy_((2 * uniform - 1) * bound)
