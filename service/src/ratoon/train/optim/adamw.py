"""AdamW over weights that are their own masters, and the state that any kind of AdamW here has.

A step is applied whole or, where the gradient is not finite or above the step's limit, no weight
and no moment is touched.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from ratoon.errors import invalid
from ratoon.model.stored_weights import are_finite
from ratoon.train.config import AdamWConfig, OptimizerStates
from ratoon.train.loss.spec import OptimStep

# The same guard as torch's clip_grad_norm_.
CLIP_EPSILON = 1e-6
MAX_FLOAT32 = torch.finfo(torch.float32).max
# Smallest normal float32.
_TINY = 2.0**-126
# Elements of a gradient that go into the norm as one block.
_NORM_CHUNK = 1 << 25
# Below this norm the squares of a gradient's elements may be no normal float32.
_MIN_NORM = 2.0**-32
# Fields of a state that make up the weights.
_OF_WEIGHTS = ("weights", "weight_remainder")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """Everything that a step depends on beside its gradient; live tensors by parameter name."""

    kind: OptimizerStates
    # FP32: masters, float32, or float64 for float64 parameters. Else bfloat16, the parameters.
    weights: dict[str, Tensor]
    # BF16_SPLIT...: int16, what the weights lack of their masters (`rounding.split_float32`).
    weight_remainder: dict[str, Tensor]
    # FP32, BF16_SPLIT: as wide as masters. Else bfloat16, or uint8 codes with their scales below.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """`grad_norm` is after division, before clipping.

    Skipped: it is not finite. `changed`, on the device: how many bfloat16 weights have other bits;
    None where nobody asked, or weights are wider.
    """

    grad_norm: float
    skipped: bool
    changed: Tensor | None = None


class Optimizer(ABC):
    """Owns what is kept of some parameters, or of parts of them, and steps these alone.

    Ranks that have a part each measure one norm together and then `apply` it; `step` is both, of
    one who has all.
    """

    @property
    @abstractmethod
    def max_norm(self) -> float:
        """Above it a norm is of a gradient that is not finite in the dtype of the sums."""

    @abstractmethod
    def apply(
        self, sums: Mapping[str, Tensor], divisor: float, norm: float, step: OptimStep
    ) -> Tensor | None:
        """Divide `sums` by `divisor` (> 0), clip by the gradient's `norm` (after division), step.

        May change `sums`. Returns, on the device, how many bfloat16 weights have other bits; None
        where nobody asked, or weights are wider.
        """

    @abstractmethod
    def state(self) -> OptimizerState:
        """The live state; copy it before the next step."""

    @abstractmethod
    def load(self, state: OptimizerState) -> None:
        """Take over a state of the same kind, names and shapes, by copy."""

    @abstractmethod
    def check_sums(self, values: Mapping[str, Tensor]) -> None:
        """Whether weights and `values` add up to what is finite; raises INVALID_ARGUMENT."""

    @abstractmethod
    def set_weights(self, values: Mapping[str, Tensor], *, adds: bool, key: str) -> None:
        """Replace the weights by `values`, on any device and of the same names, or add these.

        Values are finite (`are_finite`), and so are sums (`check_sums`). Moments and step count
        stay. `key` names this change among all of the policy's, and what is rounded stochastically
        by it.
        """

    @abstractmethod
    def reset(self) -> None:
        """Moments and step count as before the first step; weights stay."""

    def step(self, sums: Mapping[str, Tensor], divisor: float, step: OptimStep) -> StepOutcome:
        """Divide `sums` by `divisor` (> 0), clip by the global norm, step.

        May change `sums`, which the caller clears afterwards in either outcome.
        """
        norm = global_norm(sums.values()) / divisor
        norm = math.inf if norm > self.max_norm else norm
        if not math.isfinite(norm):
            return StepOutcome(grad_norm=norm, skipped=True)
        return StepOutcome(
            grad_norm=norm, skipped=False, changed=self.apply(sums, divisor, norm, step)
        )


class MasterAdamW(Optimizer):
    """Of float32 or float64 weights (Loshchilov and Hutter, arXiv 1711.05101).

    Moments are there from the start: a state is complete before the first step.
    """

    def __init__(self, parameters: Mapping[str, Tensor], config: AdamWConfig) -> None:
        self._masters = dict(parameters)
        self._config = config
        # One pass over the state on a GPU; on a CPU the bits are those of the plain loop.
        is_fused = any(master.is_cuda for master in self._masters.values())
        is_float32 = all(master.dtype is torch.float32 for master in self._masters.values())
        self._max_norm = MAX_FLOAT32 if is_float32 else math.inf
        # The fused step's own scale of gradients is a float32: too coarse for float64.
        self._folds_scale = is_fused and is_float32
        self._adamw: torch.optim.AdamW | None = None
        if self._masters:
            self._adamw = torch.optim.AdamW(
                list(self._masters.values()),
                lr=0.0,
                betas=(config.beta1, config.beta2),
                eps=config.eps,
                weight_decay=config.weight_decay,
                fused=is_fused or None,
            )
        for master in self._masters.values():
            assert self._adamw is not None
            # The fused step counts on the device.
            counter_device = master.device if is_fused else torch.device("cpu")
            self._adamw.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=counter_device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }
        self._num_steps = 0

    @property
    def max_norm(self) -> float:
        return self._max_norm

    def apply(
        self, sums: Mapping[str, Tensor], divisor: float, norm: float, step: OptimStep
    ) -> None:
        """On a GPU float32 weights are read and written in one pass over 32 bytes per parameter,
        division and clipping in it."""
        self._num_steps += 1
        if self._adamw is None:
            return
        clip = min(1.0, step.max_grad_norm / (norm + CLIP_EPSILON))
        self._scale([sums[name] for name in self._masters], divisor, clip)
        config = step.adamw(self._config)
        for group in self._adamw.param_groups:
            group["lr"] = step.learning_rate
            group["betas"] = (config.beta1, config.beta2)
            group["eps"] = config.eps
            group["weight_decay"] = config.weight_decay
        for name, master in self._masters.items():
            master.grad = sums[name]
        self._adamw.step()
        for master in self._masters.values():
            # Of a part it is no parameter's own, and would outlive the sums.
            master.grad = None

    def state(self) -> OptimizerState:
        moments = {name: self._moments(master) for name, master in self._masters.items()}
        return OptimizerState(
            kind=OptimizerStates.FP32,
            weights={name: master.detach() for name, master in self._masters.items()},
            weight_remainder={},
            exp_avg={name: moment["exp_avg"] for name, moment in moments.items()},
            exp_avg_sq={name: moment["exp_avg_sq"] for name, moment in moments.items()},
            exp_avg_scale={},
            exp_avg_sq_scale={},
            num_steps=self._num_steps,
        )

    def load(self, state: OptimizerState) -> None:
        self.state().copy_from(state)
        for master in self._masters.values():
            self._moments(master)["step"].fill_(float(state.num_steps))
        self._num_steps = state.num_steps

    def check_sums(self, values: Mapping[str, Tensor]) -> None:
        for name in self._masters:
            check_sum(name, self._updated(name, values, adds=True))

    @torch.no_grad()
    def set_weights(self, values: Mapping[str, Tensor], *, adds: bool, key: str) -> None:
        """Nothing is rounded."""
        for name, master in self._masters.items():
            master.copy_(self._updated(name, values, adds=adds))

    def reset(self) -> None:
        state = self.state()
        state.clear_moments()
        self.load(replace(state, num_steps=0))

    def _moments(self, master: Tensor) -> dict[str, Tensor]:
        assert self._adamw is not None
        return self._adamw.state[master]

    def _updated(self, name: str, values: Mapping[str, Tensor], *, adds: bool) -> Tensor:
        master = self._masters[name].detach()
        value = values[name].to(master.device, master.dtype).view(master.shape)
        return master + value if adds else value

    def _scale(self, gradients: list[Tensor], divisor: float, clip: float) -> None:
        """Divide and clip `gradients`, or have the step do it."""
        if self._folds_scale:
            scale = divisor / clip if clip > 0.0 else math.inf
            if not _TINY <= scale <= MAX_FLOAT32:
                for gradient in gradients:
                    gradient.div_(divisor).mul_(clip)
                scale = 1.0
            # What torch's fused step divides gradients by (and its GradScaler sets).
            device = gradients[0].device
            cast("Any", self._adamw).grad_scale = torch.full((), scale, device=device)
            return
        for gradient in gradients:
            gradient.div_(divisor)
            if clip < 1.0:
                gradient.mul_(clip)


def check_sum(name: str, weights: Tensor) -> None:
    """Raises INVALID_ARGUMENT where not all are finite."""
    if not are_finite(weights):
        raise invalid(f"weights[{name}]", "a sum that is not finite", "below 2**127 in magnitude")


def global_norm(gradients: Iterable[Tensor]) -> float:
    """Euclidean norm over all elements of all tensors; waits for the device once or twice."""
    tensors = list(gradients)
    return norm_of_blocks(lambda exactly: block_norms(tensors, exactly=exactly))


def norm_of_blocks(norms_of_blocks: Callable[[bool], Sequence[float]]) -> float:
    """The same of all blocks, whose `block_norms` the argument gives, `exactly` or not.

    Where they overflow, or are so small that squares may have been lost, they are asked for again,
    exactly: only what is not finite has a norm that is not.
    """
    norm = _norm_of_norms(norms_of_blocks(False))
    if math.isnan(norm) or _MIN_NORM <= norm < math.inf:
        return norm
    return _norm_of_norms(norms_of_blocks(True))


def block_norms(gradients: Iterable[Tensor], *, exactly: bool) -> list[float]:
    """Euclidean norms of blocks of 2**25 elements; waits for the device once.

    Accumulated in float64; on a GPU, unless they are float64 or `exactly`, in float32 with a
    relative error below 1e-6.
    """
    blocks = [block for gradient in gradients for block in gradient.reshape(-1).split(_NORM_CHUNK)]
    if not blocks:
        return []
    if not exactly and all(b.is_cuda and b.dtype is not torch.float64 for b in blocks):
        norms = cast("Any", torch)._foreach_norm(blocks, 2.0, torch.float32)
    else:
        norms = [torch.linalg.vector_norm(block, dtype=torch.float64) for block in blocks]
    return torch.stack(list(norms)).double().tolist()


def _norm_of_norms(norms: Sequence[float]) -> float:
    return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64)))


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
