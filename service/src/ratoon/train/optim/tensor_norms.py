"""Norm and largest value of each tensor's gradient, for a step that asks for them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ratoon.train.report.step_report import TensorGradNorm

# Elements of a sum that go into its norm at a time: a device copies them in float64.
_BLOCK = 1 << 25


class TensorNorms:
    """Norms of gradient sums as they are now; they are on the device until they are read."""

    def __init__(self, sums: Mapping[str, Tensor], divisor: float) -> None:
        """`sums` by name; they may change afterwards."""
        self._names = list(sums)
        self._divisor = divisor
        self._norms = [_norm(each) for each in sums.values()]
        self._maxima = [torch.linalg.vector_norm(each, math.inf).double() for each in sums.values()]

    def read(self) -> tuple[TensorGradNorm, ...]:
        """In the order of the sums, after division; waits for the device."""
        both = torch.stack([torch.stack(self._norms), torch.stack(self._maxima)]) / self._divisor
        return tuple(
            TensorGradNorm(name=name, norm=norm, max_abs=largest)
            for name, norm, largest in zip(self._names, *both.tolist(), strict=True)
        )


def _norm(tensor: Tensor) -> Tensor:
    """Euclidean norm, float64 []."""
    norm, blocks = torch.linalg.vector_norm, tensor.reshape(-1).split(_BLOCK)
    return norm(torch.stack([norm(block, dtype=torch.float64) for block in blocks]))
