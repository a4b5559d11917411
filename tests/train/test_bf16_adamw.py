"""AdamW of bfloat16 parameters: it learns, repeats its bits, and is as small as said.

The reference of one step is torch's AdamW in float64 from the same state.
"""

from __future__ import annotations

import gc
import math
import statistics
from dataclasses import replace
from functools import cache
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from ratoon.errors import ErrorCode, RatoonError
from ratoon.shards.parts import parts_of
from ratoon.train.optim import bf16_state
from ratoon.train.optim.bf16_adamw import Bf16AdamW, make_optimizer
from ratoon.train.optim.rounding import decode_positive, decode_signed
from ratoon.train.spec import OptimizerStates
from ratoon_proto.types import AdamWConfig, Decay
from tests.train.optimizer_runs import (
    CONFIG,
    SPLIT,
    WITHOUT_MASTERS,
    changed_bits,
    copied,
    make_gradients,
    make_parameters,
    optim_step,
    take_step,
    toy_loss,
)

_SEEDS = range(4)
_UPDATES = 150


def _optimizer(
    kind: OptimizerStates, parameters: dict[str, nn.Parameter] | None = None, seed: int = 0
) -> Bf16AdamW:
    return Bf16AdamW(parameters or make_parameters(), CONFIG, kind, seed)


def _run(optimizer: Bf16AdamW, steps: range) -> dict[str, Tensor]:
    for number in steps:
        assert not take_step(optimizer, make_gradients(number), 2.0, optim_step()).skipped
    return copied(optimizer.state())


@pytest.mark.parametrize("kind", [OptimizerStates.BF16_SPLIT, OptimizerStates.BF16_8BIT])
def test_a_steps_own_betas_and_eps_are_as_the_policys_would_be(kind: OptimizerStates) -> None:
    own = AdamWConfig(beta1=0.5, beta2=0.99, eps=1e-4, weight_decay=CONFIG.weight_decay)
    asked = replace(optim_step(), beta1=own.beta1, beta2=own.beta2, eps=own.eps)
    by_step = Bf16AdamW(make_parameters(), CONFIG, kind, 0)
    by_policy = Bf16AdamW(make_parameters(), own, kind, 0)
    for number in range(3):
        take_step(by_step, make_gradients(number), 2.0, asked)
        take_step(by_policy, make_gradients(number), 2.0, optim_step())
    assert _same(copied(by_step.state()), copied(by_policy.state()))
    take_step(by_step, make_gradients(3), 2.0, optim_step())
    take_step(by_policy, make_gradients(3), 2.0, optim_step())
    assert not _same(copied(by_step.state()), copied(by_policy.state()))


@pytest.mark.parametrize("kind", [OptimizerStates.BF16_SPLIT, OptimizerStates.BF16_8BIT])
def test_decay_of_matrices_leaves_norms_alone(kind: OptimizerStates) -> None:
    """Each weight has the bits of a step with decay, or of one without."""
    names = ("layers.0.mlp.up_proj.weight", "layers.0.input_layernorm.weight", "q_proj.bias")

    def stepped(config: AdamWConfig, weight_decay: float) -> dict[str, Tensor]:
        values = [*make_parameters().values()]
        parameters = {name: values[0].detach().clone() for name in names}
        optimizer = Bf16AdamW(parameters, config, kind, 0)
        gradient = next(iter(make_gradients(0).values()))
        step = replace(optim_step(), weight_decay=weight_decay)
        take_step(optimizer, {name: gradient.clone() for name in names}, 2.0, step)
        return {name: weight.clone() for name, weight in optimizer.state().weights.items()}

    of_matrices = stepped(replace(CONFIG, decay=Decay.MATRICES), 0.5)
    of_all, without = stepped(CONFIG, 0.5), stepped(CONFIG, 0.0)
    assert torch.equal(of_matrices[names[0]], of_all[names[0]])
    for name in names[1:]:
        assert torch.equal(of_matrices[name], without[name])
        assert not torch.equal(of_all[name], without[name])


@pytest.mark.parametrize("kind", list(OptimizerStates))
def test_gradients_of_an_only_backward_step_as_their_float32_sums(kind: OptimizerStates) -> None:
    narrow, wide = (_optimizer(kind) for _ in range(2))
    for number in range(3):
        gradients = {name: g.bfloat16() for name, g in make_gradients(number).items()}
        sums = {name: gradient.float() for name, gradient in gradients.items()}
        outcomes = [
            take_step(o, g, 2.0, optim_step()) for o, g in ((narrow, gradients), (wide, sums))
        ]
        assert outcomes[0].grad_norm == outcomes[1].grad_norm
    assert _same(copied(narrow.state()), copied(wide.state()))


