"""Which optimizer a trainer has."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ratoon.train.config import OptimizerStates
from ratoon.train.optim.adamw import MasterAdamW, Optimizer
from ratoon.train.optim.bf16_adamw import Bf16AdamW
from ratoon_proto.types import AdamWConfig

# Below it the rounding of weights without masters is larger than their update (decision 0008).
_MIN_ROUNDED_RATE = 1e-5


def make_optimizer(
    parameters: Mapping[str, Tensor],
    config: AdamWConfig,
    kind: OptimizerStates,
    seed: int,
) -> Optimizer:
    """`seed` keys stochastic rounding. Raises what `Bf16AdamW` raises."""
    is_wide = all(p.dtype in (torch.float32, torch.float64) for p in parameters.values())
    if is_wide and kind is OptimizerStates.FP32:
        return MasterAdamW(parameters, config)
    return Bf16AdamW(parameters, config, kind, seed)


def rounding_warning(kind: OptimizerStates, learning_rate: float) -> tuple[str, ...]:
    """Of a step whose weights had no masters and hardly followed it; else none."""
    has_masters = kind not in (OptimizerStates.BF16_STOCHASTIC, OptimizerStates.BF16_8BIT)
    if has_masters or not 0.0 < learning_rate < _MIN_ROUNDED_RATE:
        return ()
    warning = (
        f"optim.learning_rate {learning_rate:g} is below {_MIN_ROUNDED_RATE:g}: {kind.value} "
        "rounds weights by more than they are updated; bf16_split_8bit keeps exact masters"
    )
    return (warning,)
