"""AdamW, and Muon of matrices, over weights that are their own masters; and what any kind of
optimizer here does.

A step is applied whole or, where the gradient is not finite or would make weights or moments that
are not, no weight and no moment is touched.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from ratoon.shards.parts import NO_MATRICES, Matrices, origin_of
from ratoon.train.loss.spec import OptimStep
from ratoon.train.optim.muon import MuonStep
from ratoon.train.optim.resolve import matching
from ratoon.train.optim.state import OptimizerState, StateBounds, check_sum
from ratoon.train.spec import OptimizerStates
from ratoon_proto.types import AdamWConfig, Decay

MAX_FLOAT32 = torch.finfo(torch.float32).max
# Smallest normal float32.
_TINY = 2.0**-126
# Elements of a gradient that go into the norm as one block.
_NORM_CHUNK = 1 << 25
# Below this norm the squares of a gradient's elements may be no normal float32.
_MIN_NORM = 2.0**-32
# As in `transformers.Trainer.get_decay_parameter_names`.
_NORM_OR_BIAS = re.compile(
    r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", re.IGNORECASE
)


class Optimizer(ABC):
    """Owns what is kept of some parameters, or of parts of them, and steps these alone.

    Ranks that have a part each measure one norm together, judge the step by `bounds_after` and,
    where that proves nothing, by `stays_finite`, and then `apply` it (`optimizer_step`).
    """

    _config: AdamWConfig
    # Bounds of the state as it is; None: nobody has measured it since it was changed from outside.
    _bounds: StateBounds | None = None

    @property
    @abstractmethod
    def max_norm(self) -> float:
        """Above it a norm is of a gradient that is not finite in the dtype of the sums."""

    @abstractmethod
    def _apply(
        self, sums: Mapping[str, Tensor], divisor: float, norm: float, step: OptimStep
    ) -> Tensor | None:
        """As `apply`."""

    @abstractmethod
    def _copy_of(self, name: str) -> Optimizer:
        """An optimizer that owns a copy of one parameter and of what is kept of it."""

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

    def bounds(self) -> StateBounds:
        """Upper bounds of the state. Reads it, and waits for the device, only where it was changed
        otherwise than by a step that `bounds_after` proved finite."""
        if self._bounds is None:
            self._bounds = self.state().bounds()
        return self._bounds

    def bounds_after(self, bounds: StateBounds, norm: float, step: OptimStep) -> StateBounds | None:
        """Bounds after the next step of a state of these `bounds`; None: it may not be finite."""
        number = self.state().num_steps + 1
        return bounds.after(step, step.adamw(self._config), number, norm)

    def stays_finite(
        self, sums: Mapping[str, Tensor], divisor: float, norm: float, step: OptimStep
    ) -> bool:
        """Whether `apply` would make finite weights and moments alone; changes nothing.

        Exact: where newly measured bounds do not prove it, the step is taken on a copy of one
        parameter after the other.
        """
        state = self.state()
        self._bounds = state.bounds()
        if self.bounds_after(self._bounds, norm, step) is not None:
            return True
        for name in state.weights:
            copy = self._copy_of(name)
            copy.apply({name: sums[name].clone()}, divisor, norm, step)
            if not copy.state().is_finite():
                return False
        return True

    def apply(
        self, sums: Mapping[str, Tensor], divisor: float, norm: float, step: OptimStep
    ) -> Tensor | None:
        """Divide `sums` by `divisor` (> 0), clip by the gradient's `norm` (after division), step.

        May change `sums`. Returns, on the device, how many bfloat16 weights have other bits; None
        where nobody asked, or weights are wider.
        """
        bounds, self._bounds = self._bounds, None
        after = None if bounds is None else self.bounds_after(bounds, norm, step)
        changed = self._apply(sums, divisor, norm, step)
        self._bounds = after
        return changed


@dataclass(frozen=True, slots=True)
class Rule:
    """How a parameter is stepped: the factor of its learning rate, and whether it decays."""

    lr_factor: float
    decays: bool

    def rate(self, step: OptimStep) -> float:
        return step.learning_rate * self.lr_factor

    def decay(self, step: OptimStep) -> float:
        """The share of a weight that decay takes away."""
        return self.rate(step) * step.weight_decay if self.decays else 0.0


def rule_of(name: str, config: AdamWConfig) -> Rule:
    """The rule of a parameter, or of a part of one, by its name."""
    parameter, _ = origin_of(name)
    decays = config.decay is Decay.ALL or not _NORM_OR_BIAS.search(parameter)
    for index in matching(config.groups, parameter):
        group = config.groups[index]
        return Rule(group.lr_factor, decays if group.decays is None else group.decays)
    return Rule(1.0, decays)


def muon_step(name: str, config: AdamWConfig, step: OptimStep, matrices: Matrices) -> MuonStep:
    """The step of a parameter, or of a part of one, that consists of `matrices`."""
    assert config.muon is not None
    rule = rule_of(name, config)
    return MuonStep(
        config=config.muon,
        learning_rate=rule.rate(step),
        decay=rule.decay(step),
        shape=matrices[origin_of(name)[0]],
    )


class MasterAdamW(Optimizer):
    """Of float32 or float64 weights (Loshchilov and Hutter, arXiv 1711.05101).

    Moments are there from the start: a state is complete before the first step. Muon steps the
    parameters that consist of `matrices`; its iterations run in the weights' dtype.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        config: AdamWConfig,
        matrices: Matrices = NO_MATRICES,
    ) -> None:
        self._masters = dict(parameters)
        self._config = config
        self._matrices = matrices
        # What is kept of the masters that Muon steps.
        self._momentum = {
            name: torch.zeros_like(master)
            for name, master in self._masters.items()
            if origin_of(name)[0] in matrices
        }
        self._rest = {n: m for n, m in self._masters.items() if n not in self._momentum}
        # One pass over the state on a GPU; on a CPU the bits are those of the plain loop.
        is_fused = any(master.is_cuda for master in self._masters.values())
        is_float32 = all(master.dtype is torch.float32 for master in self._masters.values())
        self._max_norm = MAX_FLOAT32 if is_float32 else math.inf
        # The fused step's own scale of gradients is a float32: too coarse for float64.
        self._folds_scale = is_fused and is_float32
        self._adamw: torch.optim.AdamW | None = None
        if self._rest:
            groups: dict[Rule, list[Tensor]] = {}
            for name, master in self._rest.items():
                groups.setdefault(rule_of(name, config), []).append(master)
            self._adamw = torch.optim.AdamW(
                [{"params": own, "rule": rule} for rule, own in groups.items()],
                lr=0.0,
                betas=(config.beta1, config.beta2),
                eps=config.eps,
                weight_decay=config.weight_decay,
                fused=is_fused or None,
            )
        for master in self._rest.values():
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

    def _apply(
        self, sums: Mapping[str, Tensor], divisor: float, norm: float, step: OptimStep
    ) -> None:
        """On a GPU float32 weights are read and written in one pass over 32 bytes per parameter,
        division and clipping in it."""
        self._num_steps += 1
        clip = step.clip_factor(norm)
        self._step_matrices(sums, divisor, clip, step)
        if self._adamw is None:
            return
        self._scale([sums[name] for name in self._rest], divisor, clip)
        config = step.adamw(self._config)
        for group in self._adamw.param_groups:
            rule: Rule = group["rule"]
            group["lr"] = rule.rate(step)
            group["betas"] = (config.beta1, config.beta2)
            group["eps"] = config.eps
            group["weight_decay"] = config.weight_decay if rule.decays else 0.0
        for name, master in self._rest.items():
            master.grad = sums[name]
        self._adamw.step()
        for master in self._rest.values():
            # Of a part it is no parameter's own, and would outlive the sums.
            master.grad = None

    @torch.no_grad()
    def _step_matrices(
        self, sums: Mapping[str, Tensor], divisor: float, clip: float, step: OptimStep
    ) -> None:
        for name, momentum in self._momentum.items():
            master = self._masters[name]
            _divide([sums[name]], divisor, clip)
            numbers = muon_step(name, self._config, step, self._matrices)
            changed = numbers.apply(master, momentum, sums[name].view_as(master), master.dtype)
            master.copy_(changed[0])
            momentum.copy_(changed[1])

    def state(self) -> OptimizerState:
        moments = {name: self._moments(master) for name, master in self._rest.items()}
        first = {name: moment["exp_avg"] for name, moment in moments.items()} | self._momentum
        return OptimizerState(
            kind=OptimizerStates.FP32,
            weights={name: master.detach() for name, master in self._masters.items()},
            weight_remainder={},
            exp_avg={name: first[name] for name in self._masters},
            exp_avg_sq={name: moment["exp_avg_sq"] for name, moment in moments.items()},
            exp_avg_scale={},
            exp_avg_sq_scale={},
            num_steps=self._num_steps,
        )

    def load(self, state: OptimizerState) -> None:
        self._bounds = None
        self.state().copy_from(state)
        for master in self._rest.values():
            self._moments(master)["step"].fill_(float(state.num_steps))
        self._num_steps = state.num_steps

    def check_sums(self, values: Mapping[str, Tensor]) -> None:
        for name in self._masters:
            check_sum(name, self._updated(name, values, adds=True))

    @torch.no_grad()
    def set_weights(self, values: Mapping[str, Tensor], *, adds: bool, key: str) -> None:
        """Nothing is rounded."""
        self._bounds = None
        for name, master in self._masters.items():
            master.copy_(self._updated(name, values, adds=adds))

    def reset(self) -> None:
        state = self.state()
        state.clear_moments()
        self.load(replace(state, num_steps=0))

    def _copy_of(self, name: str) -> MasterAdamW:
        own = {name: self._masters[name].detach().clone()}
        copy = MasterAdamW(own, self._config, self._matrices)
        copy.load(self.state().alone(name))
        return copy

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
        _divide(gradients, divisor, clip)


def _divide(gradients: Iterable[Tensor], divisor: float, clip: float) -> None:
    for gradient in gradients:
        gradient.div_(divisor)
        if clip < 1.0:
            gradient.mul_(clip)


def norm_of_blocks(norms_of_blocks: Callable[[bool], Sequence[float]]) -> float:
    """Euclidean norm of all blocks; the argument gives their `block_norms`, `exactly` or not.

    Where the norms overflow, or are so small that squares may have been lost, they are asked for
    again, exactly: only what is not finite has a norm that is not.
    """
    norm = _norm_of_norms(norms_of_blocks(False))
    if math.isnan(norm) or _MIN_NORM <= norm < math.inf:
        return norm
    return _norm_of_norms(norms_of_blocks(True))


def num_blocks(gradient: Tensor) -> int:
    """How many norms `block_norms` gives for a gradient."""
    return -(-gradient.numel() // _NORM_CHUNK)


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
