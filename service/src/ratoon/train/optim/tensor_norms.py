"""Norm and largest value of each tensor's gradient, for a step that asks for them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ratoon.train.report.step_report import TensorGradNorm


class TensorNorms:
    """Norms of gradient sums as they are now; they are on the device until they are read."""

    def __init__(self, sums: Mapping[str, Tensor], divisor: float) -> None:
        """`sums` by name; they may change afterwards."""
        self._names = list(sums)
        self._divisor = divisor
        norm = torch.linalg.vector_norm
        self._norms = [norm(each, dtype=torch.float64) for each in sums.values()]
        self._maxima = [norm(each, math.inf, dtype=torch.float64) for each in sums.values()]

    def read(self) -> tuple[TensorGradNorm, ...]:
        """In the order of the sums, after division; waits for the device."""
        both = torch.stack([torch.stack(self._norms), torch.stack(self._maxima)]) / self._divisor
        return tuple(
            TensorGradNorm(name=name, norm=norm, max_abs=largest)
            for name, norm, largest in zip(self._names, *both.tolist(), strict=True)
        )
