"""The digest of a state: whatever bit differs shows, and how the state is cut does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ratoon.model.spec import FolderBase, ModelDtype
from ratoon.train.optim.bf16_adamw import make_optimizer
from ratoon.train.optim.digest import (
    BLOCK,
    StateDigest,
    digest_of_sums,
    digest_text,
    host_sums,
    odd_words,
)
from ratoon.train.optim.state import OptimizerState
from ratoon.train.spec import OptimizerStates
from ratoon.train.trainer import Trainer
from tests.train.optimizer_runs import (
    CONFIG,
    make_gradients,
    make_parameters,
    optim_step,
    take_step,
)
from tests.train.trainer_runs import make_batch, make_loss, make_step, make_trainer

_CPU = torch.device("cpu")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _state(kind: OptimizerStates, dtype: torch.dtype = torch.bfloat16) -> OptimizerState:
    """After one step, so that moments are not zero."""
    parameters = {n: nn.Parameter(p.detach().to(dtype)) for n, p in make_parameters().items()}
    optimizer = make_optimizer(parameters, CONFIG, kind, 0)
    sums = {name: gradient.to(dtype) for name, gradient in make_gradients(0).items()}
    if dtype is torch.bfloat16:
        sums = {name: gradient.float() for name, gradient in sums.items()}
    assert not take_step(optimizer, sums, 1.0, optim_step()).skipped
    return optimizer.state()


def _digest(state: OptimizerState) -> str:
    return StateDigest(_CPU).of(state)


_KINDS = [
    (OptimizerStates.FP32, torch.bfloat16),
    (OptimizerStates.FP32, torch.float64),
    (OptimizerStates.BF16_SPLIT, torch.bfloat16),
    (OptimizerStates.BF16_SPLIT_8BIT, torch.bfloat16),
    (OptimizerStates.BF16_STOCHASTIC, torch.bfloat16),
    (OptimizerStates.BF16_8BIT, torch.bfloat16),
]


@pytest.mark.parametrize(("kind", "dtype"), _KINDS)
def test_digest_changes_with_any_bit_of_any_tensor(
    kind: OptimizerStates, dtype: torch.dtype
) -> None:
    state = _state(kind, dtype)
    seen = {_digest(state)}
    count = 1
    for tensors in state.tensors().values():
        for tensor in tensors.values():
            words = tensor.reshape(-1).view(_INTEGERS[tensor.element_size()])
            index = count % len(words)
            for bit in range(8 * tensor.element_size()):
                mask = 1 << bit
                flip = mask - 2 * mask if bit == 8 * tensor.element_size() - 1 > 7 else mask
                words[index] ^= flip
                seen.add(_digest(state))
                words[index] ^= flip
                count += 1
    assert len(seen) == count
    assert _digest(state) in seen
    assert _digest(replace(state, num_steps=2)) not in seen


def test_digest_knows_places_and_names() -> None:
    state = _state(OptimizerStates.BF16_STOCHASTIC)
    seen = {_digest(state)}
    for tensor in (state.weights["whole"], state.exp_avg["few"]):
        flat = tensor.view(-1)
        assert flat[1] != flat[5]
        flat[[1, 5]] = flat[[5, 1]]
        seen.add(_digest(state))
    seen.add(_digest(replace(state, exp_avg=state.exp_avg_sq, exp_avg_sq=state.exp_avg)))
    assert len(seen) == 4
    # States of zeros differ by their names alone.
    blank = [{name: torch.zeros(8)} for name in ("a", "b")]
    named = {_digest(replace(state, weights=w, exp_avg=w, exp_avg_sq=w)) for w in blank}
    assert len(named) == 2


@pytest.mark.parametrize("kind", list(OptimizerStates))
def test_digest_is_that_of_the_bits(kind: OptimizerStates) -> None:
    """Copies on other storages, other orders of names, and numbers that compare as equal."""
    state = _state(kind)
    copies = {
        field: {name: tensor.clone() for name, tensor in reversed(tensors.items())}
        for field, tensors in state.tensors().items()
    }
    other = OptimizerState(kind=kind, num_steps=1, **copies)
    assert _digest(other) == _digest(state)
    other.weights["few"][0] = 0.0
    positive = _digest(other)
    other.weights["few"][0] = -0.0
    assert _digest(other) != positive
    bits = other.weights["few"].view(-1).view(_INTEGERS[other.weights["few"].element_size()])
    nans = set[str]()
    for payload in (1, 2, 3):
        bits[0] = (0x7F800000 if bits.dtype is torch.int32 else 0x7F80) + payload
        assert other.weights["few"].isnan().any()
        nans.add(_digest(other))
    assert len(nans) == 3


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_digest_is_the_sum_in_the_docstring(dtype: torch.dtype) -> None:
    """Against integers of Python, of any size: what wraps, wraps modulo 2**64."""
    bits = torch.iinfo(dtype)
    words = torch.randint(bits.min, bits.max + 1, (2 * BLOCK + 5,)).to(dtype)
    places, blocks = odd_words("place", BLOCK), odd_words("w", 3)
    expected = [
        sum(
            word * places[which, index % BLOCK].item() * blocks[which, index // BLOCK].item()
            for index, word in enumerate(words.tolist())
        )
        for which in range(2)
    ]
    on_host = host_sums((words,), places, blocks.unsqueeze(0))[0]
    assert digest_text(*on_host.tolist()) == digest_text(*expected)


def test_multipliers_are_odd_and_differ() -> None:
    words = torch.cat([odd_words("place", BLOCK), odd_words("w", BLOCK)]).flatten()
    assert torch.equal(words & 1, torch.ones_like(words))
    assert len(set(words.tolist())) == len(words)
    assert torch.equal(odd_words("w", 7), odd_words("w", BLOCK)[:, :7])


def test_trainers_digest_follows_its_steps(base: FolderBase) -> None:
    trainers = [make_trainer(base, dtype=ModelDtype.FLOAT32) for _ in range(2)]
    batch = make_batch(0)

    def run(trainer: Trainer) -> list[str]:
        seen = [trainer.state_digest()]
        loss = make_loss(batch)
        trainer.forward_backward(trainer.prepare(batch, loss))
        seen.append(trainer.state_digest())
        trainer.optim_step(make_step(trainer, loss))
        return [*seen, trainer.state_digest()]

    digests = [run(trainer) for trainer in trainers]
    assert digests[0] == digests[1]
    before, in_window, after = digests[0]
    assert before == in_window != after


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "dtype"), _KINDS)
def test_digest_of_a_gpu_is_that_of_the_cpu(kind: OptimizerStates, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    state = _state(kind, dtype)
    on_gpu = _moved(state, lambda tensor: tensor.to(device))
    hasher = StateDigest(device)
    assert hasher.of(on_gpu) == hasher.of(state) == _digest(state)


@pytest.mark.gpu
def test_digest_of_large_tensors_is_that_of_the_cpu() -> None:
    weights = {"w": torch.randn(384 * BLOCK + 77, device="cuda")}
    state = replace(
        _state(OptimizerStates.FP32), weights=weights, exp_avg=weights, exp_avg_sq=weights
    )
    on_host = _digest(_moved(state, lambda tensor: tensor.cpu()))
    assert StateDigest(torch.device("cuda")).of(state) == on_host


def test_parts_of_a_state_add_up_to_its_digest() -> None:
    """Whichever parts a rank has; the number of steps counts once."""
    state = _state(OptimizerStates.BF16_SPLIT_8BIT)
    hasher = StateDigest(_CPU)

    def of_names(names: set[str]) -> OptimizerState:
        fields = {
            field: {name: tensor for name, tensor in tensors.items() if name in names}
            for field, tensors in state.tensors().items()
        }
        return OptimizerState(kind=state.kind, num_steps=1, **fields)

    for mine in (set[str](), {"few"}, {"few", "whole"}):
        sums = [hasher.sums(of_names(names)) for names in (mine, {*state.weights} - mine)]
        assert digest_of_sums(sums, 1) == _digest(state)
        assert digest_of_sums(sums, 2) != _digest(state)
        assert digest_of_sums(sums[:1], 1) != _digest(state)


def _moved(state: OptimizerState, move: Callable[[Tensor], Tensor]) -> OptimizerState:
    fields = {
        field: {name: move(tensor) for name, tensor in tensors.items()}
        for field, tensors in state.tensors().items()
    }
    return OptimizerState(kind=state.kind, num_steps=state.num_steps, **fields)
