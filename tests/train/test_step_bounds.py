"""Steps that would not be finite: bounds that prove the others, and the copies that decide."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ratoon.train.loss.spec import OptimStep
from ratoon.train.optim.adamw import Optimizer
from ratoon.train.optim.state import FINITE, OptimizerState, StateBounds
from ratoon.train.spec import OptimizerStates
from tests.train.optimizer_runs import (
    CONFIG,
    copied,
    make_gradients,
    make_optimizer_of,
    optim_step,
    take_step,
)

_STATES = [
    *((torch.bfloat16, kind) for kind in OptimizerStates),
    (torch.float32, OptimizerStates.FP32),
    (torch.float64, OptimizerStates.FP32),
]
_ALL = pytest.mark.parametrize(("dtype", "kind"), _STATES)
# All of them are within what a caller may ask for.
_FAST = {"weight_decay": 0.0, "beta2": 0.0, "eps": 1e-30}


def _step(learning_rate: float, **changes: Any) -> OptimStep:
    step = optim_step(learning_rate, max_grad_norm=math.inf)
    return replace(step, step_on_zero_gradient=True, **changes)


def _filled(value: float) -> dict[str, Tensor]:
    return {name: torch.full_like(like, value) for name, like in make_gradients(0).items()}


def _of(optimizer: Optimizer, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients as wide as the optimizer's weights are, float32 at least."""
    weights = optimizer.state().weights
    return {n: s.to(torch.promote_types(weights[n].dtype, torch.float32)) for n, s in sums.items()}


def _swollen(dtype: torch.dtype, kind: OptimizerStates) -> Optimizer:
    """With first moments that a step without a gradient divides by epsilon alone."""
    optimizer = make_optimizer_of(dtype, kind)
    outcome = take_step(optimizer, _of(optimizer, _filled(1e6)), 1.0, _step(0.0))
    assert not outcome.skipped
    return optimizer


