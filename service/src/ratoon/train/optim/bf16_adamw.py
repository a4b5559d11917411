"""AdamW of bfloat16 parameters, one float32 formula for all that may be kept beside them; and Muon
of matrices, whose iterations alone are bfloat16.

What is kept (`OptimizerStates`) decides how a step reads and writes weights and moments, and
nothing else: states that keep the same masters and moments take the same steps, bit for bit. What
is rounded stochastically is right in the mean, by words that are a function of seed, parameter,
element and number of the step, so that a step done again is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ratoon.errors import invalid
from ratoon.shards.parts import NO_MATRICES, Matrices, origin_of
from ratoon.train.loss.spec import OptimStep
from ratoon.train.optim.adamw import (
    MAX_FLOAT32,
    MasterAdamW,
    Optimizer,
    Rule,
    muon_step,
    rule_of,
)
from ratoon.train.optim.bf16_state import (
    Tensors,
    Views,
    initial_state,
    is_master,
    is_rounded,
    keys_of,
    read_moments,
    read_momentum,
    read_weights,
    views_of,
    write_moments,
    write_momentum,
    write_weights,
)
from ratoon.train.optim.rounding import MAX_SQUARE, random_words, split_float32
from ratoon.train.optim.state import OptimizerState, check_sum
from ratoon.train.spec import OptimizerStates
from ratoon.warning_kinds import WarningKind, warn
from ratoon_proto.types import AdamWConfig, StepWarning

# Indices are int32, beyond the end of the last elements too.
_MAX_ELEMENTS = (1 << 31) - (1 << 16)


_StepViews = Callable[
    [Tensor, Tensors, Tensors, tuple[Tensor, Tensor], Tensor, bool], Tensor | None
]


class Bf16AdamW(Optimizer):
    """Owns what is kept of `parameters` beside their bfloat16 weights, from the start.

    `seed` keys the rounding. Raises `RatoonError` INVALID_ARGUMENT where one is not bfloat16.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        config: AdamWConfig,
        kind: OptimizerStates,
        seed: int,
        matrices: Matrices = NO_MATRICES,
    ) -> None:
        """Muon steps the parameters that consist of `matrices`."""
        _check(parameters, kind)
        self._config = config
        self._matrices = matrices
        self._kind = kind
        self._seed = seed
        weights = {name: parameter.detach() for name, parameter in parameters.items()}
        self._live = initial_state(weights, kind, matrices)
        self._rules = {name: rule_of(name, config) for name in weights}
        self._views = [views_of(self._live, name, weight, seed) for name, weight in weights.items()]
        devices = {weight.device for weight in weights.values()}
        self._device = devices.pop() if devices else torch.device("cpu")
        self._step_views: _StepViews = _step_views
        if self._device.type == "cuda":
            from ratoon.train.optim.kernels import step_weight

            self._step_views = step_weight

    @property
    def max_norm(self) -> float:
        return MAX_FLOAT32

    def _apply(
        self, sums: Mapping[str, Tensor], divisor: float, norm: float, step: OptimStep
    ) -> Tensor | None:
        """`sums`, float32 or bfloat16, stay."""
        number = self._live.num_steps + 1
        scale = step.clip_factor(norm) / divisor
        config = step.adamw(self._config)
        keys = keys_of(f"{self._seed}/{number}", 2)
        keys = self._upload(torch.tensor(keys, dtype=torch.int32))
        numbers = {
            rule: self._upload(
                torch.tensor(_numbers(config, rule, step, scale, number), dtype=torch.float32)
            )
            for rule in dict.fromkeys(self._rules.values())
        }
        counts: list[Tensor] = []
        with torch.cuda.device_of(keys):
            for views in self._views:
                gradient = sums[views.name].view(views.weights[0].shape)
                if origin_of(views.name)[0] in self._matrices:
                    changed = self._step_matrices(views, gradient, scale, step, keys)
                else:
                    changed = self._step_views(
                        gradient,
                        views.weights,
                        views.moments,
                        (numbers[self._rules[views.name]], keys),
                        views.origin,
                        step.changed_share,
                    )
                if changed is not None:
                    counts.append(changed.view(-1))
        self._live = replace(self._live, num_steps=number)
        return torch.cat(counts).sum() if counts else None

    @torch.no_grad()
    def _step_matrices(
        self, views: Views, gradient: Tensor, scale: float, step: OptimStep, keys: Tensor
    ) -> Tensor | None:
        """One step of Muon, whose arithmetic is float32 but for the iterations; as `_StepViews`."""
        numbers = muon_step(views.name, self._config, step, self._matrices)
        weight, momentum = read_weights(views.weights), read_momentum(views.moments)
        weight, momentum = numbers.apply(weight, momentum, gradient.float() * scale, torch.bfloat16)
        words = None
        if is_rounded(views.weights, views.moments):
            words = _words(gradient.shape, views.origin, keys)
        changed = write_weights(views.weights, weight, words)
        write_momentum(views.moments, momentum, words)
        return changed.sum(dtype=torch.int32) if step.changed_share else None

    def state(self) -> OptimizerState:
        return self._live

    def load(self, state: OptimizerState) -> None:
        self._bounds = None
        self._live.copy_from(state)
        self._live = replace(self._live, num_steps=state.num_steps)
        for views in self._views:
            if is_master(views.weights):
                bits, master = views.weights
                bits.copy_(split_float32(master)[0])

    @torch.no_grad()
    def check_sums(self, values: Mapping[str, Tensor]) -> None:
        for views in self._views:
            check_sum(views.name, self._updated(views, values, adds=True))

    @torch.no_grad()
    def set_weights(self, values: Mapping[str, Tensor], *, adds: bool, key: str) -> None:
        """Masters are exact, what has none is rounded by `key`."""
        self._bounds = None
        keys = torch.tensor(keys_of(f"{self._seed}/{key}", 2), dtype=torch.int32)
        keys = self._upload(keys)
        for views in self._views:
            has_masters = len(views.weights) > 1
            words = None if has_masters else _words(views.weights[0].shape, views.origin, keys)
            write_weights(views.weights, self._updated(views, values, adds=adds), words)

    def reset(self) -> None:
        self._bounds = None
        self._live.clear_moments()
        self._live = replace(self._live, num_steps=0)

    def _copy_of(self, name: str) -> Bf16AdamW:
        state = self._live.alone(name)
        weight = state.weights[name].to(torch.bfloat16, copy=True)
        copy = Bf16AdamW({name: weight}, self._config, self._kind, self._seed, self._matrices)
        copy.load(state)
        return copy

    def _updated(self, views: Views, values: Mapping[str, Tensor], *, adds: bool) -> Tensor:
        value = values[views.name].to(self._device, torch.float32).view(views.weights[0].shape)
        return read_weights(views.weights) + value if adds else value

    def _upload(self, host: Tensor) -> Tensor:
        """To the device without waiting for it."""
        if self._device.type != "cuda":
            return host
        return host.pin_memory().to(self._device, non_blocking=True)


