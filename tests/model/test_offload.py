"""Activations on the host: the same gradients, where the bytes are and when they go."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ratoon.model.offload import HostOffload

CPU = torch.device("cpu")
# Three tensors of a layer are saved: its input, and the inputs of SiLU and of the second product.
LAYER_BYTES = 3 * 5 * 8 * 4
NUM_LAYERS = 3
# Chunk size that no tensor has.
CHUNK_BYTES = 100


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """What goes, goes by itself."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _layers() -> list[nn.Sequential]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [
            nn.Sequential(nn.Linear(8, 8, bias=False), nn.SiLU(), nn.Linear(8, 8, bias=False))
            for _ in range(NUM_LAYERS)
        ]


def _input(seed: int = 1, rows: int = 5) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))


def _offload(min_bytes: int = 1) -> HostOffload:
    return HostOffload(CPU, min_bytes=min_bytes, chunk_bytes=CHUNK_BYTES)


def _spied() -> Any:
    """One whose methods are to be replaced."""
    return _offload()


def _run(
    layers: list[nn.Sequential], x: Tensor, offload: HostOffload | None, on_host: int = NUM_LAYERS
) -> Tensor:
    """The first `on_host` layers are on the host."""
    for index, layer in enumerate(layers):
        if offload is None or index >= on_host:
            x = layer(x)
        else:
            with offload.layer(index, layer.parameters(), is_last=index + 1 == on_host):
                x = layer(x)
    return x


def _gradients(layers: list[nn.Sequential], out: Tensor) -> list[Tensor]:
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    return list(torch.autograd.grad(out.square().sum(), parameters))


def _assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert all(grad.count_nonzero() > 0 for grad in got)


@pytest.mark.parametrize("on_host", range(1, NUM_LAYERS + 1))
def test_gradients_are_the_same_bits(on_host: int) -> None:
    layers, x = _layers(), _input()
    expected = _gradients(layers, _run(layers, x, None))
    offload = _offload()
    for _ in range(2):
        out = _run(layers, x, offload, on_host)
        assert offload.held_bytes == on_host * LAYER_BYTES
        _assert_same(_gradients(layers, out), expected)
        assert offload.held_bytes == 0


def test_weights_and_small_tensors_stay_and_a_tensor_goes_once() -> None:
    layers, x = _layers(), torch.ones(5, 8)
    offload = _offload()
    out = _run(layers, x, offload)
    assert offload.held_bytes == NUM_LAYERS * LAYER_BYTES
    del out
    assert offload.held_bytes == 0
    stays = _offload(min_bytes=x.numel() * 4 + 1)
    out = _run(layers, x, stays)
    assert stays.held_bytes == 0
    assert out.requires_grad


def test_a_layers_bytes_go_with_its_backward() -> None:
    layers, x = _layers(), torch.ones(5, 8)
    offload = _offload()
    held: list[int] = []
    for layer in layers:
        layer.register_full_backward_hook(lambda *_: held.append(offload.held_bytes))
    out = _run(layers, x.requires_grad_(), offload)
    out.sum().backward()
    # The hook of a layer comes with the last of its gradients, before its input's are taken off.
    assert [bytes_ // LAYER_BYTES for bytes_ in held] == sorted(range(NUM_LAYERS), reverse=True)
    assert offload.held_bytes == 0


def test_no_more_than_two_layers_of_a_forward_are_on_the_device() -> None:
    """Forward, the one that runs and the one that leaves; backward, that and the one to come."""
    layers, offload = _layers(), _spied()
    send = offload._send
    made: list[Any] = []

    def recorded(tensor: Tensor, layer: Any) -> Any:
        made.append(send(tensor, layer))
        return made[-1]

    offload._send = recorded
    there: list[int] = []

    def look(*_: object) -> None:
        there.append(sum(one.on_device is not None for one in made))

    for layer in layers:
        layer.register_forward_hook(look)
        layer.register_full_backward_hook(look)
        layer[2].register_full_backward_hook(look)
    out = _run(layers, _input().requires_grad_(), offload)
    look()
    assert there == [3, 6, 6, 0], "a forward that is over has nothing there"
    there.clear()
    out.sum().backward()
    look()
    # Within a layer and once it is through with its own: the one below is there.
    assert there == [6, 3, 6, 3, 3, 0, 0]


def test_forwards_of_which_many_are_open_run_backward_in_any_order() -> None:
    layers, offload = _layers(), _offload()
    inputs = [_input(seed, rows=3 + seed) for seed in range(5)]
    expected = [_gradients(layers, _run(layers, x, None)) for x in inputs]
    order = list(range(5))
    random.Random(0).shuffle(order)
    for places in (sorted(order, reverse=True), order):
        outs = {i: _run(layers, x, offload, 1 + i % NUM_LAYERS) for i, x in enumerate(inputs)}
        whole = offload.held_bytes
        for place in places:
            _assert_same(_gradients(layers, outs.pop(place)), expected[place])
            assert offload.held_bytes < whole
            whole = offload.held_bytes
        assert whole == 0


def test_only_the_layer_below_of_the_same_forward_is_fetched_early() -> None:
    """A wave's first layer would else fetch the last one of the prefix, which waits for all."""
    layers, offload = _layers(), _spied()
    prefix = _run(layers, _input(), offload)
    fetched: list[int] = []
    fetch = offload._fetch

    def recorded(saved: Any) -> None:
        fetched.append(id(saved))
        fetch(saved)

    offload._fetch = recorded
    for seed in (2, 3):
        _gradients(layers, _run(layers, _input(seed), offload))
        assert len(set(fetched)) <= 3 * NUM_LAYERS
        fetched.clear()
    assert offload.held_bytes == NUM_LAYERS * LAYER_BYTES
    _gradients(layers, prefix)


def test_a_forward_that_was_given_up_leaves_nothing() -> None:
    """Before its end, before its backward, and in the midst of that."""
    layers, offload = _layers(), _offload()
    expected = _gradients(layers, _run(layers, _input(), None))
    outer = _run(layers, _input(), offload)

    class GivenUpError(Exception):
        pass

    def give_up(*_: object) -> None:
        raise GivenUpError

    for register in (layers[1].register_forward_hook, layers[1].register_full_backward_hook):
        handle = register(give_up)
        with pytest.raises(GivenUpError):
            _gradients(layers, _run(layers, _input(2).requires_grad_(), offload))
        handle.remove()
        assert offload.held_bytes == NUM_LAYERS * LAYER_BYTES
    _run(layers, _input(3), offload)
    assert offload.held_bytes == NUM_LAYERS * LAYER_BYTES
    _assert_same(_gradients(layers, outer), expected)
    assert offload.held_bytes == 0


def test_tensors_of_a_layer_share_chunks() -> None:
    layers, offload = _layers(), HostOffload(CPU, min_bytes=1, chunk_bytes=LAYER_BYTES)
    out = _run(layers, _input(), offload)
    assert offload.room_bytes // LAYER_BYTES - len(offload._spare) == NUM_LAYERS
    assert out.requires_grad


def test_room_on_the_host_is_that_of_the_most_held_at_a_time() -> None:
    """Whatever the sizes of what comes and goes."""
    layers, offload = _layers(), _offload()
    for rows in range(1, 40):
        _gradients(layers, _run(layers, _input(rows=rows), offload))
    most = NUM_LAYERS * LAYER_BYTES * 39 // 5
    assert most <= offload.room_bytes <= most + (NUM_LAYERS + 16) * CHUNK_BYTES
    before = offload.room_bytes
    for rows in range(1, 40):
        _gradients(layers, _run(layers, _input(rows=rows), offload))
    assert offload.room_bytes == before
