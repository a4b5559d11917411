"""Norm and largest value of each tensor, whatever the size of blocks and the values."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ratoon.shards.parts import parts_of
from ratoon.train.named_gradients import part_norms, tensor_norms
from ratoon_proto.types import TensorGradNorm


def _norms(
    sums: dict[str, Tensor], divisor: float, part: int = 2**25
) -> tuple[TensorGradNorm, ...]:
    parts = {one.name: one.of(sums[one.parameter]) for one in parts_of(sums, part)}
    return tensor_norms(part_norms(parts).values(), {name: name for name in sums}, divisor)


@pytest.mark.parametrize("part", [1, 7, 2**25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_do_not_depend_on_parts(part: int, dtype: torch.dtype) -> None:
    sums = {
        "b": torch.tensor([[3.0, -4.0], [0.0, 0.0]], dtype=dtype),
        "a": torch.arange(-20.0, 12.0, dtype=dtype).reshape(4, 8),
        # Squares of these are no float32.
        "large": torch.full((3,), 1e30, dtype=dtype),
        "small": torch.full((3,), 1e-30, dtype=dtype),
    }
    found = {each.name: (each.norm, each.max_abs) for each in _norms(sums, 2.0, part)}
    assert list(found) == list(sums)
    assert found["b"] == (2.5, 2.0)
    square = sum(float(number) ** 2 for number in range(-20, 12))
    assert found["a"] == pytest.approx((math.sqrt(square) / 2, 10.0), rel=1e-12)
    assert found["large"] == pytest.approx((math.sqrt(3) * 5e29, 5e29), rel=1e-6)
    assert found["small"] == pytest.approx((math.sqrt(3) * 5e-31, 5e-31), rel=1e-6)


def test_what_is_not_finite_is_said_of_its_tensor() -> None:
    sums = {
        "nan": torch.tensor([1.0, math.nan, 2.0]),
        "infinite": torch.tensor([1.0, -math.inf]),
        "fine": torch.tensor([1.0]),
    }
    nan, infinite, fine = _norms(sums, 1.0)
    assert math.isnan(nan.norm)
    assert math.isnan(nan.max_abs)
    assert (infinite.norm, infinite.max_abs) == (math.inf, math.inf)
    assert (fine.norm, fine.max_abs) == (1.0, 1.0)
