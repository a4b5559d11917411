"""Weights that an optimizer is given: every kind of states takes them, or is left as it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ratoon.errors import RatoonError
from ratoon.train.optim.adamw import MasterAdamW
from ratoon.train.optim.bf16_adamw import Bf16AdamW
from ratoon.train.spec import OptimizerStates
from tests.train.optimizer_runs import (
    CONFIG,
    WITHOUT_MASTERS,
    copied,
    make_gradients,
    make_parameters,
    masters_of,
    moments_of,
    optim_step,
    take_step,
)
from tests.train.trainer_runs import assert_equal


def random_values(seed: int) -> dict[str, Tensor]:
    """float32, of `make_parameters`'s shapes."""
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(p.shape, generator=generator) for n, p in make_parameters().items()}


def stepped(kind: OptimizerStates, seed: int = 0) -> Bf16AdamW:
    optimizer = Bf16AdamW(make_parameters(), CONFIG, kind, seed)
    for number in range(2):
        take_step(optimizer, make_gradients(number), 1.0, optim_step())
    return optimizer


def assert_neighbours(got: Tensor, exact: Tensor) -> None:
    """bfloat16 values on either side of float32 ones, less than one apart."""
    up = torch.nextafter(got.bfloat16(), torch.tensor(torch.inf, dtype=torch.bfloat16)).float()
    down = torch.nextafter(got.bfloat16(), torch.tensor(-torch.inf, dtype=torch.bfloat16)).float()
    assert torch.all((down < exact) & (exact < up))


@pytest.mark.parametrize("kind", list(OptimizerStates))
@pytest.mark.parametrize("adds", [False, True])
def test_each_kind_of_states_takes_float32_values(kind: OptimizerStates, adds: bool) -> None:
    """Masters unrounded; what has none on either side. Moments and steps stay, and go on."""
    optimizer, values = stepped(kind), random_values(3)
    before, moments = masters_of(optimizer.state()), moments_of(optimizer.state())
    optimizer.set_weights(values, adds=adds, key="import 3")
    state = optimizer.state()
    for name, master in masters_of(state).items():
        exact = before[name] + values[name] if adds else values[name]
        if kind in WITHOUT_MASTERS:
            assert_neighbours(master, exact)
            assert not torch.equal(master, exact)
        else:
            assert torch.equal(master, exact)
    assert_equal(moments_of(state), moments)
    assert state.num_steps == 2
    # And the next step is that of one that was given these weights by a checkpoint.
    other = Bf16AdamW(make_parameters(9), CONFIG, kind, 0)
    other.load(state)
    for one in (optimizer, other):
        take_step(one, make_gradients(5), 1.0, optim_step())
    assert_equal(copied(optimizer.state()), copied(other.state()))


@pytest.mark.parametrize("kind", list(OptimizerStates))
def test_the_parameters_of_the_model_are_what_is_set(kind: OptimizerStates) -> None:
    parameters, values = make_parameters(), random_values(4)
    optimizer = Bf16AdamW(parameters, CONFIG, kind, 0)
    optimizer.set_weights(values, adds=False, key="import 1")
    for name, parameter in parameters.items():
        assert_neighbours(parameter.detach().float(), values[name])
    coarse = {name: value.bfloat16() for name, value in values.items()}
    optimizer.set_weights(coarse, adds=False, key="import 2")
    assert_equal({name: p.detach() for name, p in parameters.items()}, coarse)


@pytest.mark.parametrize("kind", WITHOUT_MASTERS)
def test_rounding_is_right_in_the_mean_and_the_same_again(kind: OptimizerStates) -> None:
    """A delta far below an ulp would be lost to the nearest value each time."""

    def added(key: str) -> dict[str, Tensor]:
        parameters = make_parameters()
        for parameter in parameters.values():
            parameter.data.fill_(1.0)
        optimizer = Bf16AdamW(parameters, CONFIG, kind, 0)
        delta = {name: torch.full(p.shape, 2.0**-10) for name, p in parameters.items()}
        optimizer.set_weights(delta, adds=True, key=key)
        return {name: weight.clone() for name, weight in optimizer.state().weights.items()}

    one, other = added("import 1"), added("import 2")
    assert_equal(one, added("import 1"))
    assert not torch.equal(one["whole"], other["whole"])
    # An ulp is 2**-7: one in eight rounds up.
    mean = float((one["whole"].float() - 1.0).mean())
    assert mean == pytest.approx(2.0**-10, rel=0.2)


@pytest.mark.parametrize("kind", list(OptimizerStates))
def test_reset_begins_the_optimizer_anew(kind: OptimizerStates) -> None:
    optimizer = stepped(kind)
    before = masters_of(optimizer.state())
    optimizer.reset()
    fresh = Bf16AdamW(make_parameters(), CONFIG, kind, 0)
    assert_equal(moments_of(optimizer.state()), moments_of(fresh.state()))
    assert optimizer.state().num_steps == 0
    assert_equal(masters_of(optimizer.state()), before)


def test_masters_that_are_the_parameters_are_set_added_to_and_reset() -> None:
    parameters = {
        name: torch.nn.Parameter(p.detach().float()) for name, p in make_parameters().items()
    }
    optimizer = MasterAdamW(parameters, CONFIG)
    take_step(optimizer, make_gradients(0), 1.0, optim_step())
    moments, values = moments_of(optimizer.state()), random_values(1)
    optimizer.set_weights(values, adds=False, key="")
    assert_equal({name: p.detach() for name, p in parameters.items()}, values)
    optimizer.set_weights(values, adds=True, key="")
    assert_equal(
        {name: p.detach() for name, p in parameters.items()}, {n: v + v for n, v in values.items()}
    )
    assert_equal(moments_of(optimizer.state()), moments)
    assert optimizer.state().num_steps == 1
    optimizer.reset()
    fresh = MasterAdamW(parameters, CONFIG)
    for one in (optimizer, fresh):
        take_step(one, make_gradients(1), 1.0, optim_step())
    assert_equal(moments_of(optimizer.state()), moments_of(fresh.state()))


@pytest.mark.parametrize("kind", [*OptimizerStates, None])
@pytest.mark.parametrize("bad", [3.0e38, torch.inf, torch.nan])
def test_a_sum_that_is_not_finite_changes_nothing(kind: OptimizerStates | None, bad: float) -> None:
    """In the last element of the last tensor."""
    if kind is None:
        wide = {n: torch.nn.Parameter(p.detach().float()) for n, p in make_parameters().items()}
        optimizer = MasterAdamW(wide, CONFIG)
    else:
        optimizer = stepped(kind)
    values = random_values(2)
    list(values.values())[-1][-1] = bad
    before = copied(optimizer.state())
    with pytest.raises(RatoonError) as refused:
        optimizer.check_sums(values)
    assert refused.value.field == f"weights[{list(values)[-1]}]"
    assert_equal(copied(optimizer.state()), before)
