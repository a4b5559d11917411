"""Activations on the host: the same gradients, where the bytes are and when they go."""

import torch
from torch import Tensor, nn

from ratoon.model.offload import HostOffload

CPU = torch.device("cpu")


def _layers() -> list[nn.Sequential]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [
            nn.Sequential(nn.Linear(8, 8, bias=False), nn.SiLU(), nn.Linear(8, 8, bias=False))
            for _ in range(3)
        ]


def _run(layers: list[nn.Sequential], x: Tensor, offload: HostOffload | None) -> Tensor:
    if offload is not None:
        offload.begin()
    for index, layer in enumerate(layers):
        if offload is None:
            x = layer(x)
        else:
            with offload.layer(index, layer.parameters()):
                x = layer(x)
    return x


def _gradients(layers: list[nn.Sequential], out: Tensor) -> list[Tensor]:
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    return list(torch.autograd.grad(out.square().sum(), parameters))


def test_gradients_are_the_same_bits() -> None:
    layers, x = _layers(), torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    expected = _gradients(layers, _run(layers, x, None))
    offload = HostOffload(CPU, min_bytes=1)
    for _ in range(2):
        got = _gradients(layers, _run(layers, x, offload))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        assert all(grad.count_nonzero() > 0 for grad in got)


def test_weights_and_small_tensors_stay_and_a_tensor_goes_once() -> None:
    layers, x = _layers(), torch.ones(5, 8)
    offload = HostOffload(CPU, min_bytes=1)
    _run(layers, x, offload)
    # Of each layer: its input, and the inputs of SiLU and of the second product.
    assert offload.held_bytes == 3 * 3 * x.numel() * 4
    offload.begin()
    assert offload.held_bytes == 0
    stays = HostOffload(CPU, min_bytes=x.numel() * 4 + 1)
    _run(layers, x, stays)
    assert stays.held_bytes == 0


def test_a_layers_bytes_go_once_the_one_below_runs_backward() -> None:
    layers, x = _layers(), torch.ones(5, 8)
    offload = HostOffload(CPU, min_bytes=1)
    out = _run(layers, x, offload)
    whole = offload.held_bytes
    held: list[int] = []
    for layer in layers:
        layer.register_full_backward_hook(lambda *_: held.append(offload.held_bytes))
    out = _run(layers, x.requires_grad_(), offload)
    out.sum().backward()
    assert held == [whole, whole * 2 // 3, whole // 3]
    offload.begin()
    assert offload.held_bytes == 0


def test_what_a_forward_left_is_let_go_by_the_next() -> None:
    layers, x = _layers(), torch.ones(5, 8)
    offload = HostOffload(CPU, min_bytes=1)
    _run(layers, x, offload)
    first = offload.held_bytes
    got = _gradients(layers, _run(layers, x, offload))
    assert offload.held_bytes <= first
    expected = _gradients(layers, _run(layers, x, None))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
