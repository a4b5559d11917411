"""Everything that a step depends on beside its gradient, and how large it can be after a step.

Bounds are computed on the host alone, so almost every step is known to be finite before anything is
written, and no device is asked. A bound that proves nothing decides nothing either:
`Optimizer.stays_finite` then tries the step on copies, which is exact. So whether a step is taken
depends on the state and the step, and not on how loose a bound has become.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon.errors import invalid
from ratoon.model.safetensors_files import are_finite
from ratoon.train.loss.spec import OptimStep
from ratoon.train.optim.muon import MAX_UPDATE
from ratoon.train.optim.resolve import max_lr_factor
from ratoon.train.optim.rounding import join_float32
from ratoon.train.spec import OptimizerStates
from ratoon_proto.types import AdamWConfig

# Magnitudes below it are finite however they are rounded.
FINITE = 2.0**127
# A step rounds its results to bfloat16 at most, which is off by less than a 128th.
_ROUNDED = 1 + 2.0**-7
# What float32 loses on the way to a result, as a share of the operands; and, by itself, what a
# scale of gradients too small for a normal float32 is off by, times the largest float32.
_LOST = 2.0**-20


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBounds:
    """No weight, first moment or second moment of a state has a larger magnitude."""

    weight: float
    first: float
    second: float

    @classmethod
    def over(cls, parts: Sequence[StateBounds]) -> StateBounds:
        """The bounds of a state that has these parts; at least one."""
        return cls(
            weight=max(part.weight for part in parts),
            first=max(part.first for part in parts),
            second=max(part.second for part in parts),
        )

    def after(
        self, step: OptimStep, config: AdamWConfig, number: int, norm: float
    ) -> StateBounds | None:
        """The bounds after `step`; None where a result, or a number on the way to it, may be too
        large to be finite.

        `config`: AdamW's for this step; `number`: the step's, from 1; `norm`: the gradient's, after
        division. No element is larger than the norm, and no root of a second moment is below 0.
        """
        gradient = norm * step.clip_factor(norm) * _ROUNDED + _LOST
        square = gradient * gradient
        betas = [config.beta1] if config.muon is None else [config.beta1, config.muon.momentum]
        mixed = max(beta * self.first + (1 - beta) * gradient for beta in betas)
        first = (mixed + _LOST * (self.first + gradient)) * _ROUNDED
        second = (config.beta2 * self.second + (1 - config.beta2) * square) * _ROUNDED
        highest = step.learning_rate * max_lr_factor(config)
        change = highest / (1 - config.beta1**number) * first / min(1.0, config.eps)
        change = change if config.muon is None else max(change, highest * MAX_UPDATE)
        decay = highest * step.weight_decay
        weight = (max(1.0, decay) * self.weight + change) * _ROUNDED
        numbers = (self.first + gradient, square, first, second, change, weight)
        # A NaN, as of infinity times 0, is not below the limit.
        if not all(each < FINITE for each in numbers):
            return None
        return StateBounds(weight=weight, first=first, second=second)


# Fields of a state that make up the weights.
_OF_WEIGHTS = ("weights", "weight_remainder")
# Fields as large as the first and the second moments: these, or the scales of their codes.
_OF_FIRST = ("exp_avg", "exp_avg_scale")
_OF_SECOND = ("exp_avg_sq", "exp_avg_sq_scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """Everything that a step depends on beside its gradient; live tensors by parameter name."""

    kind: OptimizerStates
    # FP32: masters, float32, or float64 for float64 parameters. Else bfloat16, the parameters.
    weights: dict[str, Tensor]
    # BF16_SPLIT...: int16, what the weights lack of their masters (`rounding.split_float32`).
    weight_remainder: dict[str, Tensor]
    # FP32, BF16_SPLIT: as wide as masters. Else bfloat16, or uint8 codes with their scales below.
    # What Muon steps has the momentum in `exp_avg`, and no second moment.
    exp_avg: dict[str, Tensor]
    exp_avg_sq: dict[str, Tensor]
    # float32, one a block of `rounding.BLOCK` codes; the names that have codes.
    exp_avg_scale: dict[str, Tensor]
    exp_avg_sq_scale: dict[str, Tensor]
    num_steps: int

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """All tensors, by field and parameter."""
        return {
            "weights": self.weights,
            "weight_remainder": self.weight_remainder,
            "exp_avg": self.exp_avg,
            "exp_avg_sq": self.exp_avg_sq,
            "exp_avg_scale": self.exp_avg_scale,
            "exp_avg_sq_scale": self.exp_avg_sq_scale,
        }

    def on_host(self) -> OptimizerState:
        """A copy on the CPU that shares nothing with this one, made one tensor after the other."""
        fields = {
            field: {name: _host_copy(tensor) for name, tensor in tensors.items()}
            for field, tensors in self.tensors().items()
        }
        return OptimizerState(kind=self.kind, num_steps=self.num_steps, **fields)

    def copy_from(self, state: OptimizerState) -> None:
        """Overwrite the tensors by those of a state of the same kind, names and shapes."""
        theirs = state.tensors()
        for field, mine in self.tensors().items():
            for name, tensor in mine.items():
                tensor.copy_(theirs[field][name])

    def clear_moments(self) -> None:
        """Zeros, as before the first step."""
        for field, tensors in self.tensors().items():
            if field not in _OF_WEIGHTS:
                for tensor in tensors.values():
                    tensor.zero_()

    def alone(self, name: str) -> OptimizerState:
        """What is kept of one parameter, live."""
        fields = {
            field: {name: tensors[name]} if name in tensors else {}
            for field, tensors in self.tensors().items()
        }
        return OptimizerState(kind=self.kind, num_steps=self.num_steps, **fields)

    def bounds(self) -> StateBounds:
        """The largest magnitudes, infinite where there is a NaN; reads all of the state.

        A master is at most as much larger than its bfloat16 weight as a step may round.
        """
        return StateBounds(
            weight=_largest(self._floats("weights")),
            first=_largest(self._floats(*_OF_FIRST)),
            second=_largest(self._floats(*_OF_SECOND)),
        )

    def is_finite(self) -> bool:
        """Whether all weights are, by `are_finite`, and all moments; reads all of the state."""
        masters = (
            join_float32(weight.view(torch.int16), self.weight_remainder[name])
            if name in self.weight_remainder
            else weight
            for name, weight in self.weights.items()
        )
        moments = self._floats(*_OF_FIRST, *_OF_SECOND)
        return all(map(are_finite, masters)) and math.isfinite(_largest(moments))

    def _floats(self, *fields: str) -> list[Tensor]:
        """All tensors of these fields that are no codes."""
        found = self.tensors()
        return [t for field in fields for t in found[field].values() if t.is_floating_point()]


def check_sum(name: str, weights: Tensor) -> None:
    """Raises INVALID_ARGUMENT where not all are finite."""
    if not are_finite(weights):
        raise invalid(f"weights[{name}]", "a sum that is not finite", "below 2**127 in magnitude")


def _largest(tensors: Sequence[Tensor]) -> float:
    """The largest magnitude, infinite where there is a NaN, 0 of nothing; waits for the device."""
    if not tensors:
        return 0.0
    maxima = [torch.linalg.vector_norm(tensor, math.inf).double() for tensor in tensors]
    largest = float(torch.stack(maxima).amax())
    return math.inf if math.isnan(largest) else largest


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
