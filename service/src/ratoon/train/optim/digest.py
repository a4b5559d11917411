"""The digest of an optimizer state: weights, moments and step counter in 128 bits.

It is two sums, modulo 2**64, over all elements: the element's bits as an integer, times an odd
multiplier of its tensor and place (multilinear hashing, Carter and Wegman, 1979). So neither the
order nor who has which tensor decides anything; one element that differs always changes both sums,
and several by chance leave them as they were less than once in 2**60.

A multiplier is a product of two random words, of the place in a block of `BLOCK` elements and of
the block: so few of them need to be kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import xxhash
from torch import Tensor

from ratoon.train.optim.state import OptimizerState

BLOCK = 1 << 13
# Fields whose tensors of one name have one size: one read of the multipliers serves those there
# are.
_ALIKE = (
    ("weights", "weight_remainder", "exp_avg", "exp_avg_sq"),
    ("exp_avg_scale", "exp_avg_sq_scale"),
)
_MASK = (1 << 64) - 1
# Words of 32 bits at most: a multiplier must not be shifted out by a bit that differs.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


class StateDigest:
    """Digests on one device, through which a state that lies elsewhere is moved, by tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # On the device: those of places, and those of blocks by the names of their tensors.
        self._places = odd_words("place", BLOCK).to(device)
        self._blocks: dict[tuple[str, ...], Tensor] = {}

    def of(self, state: OptimizerState) -> str:
        """The digest of `state`, 32 hexadecimal digits; waits for the device once."""
        return digest_of_sums([self.sums(state)], state.num_steps)

    def sums(self, state: OptimizerState) -> tuple[int, int]:
        """What the tensors of `state` add to a digest; waits for the device once."""
        found: list[Tensor] = []
        listed = 0, 0
        for names, tensors in _rows(state):
            for name in names:
                listed = _added(listed, _text_sums(name))
            words = [_words(tensor) for tensor in tensors]
            blocks = self._blocks_of(names, -(-len(words[0]) // BLOCK))
            if self._device.type == "cuda":
                found.extend(self._sums_of_blocks(words, blocks))
            else:
                found.append(host_sums(words, self._places, blocks))
        one, two = torch.cat(found).sum(dim=0).tolist() if found else (0, 0)
        return _added(listed, (one, two))

    def _sums_of_blocks(self, words: Sequence[Tensor], blocks: Tensor) -> Iterator[Tensor]:
        from ratoon.train.optim.kernels import block_sums

        for tensor, of_tensor in zip(words, blocks, strict=True):
            yield block_sums(tensor.to(self._device), self._places, of_tensor)

    def _blocks_of(self, names: tuple[str, ...], count: int) -> Tensor:
        if names not in self._blocks:
            words = torch.stack([odd_words(name, count) for name in names])
            self._blocks[names] = words.to(self._device)
        return self._blocks[names]


def odd_words(name: str, count: int) -> Tensor:
    """Random odd words that the name decides, int64 [2, count]; fewer are the first of more."""
    keys = (xxhash.xxh3_128_intdigest(f"{name} {which}".encode()) for which in range(2))
    words = np.stack([np.random.Philox(key=key).random_raw(count) for key in keys])
    return torch.from_numpy((words | 1).view(np.int64))


def host_sums(words: Sequence[Tensor], places: Tensor, blocks: Tensor) -> Tensor:
    """Both sums over the words of each of k tensors, int64 [k, 2], by numpy.

    `words`: integers [n], the bits of blocks and what is left; `places` [2, BLOCK] and `blocks`
    [k, 2, r]: the multipliers, int64.
    """
    sums = np.empty((len(words), 2), np.int64)
    for number, tensor in enumerate(words):
        array, of_blocks = tensor.numpy(), np.zeros(blocks.shape[1:], np.int64)
        full = len(array) // BLOCK
        whole, rest = array[: full * BLOCK].reshape(-1, BLOCK), array[full * BLOCK :]
        of_blocks[:, :full] = np.einsum("rw,sw->sr", whole, places.numpy(), dtype=np.int64)
        if len(rest):
            of_blocks[:, full] = np.einsum("w,sw->s", rest, places.numpy()[:, : len(rest)])
        sums[number] = (of_blocks * blocks[number].numpy()).sum(axis=-1)
    return torch.from_numpy(sums)


def digest_of_sums(sums: Sequence[tuple[int, int]], num_steps: int) -> str:
    """The digest of a state whose parts add these sums."""
    total = _text_sums(f"num_steps {num_steps}")
    for each in sums:
        total = _added(total, each)
    return digest_text(*total)


def digest_text(*sums: int) -> str:
    """Sums, signed or not and of any size, as hexadecimal digits, 16 each."""
    return "".join(f"{total % (1 << 64):016x}" for total in sums)


def _text_sums(text: str) -> tuple[int, int]:
    number = xxhash.xxh3_128_intdigest(text.encode())
    return number & _MASK, number >> 64


def _added(one: tuple[int, int], two: tuple[int, int]) -> tuple[int, int]:
    return (one[0] + two[0]) & _MASK, (one[1] + two[1]) & _MASK


def _rows(state: OptimizerState) -> Iterator[tuple[tuple[str, ...], list[Tensor]]]:
    """What is hashed at one go: tensors of one size, each with a text that names it."""
    fields = state.tensors()
    assert set(fields) == {field for group in _ALIKE for field in group}
    for group in _ALIKE:
        for name in fields[group[0]]:
            found = {field: fields[field][name] for field in group if name in fields[field]}
            texts = (f"{field}/{name}/{tensor.dtype}" for field, tensor in found.items())
            yield tuple(texts), list(found.values())


def _words(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
