"""Muon: the momentum of a matrix, orthogonalised, is its update.

Source: Jordan et al. 2024 (kellerjordan.github.io/posts/muon), and for updates as large as AdamW's
Liu et al. 2025 (arXiv 2502.16982). Momentum is a mean of gradients, as AdamW's first moment is: the
orthogonalised update does not depend on its scale.

Matrices of one tensor are orthogonalised together, those of different tensors or parts never: how
products are cut decides their bits, and who has which parts must not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon_proto.types import MuonAdjustLr, MuonConfig

# Jordan chose these of the quintic iteration for its slope at zero: singular values end between 0.7
# and 1.2, and none is ever above 1.3.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# A smaller Frobenius norm counts as this one.
_EPS = 1e-7
# No element of an orthogonalised matrix, times what `scale_of` gives for it, is larger.
MAX_UPDATE = 2.0**17


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonStep:
    """The numbers of one tensor's step: what its update and its decay are multiplied by."""

    config: MuonConfig
    learning_rate: float
    decay: float
    # Rows and columns of each matrix of the tensor.
    shape: tuple[int, int]

    def apply(
        self, weight: Tensor, momentum: Tensor, gradient: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """The tensor's weight and momentum after the step; changes none of the arguments.

        All are of one shape and dtype, float32 or float64; `gradient` is divided and clipped.
        `dtype`: that of the Newton-Schulz iterations. Decay is part of the update, as AdamW's is.
        """
        mixed = torch.lerp(momentum, gradient, 1.0 - self.config.momentum)
        update = mixed
        if self.config.nesterov:
            update = torch.lerp(gradient, mixed, self.config.momentum)
        ortho_NRC = orthogonalised(update.view(-1, *self.shape), self.config.ns_steps, dtype)
        del update
        change = ortho_NRC.to(weight.dtype).mul_(self.learning_rate * self._scale)
        change = change.reshape(weight.shape).add_(weight, alpha=self.decay)
        return torch.sub(weight, change, out=change), mixed

    @property
    def _scale(self) -> float:
        return scale_of(self.shape, self.config.adjust_lr_fn)


def scale_of(shape: tuple[int, int], adjust_lr_fn: MuonAdjustLr) -> float:
    """What an orthogonalised matrix of this shape is multiplied by."""
    rows, columns = shape
    if adjust_lr_fn is MuonAdjustLr.ORIGINAL:
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


def orthogonalised(x_NRC: Tensor, ns_steps: int, dtype: torch.dtype) -> Tensor:
    """Matrices with the singular vectors of x_NRC and singular values near 1, in `dtype`.

    x_NRC: N matrices of R rows and C columns, float32 or float64. The iterations run on the shorter
    side.
    """
    a, b, c = _COEFFICIENTS
    norms_N11 = torch.linalg.vector_norm(x_NRC, dim=(1, 2), keepdim=True)
    x = (x_NRC / norms_N11.clamp(min=_EPS)).to(dtype)
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT.contiguous() if is_tall else x
    for _ in range(ns_steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if is_tall else x