def _assert_same(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name


@_ALL
def test_a_step_that_would_not_be_finite_touches_nothing(
    dtype: torch.dtype, kind: OptimizerStates
) -> None:
    """It was taken, within all bounds of what a caller may ask for, and its weights published."""
    optimizer = _swollen(dtype, kind)
    before = copied(optimizer.state())
    outcome = take_step(optimizer, _of(optimizer, _filled(0.0)), 1.0, _step(1e4, **_FAST))
    assert (outcome.skipped, outcome.grad_norm) == (True, 0.0)
    assert optimizer.state().num_steps == 1
    _assert_same(copied(optimizer.state()), before)
    assert not take_step(optimizer, _of(optimizer, make_gradients(1)), 1.0, optim_step()).skipped


@_ALL
def test_squares_of_a_gradient_beyond_float32_are_skipped_where_moments_keep_them(
    dtype: torch.dtype, kind: OptimizerStates
) -> None:
    """Float32 moments were infinite ever after: weights without a step for good. The moments of
    bfloat16 weights end before that, and float64 has room."""
    optimizer = make_optimizer_of(dtype, kind)
    outcome = take_step(optimizer, _of(optimizer, _filled(1e25)), 1.0, _step(1e-3))
    assert outcome.skipped == (dtype is torch.float32)
    assert optimizer.state().is_finite()


@_ALL
@pytest.mark.parametrize("size", [1e25, 1e5])
def test_a_finite_step_that_no_bound_proves_is_taken(
    dtype: torch.dtype, kind: OptimizerStates, size: float
) -> None:
    """With the bits that it has without the question, and however loose bounds have become."""
    if dtype is torch.float32:
        size = min(size, 1e5)
    one, two, asked = (make_optimizer_of(dtype, kind) for _ in range(3))
    step = _step(1e4, weight_decay=0.0, eps=1e-30)
    norm = math.sqrt(sum(g.double().square().sum().item() for g in _filled(size).values()))
    two._bounds = StateBounds(weight=1e38, first=1e38, second=1e38)
    for optimizer in (one, two):
        assert optimizer.bounds_after(optimizer.bounds(), norm, step) is None
        assert not take_step(optimizer, _of(optimizer, _filled(size)), 1.0, step).skipped
    asked.apply(_of(asked, _filled(size)), 1.0, norm, step)
    for optimizer in (one, two):
        for name, tensor in copied(asked.state()).items():
            torch.testing.assert_close(copied(optimizer.state())[name], tensor, rtol=0, atol=0)


@_ALL
@pytest.mark.parametrize("change", ["load", "set_weights", "reset"])
def test_bounds_are_measured_anew_where_a_state_is_changed(
    dtype: torch.dtype, kind: OptimizerStates, change: str
) -> None:
    """By those of before, the step below would be far from the limit."""
    optimizer, other = (make_optimizer_of(dtype, kind) for _ in range(2))
    assert not take_step(optimizer, _of(optimizer, make_gradients(0)), 1.0, optim_step()).skipped
    assert optimizer.bounds().weight < 1e10
    far = {name: torch.full_like(like, 1.6e38) for name, like in make_gradients(0).items()}
    if change == "load":
        other.set_weights(far, adds=False, key="far")
        optimizer.load(other.state())
    else:
        optimizer.set_weights(far, adds=False, key="far")
    if change == "reset":
        optimizer.reset()
    before = copied(optimizer.state())
    # Half of the rate, upwards.
    step = _step(1e38, weight_decay=0.0, beta1=0.0, beta2=0.0, eps=1.0)
    assert StateBounds(weight=1e10, first=1e3, second=1e3).after(step, CONFIG, 2, 1.0) is None
    own = step.adamw(CONFIG)
    assert StateBounds(weight=1e10, first=1e3, second=1e3).after(step, own, 2, 1.0) is not None
    sums = {name: torch.zeros_like(g) for name, g in make_gradients(0).items()}
    next(iter(sums.values())).view(-1)[0] = -1.0
    assert take_step(optimizer, _of(optimizer, sums), 1.0, step).skipped
    _assert_same(copied(optimizer.state()), before)


@_ALL
def test_a_state_is_measured_once_and_not_at_each_step(
    dtype: torch.dtype, kind: OptimizerStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[StateBounds] = []
    measure = OptimizerState.bounds

    def spy(state: OptimizerState) -> StateBounds:
        measured.append(measure(state))
        return measured[-1]

    monkeypatch.setattr(OptimizerState, "bounds", spy)
    monkeypatch.delattr(OptimizerState, "is_finite")
    optimizer = make_optimizer_of(dtype, kind)
    for number in range(5):
        sums = _of(optimizer, make_gradients(number))
        assert not take_step(optimizer, sums, 2.0, optim_step()).skipped
    assert len(measured) == 1


@_ALL
@pytest.mark.parametrize("seed", range(2))
def test_no_state_is_larger_than_its_bounds(
    dtype: torch.dtype, kind: OptimizerStates, seed: int
) -> None:
    """Whatever the steps: their numbers are drawn anew for each, over many octaves."""
    random = np.random.default_rng(seed)
    optimizer = make_optimizer_of(dtype, kind)
    for number in range(25):
        betas = 1.0 - 10.0 ** random.uniform(-6, 0, 2)
        learning_rate = 10.0 ** random.uniform(-8, 3)
        step = OptimStep(
            learning_rate=learning_rate,
            weight_decay=random.uniform(0, 1) / learning_rate,
            max_grad_norm=10.0 ** random.uniform(-3, 3) if random.random() < 0.5 else math.inf,
            divisor=optim_step().divisor,
            beta1=betas[0],
            beta2=betas[1],
            eps=10.0 ** random.uniform(-20, 1),
            step_on_zero_gradient=True,
        )
        size = 0.0 if random.random() < 0.2 else 10.0 ** random.uniform(-20, 6)
        gradients = {name: size * g for name, g in make_gradients(number).items()}
        known = optimizer.bounds()
        assert not take_step(optimizer, _of(optimizer, gradients), 3.0, step).skipped
        bounds, truth = optimizer.bounds(), optimizer.state().bounds()
        assert known != bounds
        for name in ("weight", "first", "second"):
            # A measured bound is of bfloat16 weights, a 256th below their masters.
            assert getattr(truth, name) <= getattr(bounds, name) * (1 + 2.0**-8), (number, name)


@_ALL
def test_bounds_of_a_single_element_are_nearly_reached(
    dtype: torch.dtype, kind: OptimizerStates
) -> None:
    """From zeros, where epsilon is all that divides the first moment: roundings count then."""
    step = _step(1.0, weight_decay=0.0, eps=1.0)
    for gradient in np.linspace(1e-3, 2e-3, 16):
        optimizer = make_optimizer_of(dtype, kind)
        optimizer.set_weights(_filled(0.0), adds=False, key="zeros")
        sums = _filled(0.0)
        sums["few"][2] = gradient
        optimizer.bounds()
        assert not take_step(optimizer, _of(optimizer, sums), 1.0, step).skipped
        bounds, truth = optimizer.bounds(), optimizer.state().bounds()
        assert truth.weight <= bounds.weight <= 1.05 * truth.weight
        assert truth.first <= bounds.first <= 1.05 * truth.first
        assert truth.second <= bounds.second <= 1.05 * truth.second


@pytest.mark.parametrize("field", ["weight", "first", "second"])
def test_bounds_that_are_no_finite_numbers_prove_nothing(field: str) -> None:
    """Nor does a beta or a learning rate of 0 hide them."""
    sound = StateBounds(weight=1.0, first=1.0, second=1.0)
    broken = replace(sound, **{field: math.inf})
    for step in (optim_step(), _step(0.0, beta1=0.0, beta2=0.0)):
        config = step.adamw(CONFIG)
        assert sound.after(step, config, 1, 1.0) is not None
        assert broken.after(step, config, 1, 1.0) is None
    assert replace(sound, **{field: 1.1 * FINITE}).after(optim_step(), CONFIG, 1, 1.0) is None
    assert StateBounds.over([sound, broken]) == broken


@_ALL
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weights", math.nan),
        ("exp_avg", math.inf),
        ("exp_avg_sq", math.nan),
        ("exp_avg_sq", math.inf),
    ],
)
def test_a_state_that_is_not_finite_is_not_stepped_on(
    dtype: torch.dtype, kind: OptimizerStates, field: str, value: float
) -> None:
    """However it came about: an infinite second moment hides what it is beside. Those of bfloat16
    weights have an end, at which an infinite one is finite again."""
    optimizer = make_optimizer_of(dtype, kind)
    tensors = optimizer.state().tensors()
    scales = tensors.get(f"{field}_scale", {})
    target = scales.get("whole", tensors[field]["whole"])
    target.view(-1)[3] = value
    name = {"weights": "weight", "exp_avg": "first", "exp_avg_sq": "second"}[field]
    assert math.isinf(getattr(optimizer.bounds(), name))
    is_mended = dtype is torch.bfloat16 and (field, value) == ("exp_avg_sq", math.inf)
    outcome = take_step(optimizer, _of(optimizer, make_gradients(0)), 1.0, optim_step())
    assert outcome.skipped != is_mended
    assert optimizer.state().is_finite() == is_mended
