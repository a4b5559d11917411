"""Sum gradients of the trainable parameters, neither divided nor clipped, in at least float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from ratoon.rollout.packed import UpdatePlan

_WIDE = (torch.float32, torch.float64)


class GradientSums:
    """Owns the gradients of `parameters` by name.

    float32 and float64 parameters sum in their own `.grad`. Of a narrower one the gradient of its
    first backward is the sum, as it is, until a second one comes or somebody asks: from then on the
    sum is float32. So an update of one backward has no float32 sums beside its activations.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        # Of narrow parameters: the gradient of the only backward, or the float32 sum.
        self._first: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            if parameter.dtype not in _WIDE:
                parameter.register_post_accumulate_grad_hook(partial(self._add, name))

    @property
    def passing_bytes(self) -> int:
        """Most that gradients will take beside what is there of sums, but for what is freed at
        once: sums that backwards make."""
        made = (p for name, p in self._parameters.items() if name not in self._sums)
        return sum(sum_bytes(p) * p.numel() for p in made if p.grad is None)

    def sums(self) -> dict[str, Tensor]:
        """The live sums by name, zeros where nothing flowed; changing them changes the sums."""
        return self.whole_sums() | self.shards()

    def shards(self) -> dict[str, Tensor]:
        """Of parts, which have the gradients of all ranks; none here."""
        return {}

    def whole_sums(self) -> dict[str, Tensor]:
        """Of whole parameters, as all are here; of this rank's gradients alone."""
        return {name: self._whole_sum(name, p) for name, p in self._parameters.items()}

    def sums_of_step(self) -> dict[str, Tensor]:
        """As `whole_sums`, but as narrow as they are; not to be changed."""
        return {
            name: self._first[name] if name in self._first else self._whole_sum(name, p)
            for name, p in self._parameters.items()
        }

    def of_pass(
        self, plan: UpdatePlan, is_cancelled: Callable[[], bool]
    ) -> AbstractContextManager[None]:
        """Inside, the backwards of this rank's part of `plan` run."""
        del plan, is_cancelled
        return nullcontext()

    def sum_of(self, name: str) -> Tensor:
        """The sum of one parameter, zeros where nothing flowed; changes nothing."""
        if name in self._sums:
            return self._sums[name]
        if name in self._first:
            return _widened(self._first[name])
        parameter = self._parameters[name]
        if parameter.grad is not None:
            return parameter.grad
        return torch.zeros_like(parameter, dtype=wide_dtype(parameter))

    def clear(self) -> None:
        """Forget all sums."""
        self._first.clear()
        self._sums.clear()
        for parameter in self._parameters.values():
            parameter.grad = None

    def _whole_sum(self, name: str, parameter: nn.Parameter) -> Tensor:
        if parameter.dtype in _WIDE:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            return parameter.grad
        if name not in self._sums:
            self._sums[name] = self.sum_of(name)
            self._first.pop(name, None)
        return self._sums[name]

    def _add(self, name: str, parameter: Tensor) -> None:
        """Take the gradient of a backward, once it is whole."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if name in self._sums:
            add_terms(self._sums[name], [gradient])
        elif name in self._first:
            self._sums[name] = _widened(self._first.pop(name))
            add_terms(self._sums[name], [gradient])
        else:
            self._first[name] = gradient.contiguous()


def add_terms(total: Tensor, terms: Sequence[Tensor]) -> None:
    """Add each of the terms, of the shape of `total`, in order."""
    if total.is_cuda and all(each.is_contiguous() for each in (total, *terms)):
        from ratoon.train.optim.kernels import add_each

        add_each(total, terms)
        return
    for term in terms:
        total.add_(term)


def sum_bytes(parameter: Tensor) -> int:
    """Of one element of a parameter's sum."""
    return wide_dtype(parameter).itemsize


def wide_dtype(parameter: Tensor) -> torch.dtype:
    """Of a parameter's sum."""
    return torch.promote_types(parameter.dtype, torch.float32)


def _widened(gradient: Tensor) -> Tensor:
    return gradient.to(wide_dtype(gradient))
