"""Muon as its papers have it, one matrix at a time, in float64 or wider rounding of torch's.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon): B = momentum B + G; the update is NS5(B), or
NS5(G + momentum B) with Nesterov's momentum. Liu et al. 2025 (arXiv 2502.16982, equation 4): it is
multiplied by 0.2 sqrt(max(rows, columns)), and the weight decays by the learning rate's share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor


def newton_schulz(matrix: Tensor, num_steps: int = 5) -> Tensor:
    """The quintic iteration of Jordan's post: singular values go to about 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / max(float(matrix.norm()), 1e-7)
    for _ in range(num_steps):
        x = a * x + b * (x @ x.T @ x) + c * (x @ x.T @ x @ x.T @ x)
    return x


class PlainMuon:
    """Steps tensors of one matrix or of several, those of experts and their halves apart."""

    def __init__(
        self, *, momentum: float = 0.95, nesterov: bool = True, is_original: bool = False
    ) -> None:
        self._momentum, self._nesterov, self._is_original = momentum, nesterov, is_original
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(
        self, name: str, weight: Tensor, gradient: Tensor, *, rate: float, decay: float, halves: int
    ) -> None:
        """`halves`: how many matrices follow one another in the rows of each expert's."""
        buffer = self._buffers.setdefault(name, torch.zeros_like(weight))
        buffer.copy_(self._momentum * buffer + gradient)
        update = gradient + self._momentum * buffer if self._nesterov else buffer
        for w, u in zip(_matrices(weight, halves), _matrices(update, halves), strict=True):
            rows, columns = w.shape
            scale = 0.2 * math.sqrt(max(rows, columns))
            if self._is_original:
                scale = math.sqrt(max(1.0, rows / columns))
            w.copy_((1.0 - rate * decay) * w - rate * scale * newton_schulz(u))


def _matrices(tensor: Tensor, halves: int) -> Iterator[Tensor]:
    """Views."""
    for expert in tensor if tensor.ndim == 3 else (tensor,):
        yield from expert.tensor_split(halves)
