"""The digest of a state: whatever bit differs shows, and how the state is cut does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import xxhash
from torch import Tensor, nn

from ratoon.model.spec import FolderBase, ModelDtype
from ratoon.train.config import OptimizerStates
from ratoon.train.optim.adamw import OptimizerState
from ratoon.train.optim.choice import make_optimizer
from ratoon.train.optim.digest import StateDigest, digest_text, part_key, part_sums
from ratoon.train.trainer import Trainer
from tests.train.optimizer_runs import CONFIG, make_gradients, make_parameters, optim_step
from tests.train.trainer_runs import make_batch, make_loss, make_step, make_trainer

_CPU = torch.device("cpu")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MASK = (1 << 64) - 1


def _state(kind: OptimizerStates, dtype: torch.dtype = torch.bfloat16) -> OptimizerState:
    """After one step, so that moments are not zero."""
    parameters = {n: nn.Parameter(p.detach().to(dtype)) for n, p in make_parameters().items()}
    optimizer = make_optimizer(parameters, CONFIG, kind, 0)
    sums = {name: gradient.to(dtype) for name, gradient in make_gradients(0).items()}
    if dtype is torch.bfloat16:
        sums = {name: gradient.float() for name, gradient in sums.items()}
    assert not optimizer.step(sums, 1.0, optim_step()).skipped
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


def test_equal_tensors_of_two_names_are_not_interchangeable() -> None:
    """A tensor's name is in the hash of each of its elements: no two of them cancel or pair."""
    tensors = (torch.arange(10), torch.arange(10))
    one, two = part_sums(tensors, part_key(0, ("a", "b"))).tolist()
    assert one != two


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


def test_sums_of_shards_add_up_to_those_of_the_whole() -> None:
    tensor = torch.randn(1000).view(torch.int32)
    whole = part_sums((tensor,), part_key(0, ("a",)))
    for cuts in ([1, 999], [300, 256, 444]):
        start, total = 0, torch.zeros_like(whole)
        for part in tensor.split(cuts):
            total += part_sums((part,), part_key(start, ("a",)))
            start += len(part)
        assert torch.equal(total, whole)
    wrong = part_sums((tensor[:1],), part_key(0, ("a",))) + part_sums(
        (tensor[1:],), part_key(2, ("a",))
    )
    assert not torch.equal(wrong, whole)


def test_digest_is_the_sum_of_the_hashes_in_the_docstring() -> None:
    """Against integers of Python, of any size: what wraps, wraps modulo 2**64."""

    def fold(word: int, shift: int) -> int:
        return word ^ (word >> shift)

    def hashes(bits: int, index: int, name: str) -> tuple[int, int]:
        seed = xxhash.xxh3_64_intdigest(name.encode())
        word = (index * 0x9E3779B97F4A7C15 + seed + bits) & _MASK
        word = fold(word, 30) * 0xBF58476D1CE4E5B9 & _MASK
        word = fold(word, 27) * 0x94D049BB133111EB & _MASK
        first = fold(word, 31)
        return first, fold(fold(first, 29) * 0xD6E8FEB86659FD93 & _MASK, 32)

    values, start = [0, 1, -1, 77, -(1 << 31)], 1 << 40
    pairs = [hashes(bits, start + i, "w") for i, bits in enumerate(values)]
    expected = digest_text(sum(column) for column in zip(*pairs, strict=True))
    part = torch.tensor(values, dtype=torch.int32)
    assert digest_text(part_sums((part,), part_key(start, ("w",)))[0].tolist()) == expected


def test_trainers_digest_follows_its_steps(base: FolderBase) -> None:
    trainers = [make_trainer(base, dtype=ModelDtype.FLOAT32) for _ in range(2)]
    batch = make_batch(0)

    def run(trainer: Trainer) -> list[str]:
        seen = [trainer.state_digest()]
        loss = make_loss(batch)
        trainer.forward_backward(batch, loss, trainer.prepare(batch, loss).plan)
        seen.append(trainer.state_digest())
        trainer.optim_step(make_step(trainer, loss))
        return [*seen, trainer.state_digest()]

    digests = [run(trainer) for trainer in trainers]
    assert digests[0] == digests[1]
    before, in_window, after = digests[0]
    assert before == in_window != after


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "dtype"), _KINDS)
def test_compiled_digest_is_that_of_the_cpu(kind: OptimizerStates, dtype: torch.dtype) -> None:
    # A policy has one kind of states; all of them in one process are more graphs than are kept.
    torch.compiler.reset()
    device = torch.device("cuda")
    state = _state(kind, dtype)
    on_gpu = _moved(state, lambda tensor: tensor.to(device))
    hasher = StateDigest(device)
    assert hasher.of(on_gpu) == hasher.of(state) == _digest(state)


@pytest.mark.gpu
def test_digest_of_a_large_tensor_is_that_of_its_parts() -> None:
    torch.compiler.reset()
    part = torch.randint(-(1 << 31), 1 << 31, (3 << 20,), dtype=torch.int32)
    compiled = torch.compile(part_sums, dynamic=True, fullgraph=True)
    key = part_key((1 << 33) + 5, ("a",))
    assert torch.equal(compiled((part.cuda(),), key.cuda()).cpu(), part_sums((part,), key))


def _moved(state: OptimizerState, move: Callable[[Tensor], Tensor]) -> OptimizerState:
    fields = {
        field: {name: move(tensor) for name, tensor in tensors.items()}
        for field, tensors in state.tensors().items()
    }
    return OptimizerState(kind=state.kind, num_steps=state.num_steps, **fields)
