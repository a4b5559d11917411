"""Masters in 16 + 16 bits are float32 masters: in every value, and in every step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from ratoon.train.optim import bf16_state
from ratoon.train.optim.adamw import Optimizer
from ratoon.train.optim.bf16_adamw import make_optimizer
from ratoon.train.optim.rounding import join_float32, split_float32
from ratoon.train.optim.state import OptimizerState
from ratoon.train.ranks.layout import choose_layout
from ratoon.train.spec import OptimizerStates
from ratoon_proto.types import AdamWConfig, Shard
from tests.train.optimizer_runs import (
    CONFIG,
    SPLIT,
    WITHOUT_MASTERS,
    make_gradients,
    make_parameters,
    optim_step,
    take_step,
)

_HALVES = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
# Lower halves beside which something turns: none, just below a tie, a tie, just above it, all.
_LOWS = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
# Zeros, subnormals, the smallest normal, carries into the exponent, one, the largest finite.
_HIGHS = (0x0000, 0x0001, 0x007E, 0x007F, 0x0080, 0x3F7F, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F)


def _floats() -> Tensor:
    """Every upper half with the `_LOWS`, and the `_HIGHS` of both signs with every lower half."""
    bits = [(_HALVES << 16) | low for low in _LOWS]
    bits += [((high | sign) << 16) + (_HALVES & 0xFFFF) for high in _HIGHS for sign in (0, -0x8000)]
    return torch.cat(bits).to(torch.int32).view(torch.float32)


def test_every_float32_is_its_nearest_bfloat16_and_a_remainder() -> None:
    x = _floats()
    x = x[~x.isnan()]
    assert {0.0, math.inf, -math.inf} <= set(x[~(x.abs() < math.inf) | (x == 0)].tolist())
    bits, remainder = split_float32(x)
    assert torch.equal(join_float32(bits, remainder).view(torch.int32), x.view(torch.int32))
    weight = bits.view(torch.bfloat16)
    is_tie = (x.view(torch.int32) & 0xFFFF) == 0x8000
    theirs = x.to(torch.bfloat16)
    assert torch.equal(weight[~is_tie].view(torch.int16), theirs[~is_tie].view(torch.int16))
    # A tie takes the neighbour that is further from zero.
    truncated = (x[is_tie].view(torch.int32) & -0x10000).view(torch.float32)
    assert (weight[is_tie].float().abs() > truncated.abs()).all()


def test_to_even_two_floats_would_have_one_weight_and_one_remainder() -> None:
    """Why a tie goes away from zero."""
    x = torch.tensor([0x3F7F8000, 0x3F808000], dtype=torch.int32).view(torch.float32)
    even = x.to(torch.bfloat16)
    rest = (x.view(torch.int32) - even.float().view(torch.int32)).to(torch.int16)
    assert even[0] == even[1]
    assert rest[0] == rest[1]
    bits, remainder = split_float32(x)
    assert bits[0] != bits[1]
    assert torch.equal(join_float32(bits, remainder), x)


def test_not_a_number_stays_none() -> None:
    """Some have bits that would be carried over to a zero of the other sign."""
    x = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1, 0x7F800001], dtype=torch.int32)
    bits, remainder = split_float32(x.view(torch.float32))
    assert bits.view(torch.bfloat16).isnan().all()
    assert join_float32(bits, remainder).isnan().all()


def _masters(state: OptimizerState, name: str) -> Tensor:
    weight = state.weights[name]
    if name in state.weight_remainder:
        return join_float32(weight.view(torch.int16), state.weight_remainder[name])
    return weight


def _accumulated(kind: OptimizerStates, rate: float, num_steps: int) -> tuple[Tensor, Tensor]:
    """w_T - w_0 in float64, of a kind and of float64 weights: gradients drift by 0.1 sigma."""
    generator = torch.Generator().manual_seed(0)
    start = (0.02 * torch.randn(64, 256, generator=generator)).to(torch.bfloat16)
    drift = 0.1 * torch.randn(start.shape, generator=generator).sign()
    exact = {"a": nn.Parameter(start.double())}
    config = AdamWConfig(weight_decay=0.0)
    optimizer = make_optimizer({"a": nn.Parameter(start.clone())}, config, kind, 0)
    reference = make_optimizer(exact, config, OptimizerStates.FP32, 0)
    step = optim_step(rate, weight_decay=0.0, max_grad_norm=math.inf)
    for _ in range(num_steps):
        gradient = drift + torch.randn(start.shape, generator=generator)
        take_step(optimizer, {"a": gradient}, 1.0, step)
        take_step(reference, {"a": gradient.double()}, 1.0, step)
    moved = _masters(optimizer.state(), "a").double() - start.double()
    return moved, exact["a"].detach() - start.double()


def _error(kind: OptimizerStates, rate: float, num_steps: int) -> tuple[float, float]:
    """|got - exact| / |exact| of the accumulated update, and their cosine."""
    got, exact = _accumulated(kind, rate, num_steps)
    cosine = nn.functional.cosine_similarity(got.flatten(), exact.flatten(), dim=0)
    return ((got - exact).norm() / exact.norm()).item(), cosine.item()


@pytest.mark.parametrize("num_steps", [100, 400])
def test_updates_at_rl_learning_rates_arrive(num_steps: int) -> None:
    """The default of a CPU took 1e-6 as noise where it had no masters: 3.1 times the update."""
    kind, _ = choose_layout(make_parameters(), [], {Shard.STATES: 0}, None)
    error, cosine = _error(kind, 1e-6, num_steps)
    assert error < 1e-3
    assert cosine > 0.999999


def test_updates_with_8bit_moments_are_as_noisy_as_their_moments() -> None:
    """The masters lose nothing: the error is the same at any rate, for the moments' alone."""
    for rate in (1e-6, 1e-4):
        error, cosine = _error(OptimizerStates.BF16_SPLIT_8BIT, rate, 100)
        assert error < 0.1
        assert cosine > 0.995


