"""Low-rank adapters of routed experts: each expert has its own factors for each projection.

A row x of expert e has scale * B_e A_e x added to its product, by the grouped products of the
experts themselves. The factors of all experts are one parameter: A [E, r, D], B [E, F, r].
"""

from __future__ import annotations

from typing import Any, cast

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from ratoon.model.experts import grouped_experts, grouped_linear


class LoraExperts(nn.Module, BaseTunerLayer):
    """Replaces experts of transformers, whose parameters stay unchanged in `base_layer`.

    States: adapted and, while peft has adapters disabled, only the base.
    """

    def __init__(
        self, base_layer: Qwen3MoeExperts, _adapter: str, *, r: int, lora_alpha: float, **_: Any
    ) -> None:
        """Signature that peft calls; the factors have the base's dtype and device, and no
        values."""
        super().__init__()
        self.base_layer = base_layer
        # The attribute belongs to the instance: if peft set the class's, a compiled layer would be
        # compiled again.
        self._disable_adapters = False
        down_EDF = cast("Tensor", base_layer.down_proj)
        _num_experts, hidden, features = down_EDF.shape
        scale = lora_alpha / r
        self.gate_proj = _Adapter(down_EDF, hidden, features, r, scale)
        self.up_proj = _Adapter(down_EDF, hidden, features, r, scale)
        self.down_proj = _Adapter(down_EDF, features, hidden, r, scale)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, D], experts [T, C] and their weights [T, C] -> [T, D]."""
        adapters = None if self.disable_adapters else (self.gate_proj, self.up_proj, self.down_proj)
        return grouped_experts(self.base_layer, hidden_states, top_k_index, top_k_weights, adapters)


class _Adapter(nn.Module):
    def __init__(self, like: Tensor, inputs: int, outputs: int, rank: int, scale: float) -> None:
        super().__init__()
        num_experts = like.shape[0]
        self.lora_A = _GroupedLinear(like.new_empty(num_experts, rank, inputs))
        self.lora_B = _GroupedLinear(like.new_empty(num_experts, outputs, rank))
        self._scale = scale

    def forward(self, y_SF: Tensor, x_SD: Tensor, stop_E: Tensor) -> Tensor:
        # The scale multiplies where rows are narrowest.
        return y_SF + self.lora_B(self._scale * self.lora_A(x_SD, stop_E), stop_E)


class _GroupedLinear(nn.Module):
    def __init__(self, weight_EFD: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_EFD)

    def forward(self, x_SD: Tensor, stop_E: Tensor) -> Tensor:
        return grouped_linear(x_SD, self.weight, stop_E)
