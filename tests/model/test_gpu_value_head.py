"""A value head on a GPU: sums of float32, and the same bits each time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ratoon.model.value_head import ValueHead

pytestmark = pytest.mark.gpu
ROWS, HIDDEN = 5000, 4096


def _run(head: ValueHead, hidden_RD: Tensor, seed_R: Tensor) -> list[Tensor]:
    """Values, and the gradients of hidden states, weight and bias."""
    leaf = hidden_RD.detach().requires_grad_()
    value_R = head(leaf)
    grads = torch.autograd.grad(value_R, [leaf, head.weight, head.bias], seed_R)
    return [value_R.detach(), *grads]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_near_those_of_float64_and_repeat(dtype: torch.dtype) -> None:
    rng = torch.Generator(device="cuda").manual_seed(0)
    head = ValueHead(HIDDEN, dtype).cuda()
    with torch.no_grad():
        head.weight.normal_(0, HIDDEN**-0.5, generator=rng)
        head.bias.normal_(generator=rng)
    hidden_RD = torch.randn(ROWS, HIDDEN, generator=rng, device="cuda").to(dtype)
    seed_R = torch.randn(ROWS, generator=rng, device="cuda")
    found = _run(head, hidden_RD, seed_R)
    assert all(
        torch.equal(*pair) for pair in zip(found, _run(head, hidden_RD, seed_R), strict=True)
    )
    exact = _run(head.double(), hidden_RD.double(), seed_R.double())
    # Values are wide in either dtype; gradients are rounded to that of what they are of.
    rounding = 2.0**-8 if dtype is torch.bfloat16 else 1e-5
    for got, expected, bound in zip(found, exact, (1e-5, *[rounding] * 3), strict=True):
        assert (got.double() - expected).norm() <= bound * expected.norm()
