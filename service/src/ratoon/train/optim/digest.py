"""The digest of an optimizer state: weights, moments and step counter in 128 bits.

It is a sum of hashes of single elements, each of the element's bits, its index in the whole tensor
and the tensor's name and dtype; so neither the order nor the cut into shards or chunks decides
anything, and one bit that differs in one element always changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

import torch
import xxhash
from torch import Tensor

from ratoon.train.optim.adamw import OptimizerState

_BITS = 64
# Odd: 2**64 over the golden ratio, the multipliers of SplitMix64 (Steele, Lea and Flood, OOPSLA
# 2014, as revised by Vigna), and one more; all as int64.
_STRIDE = 0x9E3779B97F4A7C15 - (1 << _BITS)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << _BITS)
_SECOND = 0x94D049BB133111EB - (1 << _BITS)
_THIRD = 0xD6E8FEB86659FD93 - (1 << _BITS)
_NUM_STEPS = "num_steps"
# Fields whose tensors of one name have one size: one read of the index serves those there are.
_ALIKE = (
    ("weights", "weight_remainder", "exp_avg", "exp_avg_sq"),
    ("exp_avg_scale", "exp_avg_sq_scale"),
)
# Elements hashed at a time: within the cache of a CPU; on a GPU few calls, and what a state that
# lies on the host may take there while it is hashed.
_HOST_CHUNK = 1 << 14
_DEVICE_CHUNK = 1 << 28
# A GPU adds up rows of so many side by side, and then their sums; a single row takes one of its
# many processors.
_DEVICE_ROW = 1 << 12
_BITS_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_Sums = Callable[[tuple[Tensor, ...], Tensor], Tensor]


class StateDigest:
    """Digests on one device, through which a state that lies elsewhere is moved in parts."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._chunk = _DEVICE_CHUNK if device.type == "cuda" else _HOST_CHUNK
        self._sums: _Sums = part_sums
        # Compiled, each element is read once; on a CPU that is not worth a compiler.
        if device.type == "cuda":
            self._sums = cast("_Sums", torch.compile(part_sums, dynamic=True, fullgraph=True))
        # Start and seeds of a part, on the device, by the names that they are made of.
        self._keys: dict[tuple[int, tuple[str, ...]], Tensor] = {}

    def of(self, state: OptimizerState) -> str:
        """The digest of `state`, 32 hexadecimal digits; waits for the device once."""
        found: list[Tensor] = []
        for names, tensors in _rows(state):
            flat = [tensor.detach().reshape(-1) for tensor in tensors]
            for start, stop in self._spans(flat[0].numel()):
                parts = tuple(_bits(tensor[start:stop]) for tensor in flat)
                found.append(self._sums(self._moved(parts), self._key(start, names)))
        sums = torch.cat(found).sum(dim=0).tolist() if found else [0, 0]
        counter = part_sums((torch.tensor([state.num_steps]),), part_key(0, (_NUM_STEPS,)))
        return digest_text(s + c for s, c in zip(sums, counter[0].tolist(), strict=True))

    def _spans(self, count: int) -> Iterator[tuple[int, int]]:
        """Chunks of `count` elements; on a GPU one is of whole rows, or shorter than a row."""
        whole = count - count % _DEVICE_ROW if self._device.type == "cuda" else count
        for first, last in ((0, whole), (whole, count)):
            for start in range(first, last, self._chunk):
                yield start, min(start + self._chunk, last)

    def _moved(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # `.data` is no view: of a view, the compiler would look at the shape of the whole too.
        moved = (part.to(self._device).data for part in parts)
        if self._device.type != "cuda":
            return tuple(moved)
        return tuple(part.view(-1, min(_DEVICE_ROW, len(part))).data for part in moved)

    def _key(self, start: int, names: tuple[str, ...]) -> Tensor:
        if (start, names) not in self._keys:
            self._keys[start, names] = part_key(start, names).to(self._device)
        return self._keys[start, names]


def part_key(start: int, names: Sequence[str]) -> Tensor:
    """For `part_sums`, int64 [1 + k]: the index of the first element and each tensor's seed."""
    seeds = (xxhash.xxh3_64_intdigest(name.encode()) for name in names)
    return torch.tensor([start, *(_signed(seed) for seed in seeds)], dtype=torch.int64)


def part_sums(parts: tuple[Tensor, ...], key: Tensor) -> Tensor:
    """Sums of two hashes over the elements of each of k parts, int64 [k, 2], modulo 2**64.

    `parts`: integers of one shape, [n] or rows [r, w] of it, the bits of the elements; `key`: int64
    [1 + k]. The sums of a tensor are those of its parts added up.
    """
    index = torch.arange(parts[0].numel(), dtype=torch.int64, device=key.device)
    index = index.view(parts[0].shape)
    # A sum with a tensor first: a compiler must not count a product of indices in 32 bits.
    places = (index + key[0]) * _STRIDE
    sums: list[Tensor] = []
    for number, part in enumerate(parts):
        word = places + key[1 + number] + part.to(torch.int64)
        # Each line is a bijection of 64 bits.
        word = _fold(word, 30).mul_(_FIRST)
        word = _fold(word, 27).mul_(_SECOND)
        word = _fold(word, 31)
        sums.append(word.sum(dim=-1).sum())
        word = _fold(word, 29).mul_(_THIRD)
        sums.append(_fold(word, 32).sum(dim=-1).sum())
    return torch.stack(sums).view(-1, 2)


def digest_text(sums: Iterable[int]) -> str:
    """Sums, signed or not and of any size, as hexadecimal digits, 16 each."""
    return "".join(f"{total % (1 << _BITS):016x}" for total in sums)


def _rows(state: OptimizerState) -> Iterator[tuple[tuple[str, ...], list[Tensor]]]:
    """What is hashed at one go: tensors of one size, each with a text that names it."""
    fields = state.tensors()
    assert set(fields) == {field for group in _ALIKE for field in group}
    for group in _ALIKE:
        for name in fields[group[0]]:
            found = {field: fields[field][name] for field in group if name in fields[field]}
            texts = (f"{field}/{name}/{tensor.dtype}" for field, tensor in found.items())
            yield tuple(texts), list(found.values())


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_BITS_OF_SIZE[tensor.element_size()])


def _fold(word: Tensor, shift: int) -> Tensor:
    """`word ^ (word >>> shift)`, in place; torch's shift of int64 keeps the sign."""
    return word.bitwise_xor_((word >> shift).bitwise_and_((1 << (_BITS - shift)) - 1))


def _signed(number: int) -> int:
    """The same 64 bits as int64."""
    return number - (1 << _BITS) if number >> (_BITS - 1) else number
