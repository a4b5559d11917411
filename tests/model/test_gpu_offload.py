"""Activations on the host of a GPU: copies that lag behind compute, and what they leave of memory.

The layers do next to nothing to large tensors, so that compute is always ahead of the copies: what
does not wait for one, where it must, finds other bits.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ratoon.model.offload import HostOffload

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
NUM_LAYERS = 16
FEATURES = 64
# 64 MiB in float32.
ROWS = 2**18
LAYER_BYTES = 2 * ROWS * FEATURES * 4


class _Layer(nn.Module):
    """Saves its input and its tangent."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((FEATURES,), 0.1 * (index + 1), device=DEVICE))

    def forward(self, x: Tensor) -> Tensor:
        return x.sin() + (x * self.shift).tanh()


def _run(layers: list[_Layer], x: Tensor, offload: HostOffload | None) -> Tensor:
    for index, layer in enumerate(layers):
        if offload is None:
            x = layer(x)
        else:
            is_last = index + 1 == len(layers)
            with offload.layer(index, layer.parameters(), is_last=is_last):
                x = layer(x)
    return x


def _gradients(layers: list[_Layer], out: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(out.sum(), [layer.shift for layer in layers]))


def _input(seed: int, rows: int = ROWS) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(rows, FEATURES, generator=generator, device=DEVICE)


def test_nested_forwards_find_their_bits_and_nobody_waits() -> None:
    """Sibling after sibling below one that waits; in the second round nothing is allocated."""
    layers, offload = [_Layer(index) for index in range(NUM_LAYERS)], HostOffload(DEVICE)
    inputs = [_input(seed, ROWS >> seed) for seed in range(4)]
    expected = [_gradients(layers, _run(layers, x, None)) for x in inputs]
    for is_warm in (False, True):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if is_warm else "default")
        try:
            outer, middle = (_run(layers, x, offload) for x in inputs[:2])
            leaves = [_gradients(layers, _run(layers, x, offload)) for x in inputs[2:]]
            got = [_gradients(layers, outer), _gradients(layers, middle), *leaves]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for mine, truth in zip(got, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, truth, strict=True))
        assert offload.held_bytes == 0


def test_what_waits_is_not_on_the_device() -> None:
    """Nor are the allocator's blocks, though the host is ahead of every copy."""
    layers, offload = [_Layer(index) for index in range(NUM_LAYERS)], HostOffload(DEVICE)
    _gradients(layers, _run(layers, _input(0), offload))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    out = _run(layers, _input(0), offload)
    assert offload.held_bytes == NUM_LAYERS * LAYER_BYTES
    _gradients(layers, out)
    # Two layers, and what a layer works with: its results, their gradients.
    assert torch.cuda.max_memory_reserved() - before < 8 * LAYER_BYTES


def test_a_backward_that_was_given_up_leaves_memory_that_can_be_used() -> None:
    """While copies to the device are under way, the memory they were to fill is free again."""
    layers, offload = [_Layer(index) for index in range(NUM_LAYERS)], HostOffload(DEVICE)
    x, others = _input(0), list(range(20))
    expected = _gradients(layers, _run(layers, x, None))
    random.Random(0).shuffle(others)

    class GivenUpError(Exception):
        pass

    def give_up(_grad: Tensor) -> None:
        raise GivenUpError

    for value in others:
        handle = layers[3].register_forward_hook(lambda *called: _hooked(called[-1], give_up))
        out = _run(layers, x, offload)
        handle.remove()
        with pytest.raises(GivenUpError):
            _gradients(layers, out)
        del out
        filled = [torch.full((ROWS, FEATURES), float(value), device=DEVICE) for _ in range(4)]
        torch.cuda.synchronize()
        assert all(bool((tensor == value).all()) for tensor in filled)
    got = _gradients(layers, _run(layers, x, offload))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert offload.held_bytes == 0


def _hooked(result: Tensor, hook: Callable[[Tensor], None]) -> Tensor:
    """Whose gradient the hook sees before what made it runs backward."""
    result.register_hook(hook)
    return result
