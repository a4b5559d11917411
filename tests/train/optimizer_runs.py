"""A toy policy of bfloat16 weights and its training: shared by the tests of optimizer states.

In: a kind of states and a seed. Out: the optimizer, the loss on held-out data. Invariant: the same
arguments give the same run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ratoon.train.loss.spec import NoDivisor, OptimStep
from ratoon.train.optim.adamw import Optimizer, block_norms, norm_of_blocks
from ratoon.train.optim.bf16_adamw import make_optimizer
from ratoon.train.optim.rounding import join_float32
from ratoon.train.optim.state import OptimizerState
from ratoon.train.spec import OptimizerStates
from ratoon_proto.types import AdamWConfig

CONFIG = AdamWConfig(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.01)
# Whose bfloat16 weights are all there is.
WITHOUT_MASTERS = (OptimizerStates.BF16_STOCHASTIC, OptimizerStates.BF16_8BIT)
SPLIT = (OptimizerStates.BF16_SPLIT, OptimizerStates.BF16_SPLIT_8BIT)
_WIDTH = 64
_BATCH = 64


def optim_step(
    learning_rate: float = 1e-3, *, weight_decay: float = 0.01, max_grad_norm: float = 1.0
) -> OptimStep:
    return OptimStep(
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
        divisor=NoDivisor(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What became of a step. `grad_norm`: before clipping; `changed`: bfloat16 weights, counted."""

    grad_norm: float
    skipped: bool
    changed: Tensor | None = None


def global_norm(gradients: Iterable[Tensor]) -> float:
    """Norm over all elements of all tensors, as ranks measure it together."""
    tensors = list(gradients)
    return norm_of_blocks(lambda exactly: block_norms(tensors, exactly=exactly))


def take_step(
    optimizer: Optimizer, sums: Mapping[str, Tensor], divisor: float, step: OptimStep
) -> Taken:
    """Judge and take a step of one optimizer that has all parameters, as `optimizer_step` does for
    ranks. May change `sums`."""
    norm = global_norm(sums.values()) / divisor
    norm = math.inf if norm > optimizer.max_norm else norm
    is_safe = math.isfinite(norm) and (
        optimizer.bounds_after(optimizer.bounds(), norm, step) is not None
        or optimizer.stays_finite(sums, divisor, norm, step)
    )
    if not is_safe:
        return Taken(grad_norm=norm, skipped=True)
    changed = optimizer.apply(sums, divisor, norm, step)
    return Taken(grad_norm=norm, skipped=False, changed=changed)


def make_parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    """bfloat16: with whole blocks, with a broken one, and few."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"whole": (40, 128), "broken": (37, 131), "few": (7,)}
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(torch.bfloat16))
        for name, shape in shapes.items()
    }


def make_optimizer_of(
    dtype: torch.dtype, kind: OptimizerStates, device: torch.device | None = None
) -> Optimizer:
    """The parameters of `make_parameters` in another dtype, or on another device."""
    parameters = {
        name: nn.Parameter(parameter.detach().to(device or "cpu", dtype))
        for name, parameter in make_parameters().items()
    }
    return make_optimizer(parameters, CONFIG, kind, 0)


def make_gradients(seed: int) -> dict[str, Tensor]:
    """float32, of `make_parameters`'s shapes; magnitudes differ by 1e6."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return {
        name: torch.randn(p.shape, generator=generator)
        * torch.exp(3 * torch.randn(p.shape, generator=generator))
        for name, p in make_parameters().items()
    }


def copied(state: OptimizerState) -> dict[str, Tensor]:
    return {
        f"{field}/{name}": tensor.clone()
        for field, tensors in state.tensors().items()
        for name, tensor in tensors.items()
    }


def changed_bits(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> int:
    """Elements of bfloat16 tensors of the same names that are not the same."""
    return sum(
        int((before[name].view(torch.int16) != after[name].detach().view(torch.int16)).sum())
        for name in before
    )


def masters_of(state: OptimizerState) -> dict[str, Tensor]:
    """float32, of any kind of states."""
    return {
        name: join_float32(weight.view(torch.int16), state.weight_remainder[name])
        if name in state.weight_remainder
        else weight.float().clone()
        for name, weight in state.weights.items()
    }


def moments_of(state: OptimizerState) -> dict[str, Tensor]:
    return {n: t for n, t in copied(state).items() if not n.startswith("weight")}


def toy_loss(kind: OptimizerStates, seed: int, num_updates: int) -> tuple[float, float]:
    """Held-out loss before and after regressing onto a random two-layer teacher, with noise."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def data(count: int) -> tuple[Tensor, Tensor]:
        x = normal(count, _WIDTH)
        return x, torch.tanh(x @ teacher[0]) @ teacher[1] + 0.3 * normal(count, _WIDTH)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(x @ student["in"].float())
        return (hidden @ student["out"].float() - y).square().mean()

    spread = 1 / math.sqrt(_WIDTH)
    teacher = [spread * normal(_WIDTH, _WIDTH) for _ in range(2)]
    student = {
        name: nn.Parameter((weight + spread / 2 * normal(_WIDTH, _WIDTH)).to(torch.bfloat16))
        for name, weight in zip(("in", "out"), teacher, strict=True)
    }
    held_out = data(1024)
    optimizer = make_optimizer(student, CONFIG, kind, seed)
    before = loss(*held_out).item()
    for _ in range(num_updates):
        loss(*data(_BATCH)).backward()
        sums = {name: _grad(parameter).float() for name, parameter in student.items()}
        assert not take_step(optimizer, sums, 1.0, optim_step(5e-4)).skipped
        for parameter in student.values():
            parameter.grad = None
    return before, loss(*held_out).item()


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