def _same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(
        one[name].dtype == two[name].dtype and torch.equal(one[name], two[name]) for name in one
    )


@cache
def _losses(kind: OptimizerStates) -> tuple[tuple[float, float], ...]:
    return tuple(toy_loss(kind, seed, _UPDATES) for seed in _SEEDS)


def _seed_noise() -> float:
    return statistics.stdev(after for _, after in _losses(OptimizerStates.FP32))


def _shift(runs: tuple[tuple[float, float], ...]) -> float:
    """Mean over seeds of the final loss against that of float32 states."""
    pairs = zip(runs, _losses(OptimizerStates.FP32), strict=True)
    return statistics.mean(mine[1] - theirs[1] for mine, theirs in pairs)


@pytest.mark.parametrize("kind", WITHOUT_MASTERS + SPLIT)
def test_training_ends_within_the_seed_noise_of_float32_states(kind: OptimizerStates) -> None:
    runs = _losses(kind)
    assert all(after < 0.5 * before for before, after in runs)
    assert abs(_shift(runs)) <= _seed_noise()


@pytest.mark.parametrize("kind", WITHOUT_MASTERS)
@pytest.mark.more
def test_rounding_to_nearest_would_fail_the_bound(
    kind: OptimizerStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most updates are below half an ulp of their weight: to nearest, they are lost."""
    monkeypatch.setattr(bf16_state, "round_bf16", lambda x, _words: x.to(torch.bfloat16))
    runs = tuple(toy_loss(kind, seed, _UPDATES) for seed in _SEEDS)
    assert _shift(runs) > 5 * _seed_noise()


def test_one_step_is_torchs_adamw_up_to_rounding() -> None:
    """Two steps with a schedule, from the same state each: all neighbours of the exact values."""
    parameters = make_parameters()
    optimizer = _optimizer(OptimizerStates.BF16_8BIT, parameters)
    for number, (rate, decay, limit) in enumerate([(1e-2, 0.1, 0.5), (3e-3, 0.0, math.inf)]):
        exact = {n: nn.Parameter(p.detach().double()) for n, p in parameters.items()}
        adamw = torch.optim.AdamW(
            exact.values(), lr=rate, betas=(CONFIG.beta1, CONFIG.beta2), weight_decay=decay
        )
        for name, parameter in exact.items():
            adamw.state[parameter] = _moments(optimizer, name, number)
            parameter.grad = make_gradients(number)[name].double() / 4.0
        norm = nn.utils.clip_grad_norm_(exact.values(), limit)
        adamw.step()
        step = optim_step(rate, weight_decay=decay, max_grad_norm=limit)
        outcome = take_step(optimizer, make_gradients(number), 4.0, step)
        assert outcome.grad_norm == pytest.approx(norm.item(), rel=1e-6)
        for name, parameter in exact.items():
            # An ulp of bfloat16 is at most 2**-7 of the value, a step of the codes 2**-3.
            moments = _moments(optimizer, name, number)
            coarse = 2.0**-3 if name == "whole" else 2.0**-7
            _assert_near(parameters[name].detach(), parameter.detach(), 2.0**-7)
            for key in ("exp_avg", "exp_avg_sq"):
                _assert_near(moments[key], adamw.state[parameter][key], coarse)


def _moments(optimizer: Bf16AdamW, name: str, number: int) -> dict[str, Tensor]:
    """What `optimizer` keeps of a parameter, as the state of torch's AdamW."""
    state = optimizer.state()
    m, v = state.exp_avg[name], state.exp_avg_sq[name]
    if name in state.exp_avg_scale:
        shape = m.shape
        m = decode_signed(m.view(-1), state.exp_avg_scale[name]).view(shape)
        v = decode_positive(v.view(-1), state.exp_avg_sq_scale[name]).view(shape)
    return {"step": torch.tensor(float(number)), "exp_avg": m.double(), "exp_avg_sq": v.double()}


def _assert_near(got: Tensor, exact: Tensor, relative: float) -> None:
    """Within one step of the format; what is 2**-16 below a block's largest is its floor."""
    floor = 2.0**-15 * exact.abs().max()
    assert ((got.double() - exact).abs() <= relative * exact.abs() * (1 + 1e-5) + floor).all()


def test_each_element_step_and_parameter_rounds_on_its_own() -> None:
    """Equal weights under equal gradients spread over two neighbours, each time anew."""
    count = 1 << 16
    ups: list[Tensor] = []
    for seed, name in ((0, "a"), (0, "b"), (1, "a")):
        weight = nn.Parameter(torch.ones(count, dtype=torch.bfloat16))
        optimizer = _optimizer(OptimizerStates.BF16_8BIT, {name: weight}, seed)
        for _ in range(2):
            with torch.no_grad():
                weight.fill_(1.0)
            step = optim_step(1e-3, weight_decay=0.0)
            take_step(optimizer, {name: torch.full((count,), -1.0)}, 1.0, step)
            is_up = (weight.detach() > 1.0).double()
            # An update of 1e-3 (both bias corrections are exact here) is 0.128 of an ulp of 2**-7.
            assert is_up.mean().item() == pytest.approx(0.128, abs=0.01)
            ups.append((is_up - is_up.mean()) / is_up.std())
    correlations = torch.stack(ups) @ torch.stack(ups).T / count - torch.eye(len(ups))
    assert correlations.abs().max() < 5 / math.sqrt(count)
    neighbours = (ups[0] * ups[0].roll(1)).mean()
    assert neighbours.abs() < 5 / math.sqrt(count)


@pytest.mark.parametrize("kind", list(OptimizerStates))
def test_a_step_done_again_has_the_same_bits_and_leaves_the_generator(
    kind: OptimizerStates,
) -> None:
    """A worker that died replays from a checkpoint; what else drew random numbers is no matter."""
    straight = _optimizer(kind)
    middle = _run(straight, range(2))
    resumed = _optimizer(kind, {n: nn.Parameter(p) for n, p in make_parameters(9).items()})
    resumed.load(straight.state())
    assert _same(copied(resumed.state()), middle)
    generator = torch.get_rng_state()
    ended = _run(straight, range(2, 4))
    assert torch.equal(torch.get_rng_state(), generator)
    torch.manual_seed(5)
    assert _same(_run(resumed, range(2, 4)), ended)
    other = _optimizer(kind, seed=1)
    is_exact = kind in (OptimizerStates.FP32, OptimizerStates.BF16_SPLIT)
    assert _same(_run(other, range(4)), ended) == is_exact


@pytest.mark.parametrize("kind", list(OptimizerStates))
def test_weights_that_change_are_counted(kind: OptimizerStates) -> None:
    parameters = make_parameters()
    optimizer = _optimizer(kind, parameters)
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    asked = replace(optim_step(1e-5), changed_share=True)
    outcome = take_step(optimizer, make_gradients(0), 2.0, asked)
    assert changed_bits(before, parameters) == int(cast("Tensor", outcome.changed))
    total = sum(parameter.numel() for parameter in parameters.values())
    assert 0 < int(cast("Tensor", outcome.changed)) < total


@pytest.mark.parametrize("kind", list(OptimizerStates))
def test_parts_change_no_bit(kind: OptimizerStates) -> None:
    """Whoever has them, without a clip: only a norm's last bits are those of its blocks."""

    def run(part: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(3)
        shapes = {"large": (80, 128), "few": (7,)}
        parameters = {
            name: nn.Parameter(torch.randn(shape, generator=generator).to(torch.bfloat16))
            for name, shape in shapes.items()
        }
        parts = parts_of(parameters, part)
        assert len(parts) == (2 if part > 10_240 else 3)
        own = {one.name: one.of(parameters[one.parameter]) for one in parts}
        optimizer = Bf16AdamW(own, CONFIG, kind, 0)
        for _ in range(3):
            sums = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
            of_parts = {one.name: one.of(sums[one.parameter]) for one in parts}
            assert not take_step(
                optimizer, of_parts, 2.0, optim_step(max_grad_norm=math.inf)
            ).skipped
        return {name: parameter.detach() for name, parameter in parameters.items()}

    assert _same(run(5120), run(1 << 25))


@pytest.mark.parametrize("kind", list(OptimizerStates))
@pytest.mark.parametrize("bad", [math.nan, 3e38])
def test_a_gradient_that_is_not_finite_touches_nothing(kind: OptimizerStates, bad: float) -> None:
    """3e38 divided by 1/2 has no float32 either."""
    optimizer = _optimizer(kind)
    before = _run(optimizer, range(2))
    sums = make_gradients(2)
    sums["broken"][3, 5] = bad
    outcome = take_step(optimizer, sums, 0.5, optim_step())
    assert outcome.skipped
    assert not math.isfinite(outcome.grad_norm)
    assert _same(copied(optimizer.state()), before)
    assert optimizer.state().num_steps == 2
    # A step was not counted: the next is the one that a run without the bad one takes.
    undisturbed = _optimizer(kind)
    _run(undisturbed, range(2))
    assert _same(_run(optimizer, range(3, 4)), _run(undisturbed, range(3, 4)))


@pytest.mark.parametrize("kind", list(OptimizerStates))
def test_huge_gradients_leave_the_states_finite(kind: OptimizerStates) -> None:
    """The square of 1e30 is no float32; unclipped, such an element stands still."""
    optimizer = _optimizer(kind)
    sums = {name: 1e30 * gradient for name, gradient in make_gradients(0).items()}
    for _ in range(2):
        assert not take_step(optimizer, sums, 1.0, optim_step(max_grad_norm=math.inf)).skipped
    for name, tensor in copied(optimizer.state()).items():
        assert tensor.float().isfinite().all(), name


@pytest.mark.parametrize(
    ("kind", "per_parameter"),
    [
        (OptimizerStates.FP32, 4 + 4 + 4),
        (OptimizerStates.BF16_SPLIT, 2 + 4 + 4),
        (OptimizerStates.BF16_SPLIT_8BIT, 2 + 1 + 1 + 2 * 4 / 256),
        (OptimizerStates.BF16_STOCHASTIC, 2 + 2),
        (OptimizerStates.BF16_8BIT, 1 + 1 + 2 * 4 / 256),
    ],
)
def test_bytes_beside_the_weights_are_as_documented(
    kind: OptimizerStates, per_parameter: float
) -> None:
    """All tensors that an optimizer keeps alive, beyond a few numbers (docs/decisions/0008)."""
    count = 1 << 20
    parameters = {"a": nn.Parameter(torch.ones(1024, 1024, dtype=torch.bfloat16))}
    sums = {"a": torch.full((1024, 1024), 0.1)}
    before = _live_bytes()
    optimizer = make_optimizer(parameters, CONFIG, kind, 0)
    take_step(optimizer, sums, 1.0, optim_step())
    grown = _live_bytes() - before
    assert count * per_parameter <= grown <= count * per_parameter + 4096


def _live_bytes() -> int:
    gc.collect()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        # Not the fake ones that a compiler leaves: they have no bytes.
        if type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu"
    }
    return sum(storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_that_are_not_bfloat16_are_refused(dtype: torch.dtype) -> None:
    kind = OptimizerStates.BF16_SPLIT
    with pytest.raises(RatoonError, match="wide") as caught:
        _optimizer(kind, {"wide": nn.Parameter(torch.ones(3, dtype=dtype))})
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert caught.value.field == "optimizer_states"


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_8bit_second_moments_follow_the_exact_ones(beta2: float) -> None:
    """Roundings do not pile up however long the memory: their mean is right, their spread bounded.

    The spread is that of beta2 = 0.95 itself, sqrt(2 (1 - beta2) / (1 + beta2)) = 0.23.
    """
    config = AdamWConfig(beta2=beta2)
    count = 1 << 14
    generator = torch.Generator().manual_seed(0)
    size = torch.exp(torch.randn(count, generator=generator))
    weight = nn.Parameter(torch.zeros(count, dtype=torch.bfloat16))
    optimizer = Bf16AdamW({"a": weight}, config, OptimizerStates.BF16_8BIT, 0)
    exact = torch.zeros(count, dtype=torch.float64)
    for _ in range(600):
        gradient = size * torch.randn(count, generator=generator)
        take_step(optimizer, {"a": gradient}, 1.0, optim_step(max_grad_norm=math.inf))
        exact.mul_(beta2).add_(gradient.double().square(), alpha=1 - beta2)
    state = optimizer.state()
    ratio = decode_positive(state.exp_avg_sq["a"], state.exp_avg_sq_scale["a"]) / exact
    assert ratio.mean().item() == pytest.approx(1.0, abs=0.02)
    assert ratio.std().item() < 0.25
