"""Optimizer states, and the layout and guard of a trainer that is given none. Imports no torch."""

from __future__ import annotations

from enum import StrEnum

from ratoon_proto.types import NumericsGuard, ParallelLayout


class OptimizerStates(StrEnum):
    """What is kept of a bfloat16 policy beside its gradients (docs/decisions/0008).

    FP32: float32 master weights and moments. BF16_SPLIT: the same master as the bfloat16 weight and
    the 16 bits that it lacks; BF16_SPLIT_8BIT: the moments in 8 bits besides. BF16_STOCHASTIC and
    BF16_8BIT have no master and round weights stochastically: at RL's learning rates the rounding
    is larger than the update.
    """

    FP32 = "fp32"
    BF16_SPLIT = "bf16_split"
    BF16_SPLIT_8BIT = "bf16_split_8bit"
    BF16_STOCHASTIC = "bf16_stochastic"
    BF16_8BIT = "bf16_8bit"


ONE_DEVICE = ParallelLayout()
DEFAULT_GUARD = NumericsGuard()
