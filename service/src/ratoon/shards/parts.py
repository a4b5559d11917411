"""Cuts a model's parameters into parts, each owned by one rank.

A parameter is cut at multiples of `PART` elements, or of whole matrices where these are stepped as
such, whatever the number of ranks, so a part's norm, digest and step have the same bits whoever
owns it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

import torch
from torch import Tensor

# A compromise: a larger part needs fewer calls per step, each of which costs the host tens of
# microseconds; a smaller one needs less temporary memory beside the states, and can be divided more
# evenly among ranks.
PART = 1 << 25
_AT = "@"
# Rows and columns of the matrices that a parameter consists of, by its name.
Matrices = Mapping[str, tuple[int, int]]
NO_MATRICES: Matrices = MappingProxyType({})
# Elements that a part's start is aligned to, for the kernels.
_ALIGNMENT = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Elements [start, stop) of a parameter; it has the parameter's name if it is all of it."""

    name: str
    start: int
    stop: int

    @property
    def parameter(self) -> str:
        return origin_of(self.name)[0]

    def of(self, tensor: Tensor) -> Tensor:
        """Returns this part of the parameter's tensor, or of one like it: flat, unless it is all of
        it."""
        if self.parameter == self.name:
            return tensor
        return tensor.detach().view(-1)[self.start : self.stop]

    @property
    def num_elements(self) -> int:
        return self.stop - self.start

    def empty_like(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Returns an empty tensor shaped like `of(tensor)`; `tensor` may have no values."""
        shape = tensor.shape if self.parameter == self.name else torch.Size([self.num_elements])
        return torch.empty(shape, dtype=dtype or tensor.dtype, device=tensor.device)


@dataclass(frozen=True, slots=True)
class Places:
    """Places of parts in memory of `size` elements: [start, stop) by name."""

    bounds: dict[str, tuple[int, int]]
    size: int

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Places:
        """Places the parts one after the other."""
        rooms = [-(-part.num_elements // _ALIGNMENT) * _ALIGNMENT for part in parts]
        starts = [*accumulate(rooms, initial=0)]
        pairs = zip(parts, starts, strict=False)
        bounds = {part.name: (start, start + part.num_elements) for part, start in pairs}
        return cls(bounds, starts[-1])

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """Returns flat views of the parts by name, in memory at least as large."""
        return {name: memory[start:stop] for name, (start, stop) in self.bounds.items()}


def parts_of(
    parameters: Mapping[str, Tensor], part_elements: int = PART, *, matrices: Matrices = NO_MATRICES
) -> list[Part]:
    """All parts, in the order of the parameters; those with `matrices` are cut between these."""
    found: list[Part] = []
    for parameter, tensor in parameters.items():
        count, size = tensor.numel(), part_elements
        if parameter in matrices:
            matrix = math.prod(matrices[parameter])
            size = max(1, part_elements // matrix) * matrix
        for start in range(0, count, size):
            name = parameter if count <= size else f"{parameter}{_AT}{start}"
            found.append(Part(name=name, start=start, stop=min(start + size, count)))
    return found


def origin_of(name: str) -> tuple[str, int]:
    """Returns the parameter of a part, and the index of the part's first element in it."""
    parameter, _, start = name.partition(_AT)
    return parameter, int(start or 0)


def shared_out(parts: Sequence[Part], num_ranks: int) -> list[list[Part]]:
    """Assigns parts to ranks, in order: each goes to the rank that has the fewest elements so far.

    So ranks have equal shares of each layer and of all layers, and the traffic of layer after layer
    goes to all ranks at a time and not to one. A rank may have no parts.
    """
    shares: list[list[Part]] = [[] for _ in range(num_ranks)]
    sizes = [0] * num_ranks
    for part in parts:
        rank = sizes.index(min(sizes))
        shares[rank].append(part)
        sizes[rank] += part.stop - part.start
    return shares


def shared_on_node(parts: Sequence[Part], num_sharing: int, num_nodes: int = 1) -> list[list[Part]]:
    """The parts that each of `num_sharing` ranks of a node keeps where every node has them all.

    A rank keeps those that it owns (`shared_out`), and those that its counterparts own: the ranks
    with its place among the ranks of their nodes, which are in a row.
    """
    owned = shared_out(parts, num_nodes * num_sharing)
    return [
        [part for own in owned[place::num_sharing] for part in own] for place in range(num_sharing)
    ]
