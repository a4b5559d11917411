"""How large a step was beside the weights: norms, estimated from a small sample of the weights.

A step reads and writes every weight once, and each kind of states in a way of its own; norms of all
of them would read them twice more. The sample is a fixed set of runs of neighbouring weights, the
same before and after the step, spread over all tensors by their size. It takes two small copies a
step, and its error is below a hundredth where a tensor's weights are alike, as they are.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ratoon.train.optim.rounding import join_float32
from ratoon.train.optim.state import OptimizerState

_NUM_RUNS = 64
_RUN_LENGTH = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """Sums of squares over a rank's weights: of the weights after a step, and of its changes."""

    weight_square: float
    update_square: float

    @classmethod
    def norms(cls, parts: Sequence[StepSize]) -> dict[str, float | None]:
        """Fields of a `StepReport`, over all ranks; None where no step was taken."""
        if not parts:
            return {"update_norm": None, "weight_norm": None}
        return {
            "update_norm": math.sqrt(sum(part.update_square for part in parts)),
            "weight_norm": math.sqrt(sum(part.weight_square for part in parts)),
        }


def sampled_weights(state: OptimizerState) -> Tensor:
    """A copy of at most 64 runs of 2048 weights, on their device; all weights, if that is all."""
    names = list(state.weights)
    ends = list(accumulate(state.weights[name].numel() for name in names))
    total = ends[-1] if ends else 0
    wholes: list[Tensor] = []
    remainders: list[Tensor] = []
    for run in range(_NUM_RUNS):
        start, stop = total * run // _NUM_RUNS, total * (run + 1) // _NUM_RUNS
        stop = min(stop, start + _RUN_LENGTH)
        while start < stop:
            place = bisect_right(ends, start)
            name, first = names[place], ends[place] - state.weights[names[place]].numel()
            here = slice(start - first, min(stop, ends[place]) - first)
            wholes.append(state.weights[name].view(-1)[here])
            if name in state.weight_remainder:
                remainders.append(state.weight_remainder[name].view(-1)[here])
            start = first + here.stop
    if not wholes:
        return torch.empty(0)
    if remainders:
        bits = torch.cat([whole.view(torch.int16) for whole in wholes])
        return join_float32(bits, torch.cat(remainders))
    return torch.cat(wholes)


def step_size(before: Tensor, state: OptimizerState) -> StepSize:
    """Measure the step that led to `state`; `before`: `sampled_weights` ahead of it. Waits once."""
    if not len(before):
        return StepSize(weight_square=0.0, update_square=0.0)
    after = sampled_weights(state).double()
    norms = torch.stack([torch.linalg.vector_norm(x) for x in (after, after - before.double())])
    scale = sum(weight.numel() for weight in state.weights.values()) / len(before)
    weight, update = norms.tolist()
    return StepSize(weight_square=scale * weight**2, update_square=scale * update**2)
