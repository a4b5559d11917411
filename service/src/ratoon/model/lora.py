"""Low-rank adapters (Hu et al., 2021, arXiv:2106.09685) on the linear maps of a decoder, by peft.

All that needs peft is here and in `lora_experts`: other modules import this one late, for workers
without adapters.

A is random from (seed, name), B is zero, so that at first the adapter changes nothing. Adapters
have the dtype of the base; the optimizer keeps its masters in float32.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from ratoon.errors import invalid, shown
from ratoon.model.lora_experts import LoraExperts
from ratoon.model.seeding import tensor_generator
from ratoon.model.spec import LoraTuning
from ratoon.model.support import unsupported

CONFIG_NAME = "adapter_config.json"
# The fields that LoRA had in the first peft, which are all that an adapter here sets.
_EARLY_FIELDS = (
    "base_model_name_or_path",
    "bias",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "lora_alpha",
    "lora_dropout",
    "modules_to_save",
    "peft_type",
    "r",
    "target_modules",
    "task_type",
)
# Of its configuration: what decides how its tensors enter the model.
_MEANING = ("r", "rank_pattern", "lora_alpha", "alpha_pattern", "use_rslora", "use_dora")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
# By this name peft finds them.
_EXPERTS = "experts"


def add_adapter(module: PreTrainedModel, tuning: LoraTuning, seed: int, name: str) -> PeftModel:
    """Put a fresh adapter on `module`, in place; `name` is what the adapter says that its base is.

    Raises what `attach_adapter` raises.
    """
    model = attach_adapter(module, tuning, name)
    _initialize(model, seed)
    return model


def attach_adapter(module: PreTrainedModel, tuning: LoraTuning, name: str) -> PeftModel:
    """The same without values.

    Raises INVALID_ARGUMENT for a rank or alpha out of range, UNSUPPORTED for a target module that
    is not a projection of attention, MLP or experts (the LM head, embeddings, a router), for a part
    of the projections of experts, and for none named where experts are beside dense layers.
    """
    if tuning.rank < 1:
        raise invalid("tuning.lora.rank", tuning.rank, "at least 1")
    if not (math.isfinite(tuning.alpha) and tuning.alpha > 0):
        raise invalid("tuning.lora.alpha", tuning.alpha, "a finite number above 0")
    targets = _resolve_targets(module, tuning.target_modules)
    if _has_experts(module) and not targets.isdisjoint(_MLP):
        targets = targets - {*_MLP} | {_EXPERTS}
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=tuning.rank,
        lora_alpha=cast("int", tuning.alpha),
        lora_dropout=0.0,
        bias="none",
        target_modules=sorted(targets),
        init_lora_weights=False,
    )
    config._register_custom_module({Qwen3MoeExperts: LoraExperts})
    with torch.random.fork_rng(devices=[]):
        model = get_peft_model(cast("Any", module), config, autocast_adapter_dtype=False)
    assert isinstance(model, PeftModel)
    config.base_model_name_or_path = name
    return model


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
    """Write an adapter's configuration by the fields that every peft knows.

    Earlier versions of peft fail on fields of later ones, all of which have their defaults here.
    """
    config = adapter.peft_config["default"]
    fields = {name: value for name, value in config.to_dict().items() if name in _EARLY_FIELDS}
    targets: set[str] = {*fields["target_modules"]}
    if _EXPERTS in targets:
        # The file has their projections, as those of an MLP.
        targets = targets - {_EXPERTS} | {*_MLP}
    # peft keeps a set, whose order differs between processes; files of equal weights are equal.
    fields |= {"inference_mode": True, "target_modules": sorted(targets)}
    text = json.dumps(fields, indent=2, sort_keys=True)
    (folder / CONFIG_NAME).write_text(text, encoding="utf-8")


def _resolve_targets(module: PreTrainedModel, requested: tuple[str, ...]) -> set[str]:
    """Names of the projections to adapt; all of attention and MLP, or experts, by default.

    Experts are adapted whole, for vLLM takes no adapter of a part of their projections. Where dense
    layers are beside them attention alone is, by name: peft does not tell their MLPs from experts.
    """
    linear = {n.rsplit(".", 1)[-1] for n, m in module.named_modules() if isinstance(m, nn.Linear)}
    of_experts = {*_MLP} if _has_experts(module) else set[str]()
    # Of either kind, but not of both.
    available = (linear ^ of_experts).intersection(_ATTENTION + _MLP)
    shown_names = ", ".join(sorted(available))
    if not requested and of_experts & linear:
        raise unsupported(
            "tuning.lora.target_modules",
            "none for a model with dense layers beside experts, whose MLPs no adapter reaches",
            f"the projections of attention by name, of {shown_names}",
        )
    for index, target in enumerate(requested):
        if target not in available:
            field = f"tuning.lora.target_modules[{index}]"
            raise unsupported(field, target, f"one of {shown_names}")
    part = of_experts.intersection(requested)
    if part and part != of_experts:
        raise unsupported(
            "tuning.lora.target_modules",
            f"{', '.join(sorted(part))} alone of the projections of experts",
            f"all of {', '.join(_MLP)}, or none of them",
        )
    return {*requested} or available


def _has_experts(module: nn.Module) -> bool:
    return any(isinstance(each, Qwen3MoeExperts) for each in module.modules())


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
        bound = 1 / math.sqrt(parameter.shape[-1])
        uniform = torch.rand(parameter.shape, generator=tensor_generator(seed, name))
        parameter.copy_((2 * uniform - 1) * bound)
