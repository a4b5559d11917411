"""A policy's gradient sums by the names that its tensors have in exported weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from torch import Tensor

from ratoon.errors import invalid
from ratoon.model.export import ExportedTensor, exported_tensors, exported_values
from ratoon.model.policy_model import PolicyModel
from ratoon.model.safetensors_files import write_file
from ratoon.train.optim.gradients import GradientSums

_MAX_SHOWN = 80


class NamedGradients:
    """Reads the live sums; changes nothing."""

    def __init__(self, model: PolicyModel, sums: GradientSums) -> None:
        self._model = model
        self._sums = sums

    def size_bytes(self, names: Sequence[str]) -> int:
        """Size of these tensors' sums. Raises INVALID_ARGUMENT for a name that there is not."""
        for index, name in enumerate(names):
            if name not in self._tensors:
                got, expected = repr(name)[:_MAX_SHOWN], "a tensor of the policy's exported weights"
                raise invalid(f"names[{index}]", got, expected)
        return sum(
            self._tensors[name].num_elements * self._sums.element_bytes(self._parameter(name))
            for name in names
        )

    def write(self, path: Path, names: Sequence[str]) -> None:
        """Write these tensors' sums, float32 at least, as a new safetensors file."""
        values: dict[str, Tensor] = {}
        for parameter in dict.fromkeys(map(self._parameter, names)):
            whole = self._sums.sum_of(parameter).to("cpu")
            parts = exported_values(self._model, {parameter: whole})
            # A part alone would keep all of a fused parameter in memory.
            is_fused = len(parts) > 1
            for name in parts.keys() & {*names}:
                values[name] = parts[name].clone() if is_fused else parts[name]
        write_file(path, values)

    def by_tensor(self) -> dict[str, Tensor]:
        """The live sums of all parameters; a fused one, of several tensors, keeps its own name."""
        parts = Counter(one.parameter for one in self._tensors.values())
        names = {one.parameter: name for name, one in self._tensors.items()}
        return {
            names[parameter] if parts[parameter] == 1 else parameter: each
            for parameter, each in self._sums.sums().items()
        }

    def _parameter(self, name: str) -> str:
        return self._tensors[name].parameter

    @cached_property
    def _tensors(self) -> dict[str, ExportedTensor]:
        return exported_tensors(self._model)
