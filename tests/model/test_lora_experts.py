"""Adapters of experts: results and all gradients against a loop over tokens, and their bits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from ratoon.model.experts import EXPERTS_NAME, register_grouped_experts
from ratoon.model.lora import LoraExperts
from tests.model.test_experts import CASES, Case, D, F, each_case

RANK, ALPHA = 3, 7.5
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def _experts(case: Case, dtype: torch.dtype = torch.float64) -> LoraExperts:
    register_grouped_experts()
    config = Qwen3MoeConfig(num_experts=case.num_experts, hidden_size=D, moe_intermediate_size=F)
    config._experts_implementation = EXPERTS_NAME
    base = Qwen3MoeExperts(config).to(dtype)
    layer = LoraExperts(base, "default", r=RANK, lora_alpha=ALPHA)
    base.requires_grad_(requires_grad=False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype))
    return layer


def _inputs(case: Case, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = {"x": (len(case.expert_TC), D), "weight": case.expert_TC.shape}
    return {
        name: torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()
        for name, shape in shapes.items()
    }


def _token_by_token(case: Case, layer: LoraExperts, inputs: dict[str, Tensor]) -> Tensor:
    """By the formula, of the weights W + alpha / r B A of each expert."""
    scale = ALPHA / RANK

    def merged(expert: int) -> list[Tensor]:
        base: Any = layer.base_layer
        weights = [*base.gate_up_proj[expert].split(F), base.down_proj[expert]]
        factors: list[Any] = [getattr(layer, name) for name in PROJECTIONS]
        return [
            weight + scale * each.lora_B.weight[expert] @ each.lora_A.weight[expert]
            for weight, each in zip(weights, factors, strict=True)
        ]

    rows: list[Tensor] = []
    for token, chosen in enumerate(case.expert_TC.tolist()):
        total = torch.zeros(D, dtype=torch.float64)
        for place, expert in enumerate(chosen):
            gate, up, down = merged(expert)
            x = inputs["x"][token]
            product = (gate @ x) * torch.sigmoid(gate @ x) * (up @ x)
            total = total + inputs["weight"][token, place] * (down @ product)
        rows.append(total)
    return torch.stack(rows)


def _gradients(out_TD: Tensor, layer: LoraExperts, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    leaves = inputs | {n: p for n, p in layer.named_parameters() if p.requires_grad}
    assert len(leaves) == 2 + 2 * len(PROJECTIONS)
    generator = torch.Generator().manual_seed(3)
    dout_TD = torch.randn(out_TD.shape, generator=generator, dtype=torch.float64)
    grads = torch.autograd.grad(out_TD, list(leaves.values()), dout_TD.to(out_TD.dtype))
    return dict(zip(leaves, grads, strict=True))


def _adapted(case: Case, layer: LoraExperts, inputs: dict[str, Tensor]) -> Tensor:
    return layer(inputs["x"], case.expert_TC, inputs["weight"])


@pytest.mark.usefixtures("poisoned_memory")
@each_case
def test_adapted_experts_are_those_of_each_token_alone(case: Case) -> None:
    layer, inputs = _experts(case), _inputs(case)
    got, expected = _adapted(case, layer, inputs), _token_by_token(case, layer, inputs)
    assert (got - expected).norm() <= 1e-14 * expected.norm()
    grads, truth = _gradients(got, layer, inputs), _gradients(expected, layer, inputs)
    for name, grad in truth.items():
        assert grad.norm() > 0
        assert (grads[name] - grad).norm() <= 1e-13 * grad.norm(), name


@pytest.mark.usefixtures("poisoned_memory")
@each_case
def test_factors_of_an_expert_without_rows_have_gradients_of_zeros(case: Case) -> None:
    layer, inputs = _experts(case), _inputs(case)
    grads = _gradients(_adapted(case, layer, inputs), layer, inputs)
    visited = case.expert_TC.long().unique()
    is_empty = torch.ones(case.num_experts, dtype=torch.bool).index_fill_(0, visited, value=False)
    for name in grads.keys() - inputs.keys():
        assert grads[name][is_empty].count_nonzero() == 0
        assert grads[name][~is_empty].flatten(1).any(1).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_repeat_has_the_same_bits(dtype: torch.dtype) -> None:
    case = CASES["random"]
    layer, inputs = _experts(case, dtype), _inputs(case, dtype)
    first, second = (_gradients(_adapted(case, layer, inputs), layer, inputs) for _ in range(2))
    for name, grad in first.items():
        assert torch.equal(second[name], grad), name


def test_without_its_adapters_a_layer_is_its_base() -> None:
    case = CASES["random"]
    layer, inputs = _experts(case), _inputs(case)
    expected = layer.base_layer(inputs["x"], case.expert_TC, inputs["weight"])
    assert not torch.equal(_adapted(case, layer, inputs), expected)
    layer.enable_adapters(False)
    assert torch.equal(_adapted(case, layer, inputs), expected)
    layer.enable_adapters(True)
    assert not torch.equal(_adapted(case, layer, inputs), expected)


class _WeightGradients(TorchDispatchMode):
    """Counts gradients of weights by the features of these."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[int, int]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func is torch.ops.ratoon.grouped_weight_gradient.default:
            self.counts[args[0].shape[1], args[1].shape[1]] += 1
        return func(*args, **(kwargs or {}))


def test_no_gradient_of_a_frozen_weight_is_computed() -> None:
    case = CASES["random"]
    layer, inputs = _experts(case), _inputs(case)
    with _WeightGradients() as gradients:
        _gradients(_adapted(case, layer, inputs), layer, inputs)
    # Counts for gate and up, then for down.
    assert gradients.counts == {(RANK, D): 2, (F, RANK): 2, (RANK, F): 1, (D, RANK): 1}
