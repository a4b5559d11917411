"""How large a state can be after a step, given how large it was before; on the host alone.

So almost every step is known to be finite before anything is written, and no device is asked. A
bound that proves nothing decides nothing either: `Optimizer.stays_finite` then tries the step on
copies, which is exact. So whether a step is taken depends on the state and the step, and not on how
loose a bound has become.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ratoon.train.loss.spec import OptimStep
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
        mixed = config.beta1 * self.first + (1 - config.beta1) * gradient
        first = (mixed + _LOST * (self.first + gradient)) * _ROUNDED
        second = (config.beta2 * self.second + (1 - config.beta2) * square) * _ROUNDED
        rate = step.learning_rate / (1 - config.beta1**number)
        change = rate * first / min(1.0, config.eps)
        decay = step.learning_rate * step.weight_decay
        weight = (max(1.0, decay) * self.weight + change) * _ROUNDED
        numbers = (self.first + gradient, square, first, second, change, weight)
        # A NaN, as of infinity times 0, is not below the limit.
        if not all(each < FINITE for each in numbers):
            return None
        return StateBounds(weight=weight, first=first, second=second)
