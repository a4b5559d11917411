"""Which optimizer a trainer has, and what it keeps where the server leaves that open."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ratoon.errors import ErrorCode, RatoonError
from ratoon.train.config import AdamWConfig, OptimizerStates
from ratoon.train.numerics import DeviceMemory
from ratoon.train.optim.adamw import MasterAdamW, Optimizer
from ratoon.train.optim.bf16_adamw import Bf16AdamW
from ratoon.train.optim.bf16_state import initial_state
from ratoon.train.optim.parts import parts_of, shared_out

# Of a GPU, for activations, where there is a choice between 32 and 8 bits of moments.
_ACTIVATION_SHARE = 0.25
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


def choose_states(
    parameters: Mapping[str, Tensor], memory: DeviceMemory | None, num_ranks: int = 1
) -> OptimizerStates:
    """What a model of bfloat16 `parameters` keeps by `auto`: exact masters in any case.

    On a CPU (`memory` None), and where a quarter of the GPU stays for activations, with float32
    moments; else with moments in 8 bits. To be called when the model is on the device and neither
    gradient sums nor states are, of which each of `num_ranks` keeps a share. Raises
    RESOURCE_EXHAUSTED where these do not fit.
    """
    if memory is None:
        return OptimizerStates.BF16_SPLIT
    needed = {kind: needed_bytes(parameters, kind, num_ranks) for kind in OptimizerStates}
    if needed[OptimizerStates.BF16_SPLIT] + memory.total * _ACTIVATION_SHARE <= memory.free:
        return OptimizerStates.BF16_SPLIT
    if needed[OptimizerStates.BF16_SPLIT_8BIT] <= memory.free:
        return OptimizerStates.BF16_SPLIT_8BIT
    wanted = needed[OptimizerStates.BF16_SPLIT_8BIT]
    least = needed[OptimizerStates.BF16_8BIT]
    raise RatoonError(
        ErrorCode.RESOURCE_EXHAUSTED,
        f"optimizer_states: gradients and masters need {wanted} bytes beside the model, the GPU "
        f"has {memory.free}; bf16_8bit, which keeps no masters, would need {least} and has to be "
        "asked for by name",
        field="optimizer_states",
        got=str(wanted),
        expected=f"at most {memory.free}",
    )


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


def needed_bytes(
    parameters: Mapping[str, Tensor], kind: OptimizerStates, num_ranks: int = 1
) -> int:
    """Of gradient sums, float32, and of what the rank with the most keeps beside the weights."""
    weights = {name: p.detach().to("meta") for name, p in parameters.items()}
    shares = shared_out(parts_of(weights), num_ranks)
    own = max(shares, key=lambda parts: sum(part.stop - part.start for part in parts))
    parts = {part.name: part.of(weights[part.parameter]) for part in own}
    fields = initial_state(parts, kind).tensors().values()
    kept = [(parts[name], tensor) for tensors in fields for name, tensor in tensors.items()]
    states = sum(tensor.nbytes for weight, tensor in kept if tensor is not weight)
    return states + sum(4 * weight.numel() for weight in weights.values())