@pytest.mark.parametrize("kind", WITHOUT_MASTERS)
def test_without_masters_the_rounding_is_larger_than_the_update(kind: OptimizerStates) -> None:
    """Points of the curve in docs/decisions/0008, which the warning below 1e-5 is about."""
    assert _error(kind, 1e-6, 100) == pytest.approx((3.15, 0.30), rel=0.05)
    assert _error(kind, 1e-6, 400) == pytest.approx((1.97, 0.455), rel=0.05)
    assert _error(kind, 1e-5, 100) == pytest.approx((0.98, 0.71), rel=0.05)
    assert _error(kind, 5e-4, 100)[1] > 0.99


@pytest.mark.parametrize("kind", SPLIT)
def test_steps_are_those_of_float32_masters_bit_for_bit(
    kind: OptimizerStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the same moments: in float32 they are `fp32`'s own."""
    split = _run(make_optimizer(make_parameters(), CONFIG, kind, 0))
    other = OptimizerStates.FP32
    if kind is OptimizerStates.BF16_SPLIT_8BIT:
        other = kind
        monkeypatch.setitem(bf16_state._KEPT, kind, (torch.float32, torch.uint8))
    parameters = make_parameters()
    masters = _run(make_optimizer(parameters, CONFIG, other, 0))
    assert not masters.weight_remainder
    for name, parameter in parameters.items():
        assert masters.weights[name].dtype is torch.float32
        assert torch.equal(_masters(split, name), masters.weights[name])
        assert torch.equal(split.weights[name], parameter.detach())
        for moment in ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"):
            mine, theirs = getattr(split, moment), getattr(masters, moment)
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    moved = make_parameters()
    assert any(not torch.equal(moved[name], parameters[name]) for name in parameters)


def _run(optimizer: Optimizer) -> OptimizerState:
    """Steps of all sizes, from far below an ulp of a weight to more than it."""
    for number, rate in enumerate((1e-6, 1e-5, 1e-3, 0.3, 1e-6, 1e-6)):
        assert not take_step(optimizer, make_gradients(number), 2.0, optim_step(rate)).skipped
    return optimizer.state()


def test_a_decay_below_half_an_ulp_counts() -> None:
    """1 - 1e-8 is 1 in float32: decayed by a factor of its own, a weight would never decay at 1e-6;
    with the update it moves by a hundredth of an ulp more, which is a hundredth more often."""
    generator = torch.Generator().manual_seed(0)
    start = {"a": nn.Parameter((1 + torch.rand(1 << 18, generator=generator)).bfloat16())}
    moved: list[Tensor] = []
    for decay in (0.0, 0.01):
        parameters = {"a": nn.Parameter(start["a"].detach().clone())}
        optimizer = make_optimizer(parameters, CONFIG, OptimizerStates.BF16_SPLIT, 0)
        for number in range(20):
            gradient = torch.randn(1 << 18, generator=generator.manual_seed(number))
            step = optim_step(1e-6, weight_decay=decay, max_grad_norm=math.inf)
            take_step(optimizer, {"a": gradient}, 1.0, step)
        moved.append(_masters(optimizer.state(), "a").double())
    mean = (moved[0] - moved[1]).mean().item()
    assert mean == pytest.approx(20 * 1e-8 * 1.5, rel=0.25)