def _step_views(
    gradient: Tensor,
    weights: Tensors,
    moments: Tensors,
    scalars: tuple[Tensor, Tensor],
    origin: Tensor,
    is_counted: bool,
) -> Tensor | None:
    """One step of AdamW for one weight, in float32, in place; a GPU's is `step_kernel.step_weight`.

    Returns, where that is asked for, how many weights have other bits: int32, of each row or of
    all.

    `gradient`: [n] or [n / BLOCK, BLOCK] as the weight, not yet divided; `scalars`:
    `_numbers`, and two keys of the step. Decay is part of the update and not a factor of its own:
    a weight is rounded once, and a decay below half an ulp still counts.
    """
    numbers, keys = scalars
    scale, decay, step_size, root_factor, beta1_rest, beta2, beta2_rest, eps = numbers.unbind()
    m, v = read_moments(moments)
    g = gradient.float() * scale
    m = m + beta1_rest * (g - m)
    v = (v * beta2 + beta2_rest * g * g).clamp(max=MAX_SQUARE)
    weight = read_weights(weights)
    update = decay * weight + step_size * m / (v.sqrt() * root_factor + eps)
    words = None
    if is_rounded(weights, moments):
        words = _words(gradient.shape, origin, keys)
    changed = write_weights(weights, weight - update, words)
    write_moments(moments, (m, v), words)
    return changed.sum(-1, dtype=torch.int32) if is_counted else None


def _words(shape: torch.Size, origin: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Random ones for each element of a weight, by its `Views.origin` and two keys of a change."""
    index = torch.arange(shape.numel(), dtype=torch.int32, device=origin.device)
    return random_words(index.view(shape) + origin[2], origin[:2], keys)


def _numbers(
    config: AdamWConfig, rule: Rule, step: OptimStep, gradient_scale: float, number: int
) -> list[float]:
    """What a step multiplies with, in the order of `_step_views`; `number` counts from 1."""
    return [
        gradient_scale,
        rule.decay(step),
        rule.rate(step) / (1.0 - config.beta1**number),
        1.0 / math.sqrt(1.0 - config.beta2**number),
        1.0 - config.beta1,
        config.beta2,
        1.0 - config.beta2,
        config.eps,
    ]


def _check(parameters: Mapping[str, Tensor], kind: OptimizerStates) -> None:
    for name, parameter in parameters.items():
        if parameter.dtype is not torch.bfloat16:
            raise invalid("optimizer_states", kind.value, f"fp32, for {name} is {parameter.dtype}")
        assert parameter.is_contiguous()
        assert parameter.numel() < _MAX_ELEMENTS


# Below it the rounding of weights without masters is larger than their update (decision 0008).
_MIN_ROUNDED_RATE = 1e-5


def make_optimizer(
    parameters: Mapping[str, Tensor],
    config: AdamWConfig,
    kind: OptimizerStates,
    seed: int,
    matrices: Matrices = NO_MATRICES,
) -> Optimizer:
    """`seed` keys stochastic rounding; Muon steps the parameters that consist of `matrices`.

    Raises what `Bf16AdamW` raises.
    """
    is_wide = all(p.dtype in (torch.float32, torch.float64) for p in parameters.values())
    if is_wide and kind is OptimizerStates.FP32:
        return MasterAdamW(parameters, config, matrices)
    return Bf16AdamW(parameters, config, kind, seed, matrices)


def rounding_warning(kind: OptimizerStates, learning_rate: float) -> tuple[StepWarning, ...]:
    """A warning if the weights have no masters and hardly follow a step; else none."""
    has_masters = kind not in (OptimizerStates.BF16_STOCHASTIC, OptimizerStates.BF16_8BIT)
    if has_masters or not 0.0 < learning_rate < _MIN_ROUNDED_RATE:
        return ()
    text = (
        f"optim.learning_rate {learning_rate:g} is below {_MIN_ROUNDED_RATE:g}: {kind.value} "
        "rounds weights by more than they are updated; bf16_split_8bit keeps exact masters"
    )
    return (warn(WarningKind.ROUNDED_UPDATES, text),)
