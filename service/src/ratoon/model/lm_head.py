"""The LM head of a model: hidden states in, factors of their logits out.

Invariant: no weight [V, D] and no logits are made here; `ratoon_kernels` makes logits by chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from ratoon_kernels import LowRankTerm


@dataclass(frozen=True, slots=True, kw_only=True)
class LmHead:
    """Logits of hidden states h: h W^T, and scale * (h A^T) B^T with an adapter of rank A."""

    # [V, D]; the embedding itself if the model ties them.
    weight_VD: Tensor
    adapter: HeadAdapter | None = None

    @classmethod
    def of(cls, module: nn.Module) -> LmHead:
        """The head of a model's output layer, with its adapter unless that is disabled."""
        layer = cast("Any", module)
        adapter = None
        if hasattr(layer, "lora_A") and not layer.disable_adapters:
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            adapter = HeadAdapter(a_AD=a, b_VA=b, scale=layer.scaling["default"])
        return cls(weight_VD=layer.weight, adapter=adapter)

    def term(self, hidden_RD: Tensor) -> LowRankTerm | None:
        """What the adapter adds to the logits of these rows; gradients flow to it and to them."""
        if self.adapter is None:
            return None
        a_AD, b_VA = self.adapter.a_AD, self.adapter.b_VA
        # The scale multiplies where rows are narrowest.
        return LowRankTerm(u_RA=self.adapter.scale * (hidden_RD @ a_AD.T), b_VA=b_VA)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadAdapter:
    """Low-rank factors on the LM head, of rank A, and what multiplies their product."""

    a_AD: Tensor
    b_VA: Tensor
    scale: float
