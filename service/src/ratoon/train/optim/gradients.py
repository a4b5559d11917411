"""Sum gradients of the trainable parameters, neither divided nor clipped, in at least float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from ratoon.rollout.packed import UpdatePlan

_WIDE = (torch.float32, torch.float64)


class GradientSums:
    """Owns the gradients of `parameters` by name.

    float32 and float64 parameters sum in their own `.grad`. For narrower ones autograd's gradient
    of each backward is added to a float32 buffer as soon as it is whole, and let go.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self._buffers: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            if parameter.dtype not in _WIDE:
                self._buffers[name] = torch.zeros_like(parameter, dtype=torch.float32)
                parameter.register_post_accumulate_grad_hook(_adder(self._buffers[name]))

    @property
    def passing_bytes(self) -> int:
        """Most that gradients will take beside what is there of sums, but for what is freed at
        once: sums that the first backward makes."""
        made = (p for n, p in self._parameters.items() if n not in self._buffers)
        return sum(parameter.nbytes for parameter in made if parameter.grad is None)

    def sums(self) -> dict[str, Tensor]:
        """The live sums by name, zeros where nothing flowed; changing them changes the sums."""
        return self.whole_sums() | self.shards()

    def shards(self) -> dict[str, Tensor]:
        """Of parts, which have the gradients of all ranks; none here."""
        return {}

    def whole_sums(self) -> dict[str, Tensor]:
        """Of whole parameters, as all are here; of this rank's gradients alone."""
        for name, parameter in self._parameters.items():
            if name not in self._buffers and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return {
            name: self._buffers[name] if name in self._buffers else _grad(parameter)
            for name, parameter in self._parameters.items()
        }

    def of_pass(
        self, plan: UpdatePlan, is_cancelled: Callable[[], bool]
    ) -> AbstractContextManager[None]:
        """Inside, the backwards of this rank's part of `plan` run."""
        del plan, is_cancelled
        return nullcontext()

    def sum_of(self, name: str) -> Tensor:
        """The live sum of one parameter, zeros where nothing flowed; changes nothing."""
        if name in self._buffers:
            return self._buffers[name]
        parameter = self._parameters[name]
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    def clear(self) -> None:
        """Forget all sums."""
        for buffer in self._buffers.values():
            buffer.zero_()
        for parameter in self._parameters.values():
            parameter.grad = None


def sum_bytes(parameter: Tensor) -> int:
    """Of one element of a parameter's sum."""
    return wide_dtype(parameter).itemsize


def wide_dtype(parameter: Tensor) -> torch.dtype:
    """Of a parameter's sum."""
    return torch.promote_types(parameter.dtype, torch.float32)


def _adder(buffer: Tensor) -> Callable[[Tensor], None]:
    def add(parameter: Tensor) -> None:
        buffer.add_(_grad(parameter))
        parameter.grad = None

    return add


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
