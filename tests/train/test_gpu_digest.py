"""Digests of states on a GPU: those of the CPU, to the bit, and quick."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from ratoon.train.optim.bf16_adamw import make_optimizer
from ratoon.train.optim.digest import StateDigest
from ratoon.train.optim.state import OptimizerState
from ratoon.train.spec import OptimizerStates
from tests.train.optimizer_runs import (
    CONFIG,
    make_gradients,
    make_parameters,
    optim_step,
    take_step,
)

pytestmark = pytest.mark.gpu

_DEVICE, _HOST = torch.device("cuda"), torch.device("cpu")


def _state(kind: OptimizerStates) -> OptimizerState:
    parameters = {n: nn.Parameter(p.detach().to(_DEVICE)) for n, p in make_parameters().items()}
    optimizer = make_optimizer(parameters, CONFIG, kind, 0)
    for number in range(2):
        sums = {name: gradient.to(_DEVICE) for name, gradient in make_gradients(number).items()}
        assert not take_step(optimizer, sums, 2.0, optim_step()).skipped
    return optimizer.state()


def _on_host(state: OptimizerState) -> OptimizerState:
    tensors = state.tensors()
    fields = {f: {n: t.cpu() for n, t in found.items()} for f, found in tensors.items()}
    return replace(state, **fields)


@pytest.mark.parametrize("kind", list(OptimizerStates))
def test_digest_is_that_of_the_host(kind: OptimizerStates) -> None:
    state = _state(kind)
    digest = StateDigest(_HOST).of(_on_host(state))
    device = StateDigest(_DEVICE)
    assert device.of(state) == digest
    # And of a state that lies on the host, moved in parts.
    assert device.of(_on_host(state)) == digest


def test_one_bit_changes_it() -> None:
    state, device = _state(OptimizerStates.BF16_STOCHASTIC), StateDigest(_DEVICE)
    before = device.of(state)
    tensor = next(iter(state.exp_avg_sq.values())).view(torch.int16).view(-1)
    tensor[-1] ^= 1
    assert device.of(state) != before
    tensor[-1] ^= 1
    assert device.of(state) == before


def test_digest_of_a_billion_elements_is_quick() -> None:
    """2 GiB of weights, as much of either moment: at a tenth of the memory's speed at least."""
    names = [f"w{number}" for number in range(8)]
    tensors = [{n: torch.ones(1 << 27, dtype=torch.bfloat16, device=_DEVICE) for n in names}]
    tensors += [{n: t.clone() for n, t in tensors[0].items()} for _ in range(2)]
    state = OptimizerState(
        kind=OptimizerStates.BF16_STOCHASTIC,
        weights=tensors[0],
        weight_remainder={},
        exp_avg=tensors[1],
        exp_avg_sq=tensors[2],
        exp_avg_scale={},
        exp_avg_sq_scale={},
        num_steps=1,
    )
    digest = StateDigest(_DEVICE)
    digest.of(state)
    seconds: list[float] = []
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        digest.of(state)
        seconds.append(time.perf_counter() - started)
    num_bytes = 3 * 2 * len(names) << 27
    print(f"digest: {num_bytes / min(seconds) / 1e9:.0f} GB/s")
    assert num_bytes / min(seconds) > 300e9
