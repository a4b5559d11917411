"""A policy's gradient sums, and their norms, by the names of tensors in exported weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from ratoon.errors import invalid
from ratoon.model.export import ExportedTensor, exported_tensors, exported_values
from ratoon.model.policy_model import PolicyModel
from ratoon.model.safetensors_files import FileContent, write_files
from ratoon.shards.parts import origin_of
from ratoon.train.optim.adamw import block_norms
from ratoon.train.optim.gradients import sum_bytes
from ratoon_proto.types import TensorGradNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class PartNorm:
    """Euclidean norms of the blocks of a part's gradient sum, and its largest magnitude."""

    parameter: str
    norms: tuple[float, ...]
    max_abs: float


def part_norms(sums: Mapping[str, Tensor]) -> dict[str, PartNorm]:
    """Return the norms of gradient sums by part; waits for the device."""
    maxima = [torch.linalg.vector_norm(each, math.inf).double() for each in sums.values()]
    largest = torch.stack(maxima).tolist() if maxima else []
    return {
        name: PartNorm(
            parameter=origin_of(name)[0],
            norms=tuple(block_norms([each], exactly=True)),
            max_abs=max_abs,
        )
        for (name, each), max_abs in zip(sums.items(), largest, strict=True)
    }


def tensor_norms(
    parts: Iterable[PartNorm], names: Mapping[str, str], divisor: float
) -> tuple[TensorGradNorm, ...]:
    """Return the norms of whole tensors after division, from all of their parts in order."""
    by_parameter: dict[str, list[PartNorm]] = {}
    for part in parts:
        by_parameter.setdefault(part.parameter, []).append(part)
    return tuple(
        TensorGradNorm(
            name=names[parameter],
            norm=_norm([norm for part in own for norm in part.norms]) / divisor,
            max_abs=_largest([part.max_abs for part in own]) / divisor,
        )
        for parameter, own in by_parameter.items()
    )


def _norm(norms: Sequence[float]) -> float:
    return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64)))


def _largest(values: Sequence[float]) -> float:
    """NaN where one is."""
    return float(torch.tensor(values, dtype=torch.float64).amax())


_MAX_SHOWN = 80


class NamedGradients:
    """The gradient sums of one model's parameters, by the names of exported tensors."""

    def __init__(self, model: PolicyModel) -> None:
        self._model = model
        self.num_elements = sum(each.numel() for each in model.named_trainable().values())

    def size_bytes(self, names: Sequence[str]) -> int:
        """Size of these tensors' sums. Raises INVALID_ARGUMENT for a name that there is not."""
        for index, name in enumerate(names):
            if name not in self._tensors:
                got, expected = repr(name)[:_MAX_SHOWN], "a tensor of the policy's exported weights"
                raise invalid(f"names[{index}]", got, expected)
        widths = {name: sum_bytes(p) for name, p in self._model.named_trainable().items()}
        return sum(
            self._tensors[name].num_elements * widths[self._tensors[name].parameter]
            for name in names
        )

    def parameters(self, names: Sequence[str]) -> list[str]:
        """Parameters that these tensors are, or are parts of."""
        return list(dict.fromkeys(self._tensors[name].parameter for name in names))

    def write(self, path: Path, names: Sequence[str], sums: Mapping[str, Tensor]) -> None:
        """Write these tensors, float32 at least, as a new safetensors file.

        `sums`: of their `parameters`, on the CPU.
        """
        values: dict[str, Tensor] = {}
        for parameter, whole in sums.items():
            parts = exported_values(self._model, {parameter: whole})
            # A part alone would keep all of a fused parameter in memory.
            is_fused = len(parts) > 1
            for name in parts.keys() & {*names}:
                values[name] = parts[name].clone() if is_fused else parts[name]
        write_files(path.parent, {path.name: FileContent.of(values)})

    def by_parameter(self) -> dict[str, str]:
        """What a parameter is called: as its tensor; a fused one, of several, by its own name."""
        parts = Counter(one.parameter for one in self._tensors.values())
        return {
            one.parameter: name if parts[one.parameter] == 1 else one.parameter
            for name, one in self._tensors.items()
        }

    @cached_property
    def _tensors(self) -> dict[str, ExportedTensor]:
        return exported_tensors(self._model)
