"""Adapters by their formula: every adapted weight is W + alpha / r B A, of experts one by one.

In: a stock model and an adapter folder. Out: a model whose factors alone are trained, by autograd
through the merged weights; those of all experts are one leaf. Invariant: no peft, and each tensor
of the folder is used.
"""

from __future__ import annotations

import json
from pathlib import Path as FilePath
from typing import Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call


def merge(model: nn.Module, adapter: FilePath) -> nn.Module:
    """`model` with the folder's adapter, in place."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    rank = config["r"]
    scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
    tensors = load_file(adapter / "adapter_model.safetensors")
    dtype = next(model.parameters()).dtype
    model.requires_grad_(requires_grad=False)
    for name, module in list(model.named_modules()):
        found = {
            key.removeprefix(f"base_model.model.{name}."): tensors.pop(key).to(dtype)
            for key in list(tensors)
            if isinstance(module, (nn.Linear, nn.Embedding)) or name.endswith(".experts")
            if key.startswith(f"base_model.model.{name}.")
        }
        if found:
            parent, _, leaf = name.rpartition(".")
            kind = _Linear if isinstance(module, nn.Linear) else _Experts
            kind = _Embedding if isinstance(module, nn.Embedding) else kind
            setattr(model.get_submodule(parent), leaf, kind(module, found, scale))
    assert not tensors, sorted(tensors)
    return _Adapted(model)


def has_experts(adapter: FilePath) -> bool:
    """Whether the folder's adapter is of experts, too."""
    with safe_open(adapter / "adapter_model.safetensors", framework="pt") as file:
        return any(".experts." in name for name in file.keys())  # noqa: SIM118 - no mapping


class _Adapted(nn.Module):
    """Only for the names that peft's models have."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model

    def forward(self, **inputs: Any) -> Any:
        return cast("Any", self.base_model.model)(**inputs)


class _Linear(nn.Module):
    def __init__(self, base_layer: nn.Module, tensors: dict[str, Tensor], scale: float) -> None:
        super().__init__()
        self.base_layer, self._scale = base_layer, scale
        for factor in ("lora_A", "lora_B"):
            leaf = _leaf(tensors.pop(f"{factor}.weight"))
            setattr(self, factor, nn.ModuleDict({"default": leaf}))
        assert not tensors

    def forward(self, x: Tensor) -> Tensor:
        a, b = (cast("Any", factor)["default"].weight for factor in (self.lora_A, self.lora_B))
        weight = cast("Any", self.base_layer).weight + self._scale * (b @ a)
        return functional_call(self.base_layer, {"weight": weight}, (x,))


class _Embedding(nn.Module):
    def __init__(self, base_layer: nn.Module, tensors: dict[str, Tensor], scale: float) -> None:
        super().__init__()
        self.base_layer, self._scale = base_layer, scale
        for factor in ("lora_embedding_A", "lora_embedding_B"):
            leaf = nn.Parameter(tensors.pop(factor))
            setattr(self, factor, nn.ParameterDict({"default": leaf}))
        assert not tensors

    def forward(self, ids: Tensor) -> Tensor:
        a, b = (cast("Any", f)["default"] for f in (self.lora_embedding_A, self.lora_embedding_B))
        weight = cast("Any", self.base_layer).weight + self._scale * (b @ a).T
        return functional_call(self.base_layer, {"weight": weight}, (ids,))


class _Experts(nn.Module):
    def __init__(self, base_layer: nn.Module, tensors: dict[str, Tensor], scale: float) -> None:
        super().__init__()
        self.base_layer, self._scale = base_layer, scale
        self._num_experts = cast("int", base_layer.num_experts)
        for projection in ("gate_proj", "up_proj", "down_proj"):
            factors = nn.Module()
            for factor in ("lora_A", "lora_B"):
                each = [
                    tensors.pop(f"{expert}.{projection}.{factor}.weight")
                    for expert in range(self._num_experts)
                ]
                setattr(factors, factor, _leaf(torch.stack(each)))
            setattr(self, projection, factors)
        assert not tensors

    def forward(self, *inputs: Tensor) -> Tensor:
        """transformers' own, of the merged weights."""
        base = cast("Any", self.base_layer)
        gate_up, down = [], []
        for expert in range(self._num_experts):
            of_gate_up = torch.cat([self._term("gate_proj", expert), self._term("up_proj", expert)])
            gate_up.append(base.gate_up_proj[expert] + of_gate_up)
            down.append(base.down_proj[expert] + self._term("down_proj", expert))
        merged = {"gate_up_proj": torch.stack(gate_up), "down_proj": torch.stack(down)}
        return functional_call(self.base_layer, merged, inputs)

    def _term(self, projection: str, expert: int) -> Tensor:
        factors = cast("Any", getattr(self, projection))
        return self._scale * (factors.lora_B.weight[expert] @ factors.lora_A.weight[expert])


def _leaf(value: Tensor) -> nn.Module:
    leaf = nn.Module()
    leaf.weight = nn.Parameter(value)
    return leaf
