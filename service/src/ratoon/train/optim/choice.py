"""Which optimizer a trainer has, and what it keeps and shares out where that is left open."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.parts import parts_of, shared_out
from ratoon.train.config import AdamWConfig, OptimizerStates, Shard
from ratoon.train.numerics import DeviceMemory
from ratoon.train.optim.adamw import MasterAdamW, Optimizer
from ratoon.train.optim.bf16_adamw import Bf16AdamW
from ratoon.train.optim.bf16_state import initial_state
from ratoon.train.optim.gradients import sum_bytes
from ratoon.train.optim.layer_exchange import handed_bytes

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


def choose_layout(
    parameters: Mapping[str, Tensor],
    layers: Sequence[Collection[str]],
    memory: DeviceMemory | None,
    *,
    num_ranks: int = 1,
    states: OptimizerStates | None = None,
    shard: Shard | None = None,
) -> tuple[OptimizerStates, Shard]:
    """What a model of `parameters` keeps, and what its ranks share out, where None is given.

    A model of bfloat16 keeps exact masters in any case. Ranks share out states, or gradients too;
    moments are float32, or of 8 bits before more is shared out. It is the first of these that
    leaves a quarter of the GPU for activations, or where none does that of the fewest bytes; on a
    CPU (`memory` None) the first of all. `layers`: the names of each decoder layer's parameters, if
    gradients may be shared out. To be called when the model is on the device and neither gradient
    sums nor states are. Raises RESOURCE_EXHAUSTED where these do not fit.
    """
    shards = (shard,) if shard else (Shard.STATES, Shard.GRADIENTS)
    if shard is None and (memory is None or num_ranks == 1 or not layers):
        shards = (Shard.STATES,)
    kinds = (states,) if states else (OptimizerStates.BF16_SPLIT, OptimizerStates.BF16_SPLIT_8BIT)
    if memory is None or len(shards) == len(kinds) == 1:
        return kinds[0], shards[0]
    sharded = {Shard.STATES: (), Shard.GRADIENTS: layers, Shard.WEIGHTS: layers}
    needed = {
        (kind, each): needed_bytes(parameters, kind, num_ranks, sharded[each])
        for each in shards
        for kind in kinds
    }
    for choice, num_bytes in needed.items():
        if num_bytes + memory.total * _ACTIVATION_SHARE <= memory.free:
            return choice
    fewest = min(needed, key=needed.__getitem__)
    wanted = needed[fewest]
    if wanted <= memory.free:
        return fewest
    least = needed_bytes(parameters, OptimizerStates.BF16_8BIT, num_ranks, sharded[fewest[1]])
    each = ", ".join(f"{shard} {kind} {size}" for (kind, shard), size in needed.items())
    raise RatoonError(
        ErrorCode.RESOURCE_EXHAUSTED,
        f"optimizer_states: gradients and masters need {wanted} bytes beside the model, the GPU "
        f"has {memory.free} (bytes by what {num_ranks} ranks share out: {each}); bf16_8bit, which "
        f"keeps no masters, would need {least} and has to be asked for by name",
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
    parameters: Mapping[str, Tensor],
    kind: OptimizerStates,
    num_ranks: int = 1,
    sharded_layers: Sequence[Collection[str]] = (),
) -> int:
    """Of gradient sums and of what the rank with the most keeps beside the weights.

    `sharded_layers`: those of whose gradients a rank has its parts' sums alone; with what passes.
    """
    weights = {name: p.detach().to("meta") for name, p in parameters.items()}
    shares = shared_out(parts_of(weights), num_ranks)
    own = max(shares, key=lambda parts: sum(part.stop - part.start for part in parts))
    parts = {part.name: part.of(weights[part.parameter]) for part in own}
    fields = initial_state(parts, kind).tensors().values()
    kept = [(parts[name], tensor) for tensors in fields for name, tensor in tensors.items()]
    states = sum(tensor.nbytes for weight, tensor in kept if tensor is not weight)
    layers = [{name: weights[name] for name in layer} for layer in sharded_layers]
    sharded = {name for layer in layers for name in layer}
    summed = [weight for name, weight in weights.items() if name not in sharded]
    summed += [parts[part.name] for part in own if part.parameter in sharded]
    passing = handed_bytes(layers, num_ranks)
    return states + passing + sum(sum_bytes(weight) * weight.numel() for weight in summed)
