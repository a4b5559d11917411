"""A policy's gradient sums by the names that its tensors have in exported weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from torch import Tensor

from ratoon.errors import invalid
from ratoon.model.export import ExportedTensor, exported_tensors, exported_values
from ratoon.model.policy_model import PolicyModel
from ratoon.model.safetensors_files import FileContent, write_files
from ratoon.train.optim.gradients import sum_bytes

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
