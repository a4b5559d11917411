"""The optimizer of a trainer, by what it keeps.

Enters the trained parameters and the choice, leaves an `Optimizer`. Invariant: whatever is chosen,
a step is applied whole or, where the gradient is not finite or too large, touches nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn

from ratoon.train.config import AdamWConfig, OptimizerStates
from ratoon.train.loss_spec import OptimStep
from ratoon.train.narrow_adamw import NarrowAdamW
from ratoon.train.optimizer import MasterAdamW, OptimizerState, StepOutcome


class Optimizer(Protocol):
    """What a trainer needs; the methods are described at `MasterAdamW`."""

    def step(self, sums: Mapping[str, Tensor], divisor: float, step: OptimStep) -> StepOutcome: ...

    def state(self) -> OptimizerState: ...

    def load(self, state: OptimizerState) -> None: ...


def make_optimizer(
    parameters: Mapping[str, nn.Parameter],
    config: AdamWConfig,
    kind: OptimizerStates,
    seed: int,
) -> Optimizer:
    """`seed` keys the rounding of states without masters. Raises what `NarrowAdamW` raises."""
    if kind is OptimizerStates.FP32:
        return MasterAdamW(parameters, config)
    return NarrowAdamW(parameters, config, kind, seed)
