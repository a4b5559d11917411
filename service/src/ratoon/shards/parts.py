"""How a model's parameters are cut into parts, each of one rank.

A parameter is cut at multiples of `PART` elements, whatever the number of ranks: so a part's norm,
digest and step have the same bits whoever has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

# Few calls per step, of which each costs the host tens of microseconds, against what a step keeps
# for a moment beside the states, and against parts that ranks can have as many of.
PART = 1 << 25
_AT = "@"
# Elements: parts begin where kernels like it.
_ALIGNMENT = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Elements [start, stop) of a parameter, whose name it has where that is all of it."""

    name: str
    start: int
    stop: int

    @property
    def parameter(self) -> str:
        return origin_of(self.name)[0]

    def of(self, tensor: Tensor) -> Tensor:
        """The part of the parameter's own tensor, or of one like it: flat, unless it is all."""
        if self.parameter == self.name:
            return tensor
        return tensor.detach().view(-1)[self.start : self.stop]

    @property
    def num_elements(self) -> int:
        return self.stop - self.start

    def empty_like(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """As `of` makes it of `tensor`, whose values need not be there, without values."""
        shape = tensor.shape if self.parameter == self.name else torch.Size([self.num_elements])
        return torch.empty(shape, dtype=dtype or tensor.dtype, device=tensor.device)


@dataclass(frozen=True, slots=True)
class Places:
    """Where parts begin in memory of `size` elements: [start, stop) by name."""

    bounds: dict[str, tuple[int, int]]
    size: int

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Places:
        """One after the other."""
        rooms = [-(-part.num_elements // _ALIGNMENT) * _ALIGNMENT for part in parts]
        starts = [*accumulate(rooms, initial=0)]
        pairs = zip(parts, starts, strict=False)
        bounds = {part.name: (start, start + part.num_elements) for part, start in pairs}
        return cls(bounds, starts[-1])

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """The parts by name, flat, of memory at least as large."""
        return {name: memory[start:stop] for name, (start, stop) in self.bounds.items()}


def parts_of(parameters: Mapping[str, Tensor], part_elements: int = PART) -> list[Part]:
    """All parts, in the order of the parameters."""
    found: list[Part] = []
    for parameter, tensor in parameters.items():
        count = tensor.numel()
        for start in range(0, count, part_elements):
            name = parameter if count <= part_elements else f"{parameter}{_AT}{start}"
            found.append(Part(name=name, start=start, stop=min(start + part_elements, count)))
    return found


def origin_of(name: str) -> tuple[str, int]:
    """The parameter of a part, and the index of the part's first element in it."""
    parameter, _, start = name.partition(_AT)
    return parameter, int(start or 0)


def shared_out(parts: Sequence[Part], num_ranks: int) -> list[list[Part]]:
    """The parts of each rank, in order: each is of the rank that has the fewest elements yet.

    So ranks have as many as one another, of a layer as of all, and what layer after layer crosses
    between them goes to all at a time and not to one; a rank may have none.
    """
    shares: list[list[Part]] = [[] for _ in range(num_ranks)]
    sizes = [0] * num_ranks
    for part in parts:
        rank = sizes.index(min(sizes))
        shares[rank].append(part)
        sizes[rank] += part.stop - part.start
    return shares
