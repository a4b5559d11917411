"""Gradient norms layer by layer, for a step that asks for them."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from ratoon.train.report.step_report import LayerGradNorm

# Up to the layer's number: `model.layers.3` of `model.layers.3.mlp.up_proj.weight`.
_LAYER = re.compile(r".*?\blayers\.\d+(?=\.)")


class LayerNorms:
    """Norms of gradient sums as they are now; they are on the device until they are read."""

    def __init__(self, sums: Mapping[str, Tensor], divisor: float) -> None:
        """`sums` by parameter name; they may change afterwards."""
        layers = [layer_of(name) for name in sums]
        self._names = list(dict.fromkeys(layers))
        self._divisor = divisor
        norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in sums.values()]
        self._norms = [
            torch.linalg.vector_norm(
                torch.stack([n for n, layer in zip(norms, layers, strict=True) if layer == name])
            )
            for name in self._names
        ]

    def read(self) -> tuple[LayerGradNorm, ...]:
        """In the order of the model's parameters, after division; waits for the device."""
        values = (torch.stack(self._norms) / self._divisor).tolist()
        return tuple(
            LayerGradNorm(layer=name, norm=value)
            for name, value in zip(self._names, values, strict=True)
        )


def layer_of(parameter: str) -> str:
    """The decoder layer that a parameter is in; of one in none, its module."""
    found = _LAYER.match(parameter)
    return parameter.rpartition(".")[0] if found is None else found.group()
