"""AdamW over wide weights against torch's own, and gradient sums in float32."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ratoon.train.loss.spec import NoDivisor, OptimStep
from ratoon.train.optim.adamw import MasterAdamW
from ratoon.train.optim.gradients import GradientSums
from ratoon_proto.types import AdamWConfig
from tests.train.optimizer_runs import take_step

_CONFIG = AdamWConfig(beta1=0.8, beta2=0.95, eps=1e-7, weight_decay=0.02)


def _step(
    learning_rate: float = 0.1, *, weight_decay: float = 0.02, max_grad_norm: float = math.inf
) -> OptimStep:
    return OptimStep(
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
        divisor=NoDivisor(),
    )


def _parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in (("a", (3, 4)), ("b", (5,)))
    }


def _gradients(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + seed)
    return {
        "a": torch.randn(3, 4, generator=generator).to(dtype),
        "b": torch.randn(5, generator=generator).to(dtype),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_equal_torch_adamw_with_a_schedule(dtype: torch.dtype) -> None:
    """Each step has its own learning rate and weight decay; torch's AdamW, but for rounding.

    Of each number a few times, and once a step of the largest: small ones are left by cancellation.
    """
    epsilon = torch.finfo(dtype).eps
    mine, theirs = _parameters(dtype), _parameters(dtype)
    optimizer = MasterAdamW(mine, _CONFIG)
    adamw = torch.optim.AdamW(theirs.values(), lr=0.0, betas=(0.8, 0.95), eps=1e-7)
    schedule = [(0.1, 0.02, 0.5), (0.05, 0.0, math.inf), (0.2, 0.3, 1.0), (0.0, 0.1, 1.0)]
    for seed, (rate, decay, limit) in enumerate(schedule):
        outcome = take_step(
            optimizer,
            _gradients(seed, dtype),
            4.0,
            _step(rate, weight_decay=decay, max_grad_norm=limit),
        )
        for name, gradient in _gradients(seed, dtype).items():
            theirs[name].grad = gradient / 4.0
        norm = nn.utils.clip_grad_norm_(theirs.values(), limit)
        adamw.param_groups[0].update(lr=rate, weight_decay=decay)
        adamw.step()
        assert outcome.grad_norm == pytest.approx(norm.item(), rel=1e-6)
        assert not outcome.skipped
        for name, parameter in mine.items():
            atol = epsilon * parameter.abs().max().item()
            torch.testing.assert_close(parameter, theirs[name], rtol=8 * epsilon, atol=atol)
    assert optimizer.state().num_steps == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_equal_torch_adamw_where_each_has_its_own_betas_and_eps(dtype: torch.dtype) -> None:
    """What a step leaves out is the policy's; torch's AdamW with its group changed, to the bit."""
    mine, theirs = _parameters(dtype), _parameters(dtype)
    optimizer = MasterAdamW(mine, _CONFIG)
    adamw = torch.optim.AdamW(theirs.values(), lr=0.1, weight_decay=0.02)
    own: list[dict[str, float]] = [
        {},
        {"beta1": 0.0, "beta2": 0.5},
        {"eps": 1e-2},
        {"beta1": 0.95, "beta2": 0.999, "eps": 1e-8},
        {},
    ]
    for seed, asked in enumerate(own):
        take_step(optimizer, _gradients(seed, dtype), 1.0, replace(_step(), **asked))
        for name, gradient in _gradients(seed, dtype).items():
            theirs[name].grad = gradient
        used = {"beta1": 0.8, "beta2": 0.95, "eps": 1e-7} | asked
        adamw.param_groups[0].update(betas=(used["beta1"], used["beta2"]), eps=used["eps"])
        adamw.step()
        for name, parameter in mine.items():
            assert torch.equal(parameter, theirs[name]), (seed, name)


def _backward(parameter: nn.Parameter, scale: float) -> None:
    (parameter * scale).sum().backward()


def test_bfloat16_gradients_add_up_in_float32() -> None:
    """256 + 1 is 256 in bf16: summing micro-batches there would lose all but the first."""
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    gradients = GradientSums({"a": parameter})
    assert gradients.passing_bytes == 12
    _backward(parameter, 256.0)
    assert gradients.sum_of("a").tolist() == [256.0] * 3
    # There is no sum of its own yet, nor does a step need one.
    assert gradients.sums_of_step()["a"].dtype is torch.bfloat16
    assert gradients.passing_bytes == 12
    _backward(parameter, 1.0)
    assert gradients.passing_bytes == 0
    assert gradients.sums_of_step() == gradients.sums()
    for _ in range(3):
        _backward(parameter, 1.0)
    sums = gradients.sums()["a"]
    assert sums.dtype is torch.float32
    assert sums.tolist() == [260.0] * 3
    assert parameter.grad is None
    gradients.clear()
    assert gradients.sums()["a"].tolist() == [0.0] * 3
    _backward(parameter, 2.0)
    sums = gradients.sums()["a"]
    assert (sums.tolist(), sums.dtype) == ([2.0] * 3, torch.float32)
    sums.neg_()
    _backward(parameter, 1.0)
    assert gradients.sums()["a"].tolist() == [-1.0] * 3


def test_wide_gradients_add_up_in_place_and_are_zero_where_nothing_flowed() -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    gradients = GradientSums({"used": used, "unused": unused})
    # What the first backward makes, and nothing has until then.
    assert gradients.passing_bytes == 16
    _backward(used, 1.5)
    assert gradients.passing_bytes == 8
    _backward(used, 2.0)
    sums = gradients.sums()
    assert sums["used"].tolist() == [3.5, 3.5]
    assert sums["unused"].tolist() == [0.0, 0.0]
    assert used.grad is sums["used"]
    gradients.clear()
    assert used.grad is None


def test_a_step_keeps_no_gradient_of_a_part() -> None:
    whole = nn.Parameter(torch.ones(4))
    optimizer = MasterAdamW({"a@0": whole.detach()[:2]}, _CONFIG)
    sums = torch.ones(2)
    take_step(optimizer, {"a@0": sums}, 1.0, _step())
    is_kept = weakref.ref(sums)
    del sums
    assert is_kept() is None
