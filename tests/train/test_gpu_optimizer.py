"""Optimizer steps on a GPU: compiled and fused ones against those of the CPU, and their bits."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from ratoon.train.config import OptimizerStates
from ratoon.train.narrow_adamw import NarrowAdamW
from ratoon.train.optimizer_choice import Optimizer, make_optimizer
from ratoon.train.rounding import decode_positive, decode_signed
from tests.train.optimizer_runs import (
    CONFIG,
    NARROW,
    copied,
    make_gradients,
    make_parameters,
    optim_step,
)

pytestmark = pytest.mark.gpu

_DEVICE = torch.device("cuda")


def _optimizer(kind: OptimizerStates, device: torch.device) -> Optimizer:
    parameters = {n: nn.Parameter(p.detach().to(device)) for n, p in make_parameters().items()}
    return make_optimizer(parameters, CONFIG, kind, 0)


def _run(optimizer: Optimizer, device: torch.device, steps: range) -> dict[str, Tensor]:
    for number in steps:
        sums = {name: gradient.to(device) for name, gradient in make_gradients(number).items()}
        assert not optimizer.step(sums, 2.0, optim_step()).skipped
    return copied(optimizer.state())


@pytest.mark.parametrize("kind", list(OptimizerStates))
def test_steps_repeat_their_bits(kind: OptimizerStates) -> None:
    runs = [_run(_optimizer(kind, _DEVICE), _DEVICE, range(3)) for _ in range(2)]
    for name, tensor in runs[0].items():
        assert torch.equal(tensor, runs[1][name]), name


def test_fused_step_of_masters_equals_the_loop_of_the_cpu() -> None:
    gpu = _run(_optimizer(OptimizerStates.FP32, _DEVICE), _DEVICE, range(4))
    cpu = _run(_optimizer(OptimizerStates.FP32, torch.device("cpu")), torch.device("cpu"), range(4))
    for name, tensor in gpu.items():
        torch.testing.assert_close(tensor.cpu(), cpu[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", NARROW)
def test_compiled_step_takes_the_roundings_of_the_cpu(kind: OptimizerStates) -> None:
    """The same words: what differs is where float32 results differ in their last bits."""
    gpu = _run(_optimizer(kind, _DEVICE), _DEVICE, range(1))
    cpu = _run(_optimizer(kind, torch.device("cpu")), torch.device("cpu"), range(1))
    for name, tensor in gpu.items():
        if tensor.dtype is torch.float32:
            torch.testing.assert_close(tensor.cpu(), cpu[name], rtol=1e-5, atol=0)
            continue
        difference = (tensor.cpu().double() - cpu[name].double()).abs()
        assert (difference > 0).double().mean().item() <= 0.01, name
        if tensor.dtype is torch.uint8:
            # The neighbouring code, or the other sign of a zero.
            assert set(difference.unique().tolist()) <= {0.0, 1.0, 128.0}, name
        else:
            assert (difference <= 2.0**-7 * cpu[name].double().abs()).all(), name


def test_8bit_moments_decode_alike_on_both_devices() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    scales = torch.tensor([3.7])
    for decode in (decode_signed, decode_positive):
        assert torch.equal(decode(codes.cuda(), scales.cuda()).cpu(), decode(codes, scales))


@pytest.mark.parametrize("kind", list(OptimizerStates))
def test_a_step_waits_for_the_device_once(kind: OptimizerStates) -> None:
    """For the norm, which decides whether there is a step."""
    optimizer = _optimizer(kind, _DEVICE)
    _run(optimizer, _DEVICE, range(1))
    sums = {name: gradient.cuda() for name, gradient in make_gradients(1).items()}
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            optimizer.step(sums, 2.0, optim_step())
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [str(w.message) for w in caught if str(w.message).startswith("called a synchronizing")]
    assert len(waits) == 1, waits


def test_a_step_needs_little_memory_beside_its_states() -> None:
    """Of 2**27 weights a float32 copy is 512 MiB; the norm widens a quarter of them at a time."""
    count = 1 << 27
    weight = nn.Parameter(torch.ones(count, dtype=torch.bfloat16, device=_DEVICE))
    sums = {"a": torch.full((count,), 0.1, device=_DEVICE)}
    optimizer = NarrowAdamW({"a": weight}, CONFIG, OptimizerStates.BF16_8BIT, 0)
    for _ in range(3):
        # The first ones compile, and time their kernels on copies.
        optimizer.step(sums, 1.0, optim_step())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step(sums, 1.0, optim_step())
    assert torch.cuda.max_memory_allocated() - before <= 320 * 2**20
