"""AdamW without masters: bfloat16 weights, and moments in bfloat16 or 8 bits, rounded at random.

Enters gradient sums (float32) and an `OptimStep`, changes the weights, leaves the gradient norm.
Invariant: the arithmetic is float32 and what is kept of it is right in the mean; the bits are a
function of state, gradients, seed and number of the step, so that a step done again is the same.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from ratoon.errors import invalid
from ratoon.train.config import AdamWConfig, OptimizerStates
from ratoon.train.loss_spec import OptimStep
from ratoon.train.optimizer import (
    CLIP_EPSILON,
    MAX_FLOAT32,
    OptimizerState,
    StepOutcome,
    global_norm,
)
from ratoon.train.rounding import (
    BLOCK,
    decode_positive,
    decode_signed,
    encode_positive,
    encode_signed,
    mix,
    round_bf16,
)

# A parameter of fewer elements, or not of whole blocks, keeps bfloat16 moments.
MIN_8BIT_ELEMENTS = 4096
# Elements that a step computes at a time, a multiple of BLOCK: few calls, of which each costs the
# host tens of microseconds, against what is kept for a moment beside the states.
_CHUNK = 1 << 25
# Indices are int32.
_MAX_ELEMENTS = 1 << 31
# Second moments end here, where rounding them up is still finite.
_MAX_SQUARE = 1e38

_StepChunk = Callable[[Tensor, tuple[Tensor, ...], tuple[Tensor, Tensor], Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """A part of one parameter; the tensors are flat views of it, or of rows of BLOCK where the
    moments are codes: a compiler then has the maxima of the blocks and all else in one loop.

    `tensors`: weight, first and second moment, and the two scales where the moments are codes.
    `origin`: int32 [3], two keys of the parameter and the index of the part's first element.
    """

    name: str
    start: int
    tensors: tuple[Tensor, ...]
    origin: Tensor


class NarrowAdamW:
    """Owns the moments of `parameters`, whose bfloat16 weights are the only ones there are.

    `seed` keys the rounding. Raises `RatoonError` INVALID_ARGUMENT where one is not bfloat16.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: AdamWConfig,
        kind: OptimizerStates,
        seed: int,
    ) -> None:
        _check(parameters, kind)
        self._config = config
        self._seed = seed
        self._live = _zero_state(parameters, kind)
        self._chunks = [
            chunk for name in parameters for chunk in _chunks(self._live, name, _CHUNK, seed)
        ]
        self._device = next(iter(parameters.values())).device
        # Compiled, a step touches each element once; on a CPU that is not worth a compiler.
        if self._device.type == "cuda":
            self._step_chunk = cast(
                "_StepChunk", torch.compile(_step_chunk, dynamic=True, fullgraph=True)
            )
        else:
            self._step_chunk = _step_chunk

    def step(self, sums: Mapping[str, Tensor], divisor: float, step: OptimStep) -> StepOutcome:
        """Divide by `divisor` (> 0), clip by the global norm, step; `sums` (float32) stay."""
        norm = global_norm(sums.values()) / divisor
        if not norm <= MAX_FLOAT32:
            return StepOutcome(grad_norm=norm if math.isnan(norm) else math.inf, skipped=True)
        if norm > step.max_norm_to_step:
            return StepOutcome(grad_norm=norm, skipped=True)
        clip = min(1.0, step.max_grad_norm / (norm + CLIP_EPSILON))
        number = self._live.num_steps + 1
        numbers = _numbers(self._config, step, clip / divisor, number)
        keys = _keys(f"{self._seed}/{number}", 2)
        scalars = (
            self._upload(torch.tensor(numbers, dtype=torch.float32)),
            self._upload(torch.tensor(keys, dtype=torch.int32)),
        )
        for chunk in self._chunks:
            stop = chunk.start + chunk.tensors[0].numel()
            gradient = sums[chunk.name].view(-1)[chunk.start : stop]
            gradient = gradient.view(chunk.tensors[0].shape).data
            self._step_chunk(gradient, chunk.tensors, scalars, chunk.origin)
        self._live = replace(self._live, num_steps=number)
        return StepOutcome(grad_norm=norm, skipped=False)

    def state(self) -> OptimizerState:
        """The live state; copy it before the next step."""
        return self._live

    def load(self, state: OptimizerState) -> None:
        """Take over a state of the same kind, names and shapes, by copy."""
        self._live.copy_from(state)
        self._live = replace(self._live, num_steps=state.num_steps)

    def _upload(self, host: Tensor) -> Tensor:
        """To the device without waiting for it."""
        if self._device.type != "cuda":
            return host
        return host.pin_memory().to(self._device, non_blocking=True)


def _step_chunk(
    gradient: Tensor, tensors: tuple[Tensor, ...], scalars: tuple[Tensor, Tensor], origin: Tensor
) -> None:
    """One step of AdamW for a part of a parameter, as torch's, in float32, in place.

    `gradient`: float32 [n] or [n / BLOCK, BLOCK] as the weight, not yet divided; `scalars`:
    `_numbers`, and two keys of the step.

    Bytes a parameter: 16 read and written with bfloat16 moments, 12 with codes, and 4 before
    that for the norm.
    """
    numbers, keys = scalars
    scale, keep, step_size, root_correction, beta1_rest, beta2, beta2_rest, eps = numbers.unbind()
    weight, exp_avg, exp_avg_sq, *scales = tensors
    if scales:
        # So that a compiler knows the length of a row.
        assert weight.shape[1] == BLOCK
        m, v = decode_signed(exp_avg, scales[0]), decode_positive(exp_avg_sq, scales[1])
    else:
        m, v = exp_avg.float(), exp_avg_sq.float()
    g = gradient * scale
    m = m + beta1_rest * (g - m)
    v = (v * beta2 + beta2_rest * g * g).clamp(max=_MAX_SQUARE)
    updated = weight.float() * keep - step_size * m / (v.sqrt() / root_correction + eps)
    index = torch.arange(weight.numel(), dtype=torch.int32, device=weight.device)
    index = index.view(weight.shape) + origin[2]
    words = mix(mix(index ^ origin[0]) ^ mix(keys[0] ^ origin[1]))
    words_m = mix(words + keys[1])
    words_v = mix(words_m + keys[1])
    weight.copy_(round_bf16(updated, words))
    if scales:
        for codes, scale_out, encoded in (
            (exp_avg, scales[0], encode_signed(m, words_m)),
            (exp_avg_sq, scales[1], encode_positive(v, words_v)),
        ):
            codes.copy_(encoded[0])
            scale_out.copy_(encoded[1])
    else:
        exp_avg.copy_(round_bf16(m, words_m))
        exp_avg_sq.copy_(round_bf16(v, words_v))


def _numbers(
    config: AdamWConfig, step: OptimStep, gradient_scale: float, number: int
) -> list[float]:
    """What a step multiplies with, in the order of `_step_chunk`; `number` counts from 1."""
    return [
        gradient_scale,
        1.0 - step.learning_rate * step.weight_decay,
        step.learning_rate / (1.0 - config.beta1**number),
        math.sqrt(1.0 - config.beta2**number),
        1.0 - config.beta1,
        config.beta2,
        1.0 - config.beta2,
        config.eps,
    ]


def _keys(text: str, count: int) -> list[int]:
    """`count` <= 8 numbers in [-2**31, 2**31) that depend on all of `text`."""
    digest = hashlib.sha256(text.encode()).digest()
    return [int.from_bytes(digest[4 * i : 4 * i + 4], "little", signed=True) for i in range(count)]


def _check(parameters: Mapping[str, nn.Parameter], kind: OptimizerStates) -> None:
    for name, parameter in parameters.items():
        if parameter.dtype is not torch.bfloat16:
            raise invalid("optimizer_states", kind.value, f"fp32, for {name} is {parameter.dtype}")
        assert parameter.is_contiguous()
        assert parameter.numel() < _MAX_ELEMENTS


def _zero_state(parameters: Mapping[str, nn.Parameter], kind: OptimizerStates) -> OptimizerState:
    weights = {name: parameter.detach() for name, parameter in parameters.items()}
    coded = {
        name
        for name, weight in weights.items()
        if kind is OptimizerStates.BF16_8BIT
        and weight.numel() >= MIN_8BIT_ELEMENTS
        and weight.numel() % BLOCK == 0
    }

    def moments() -> dict[str, Tensor]:
        return {
            name: torch.zeros_like(weight, dtype=torch.uint8 if name in coded else torch.bfloat16)
            for name, weight in weights.items()
        }

    def scales() -> dict[str, Tensor]:
        return {
            name: torch.zeros(weights[name].numel() // BLOCK, device=weights[name].device)
            for name in weights
            if name in coded
        }

    return OptimizerState(
        kind=kind,
        weights=weights,
        exp_avg=moments(),
        exp_avg_sq=moments(),
        exp_avg_scale=scales(),
        exp_avg_sq_scale=scales(),
        num_steps=0,
    )


def _chunks(state: OptimizerState, name: str, size: int, seed: int) -> list[_Chunk]:
    """The parts of one parameter, of `size` (a multiple of BLOCK) elements and a rest."""
    weight = state.weights[name]
    flat = [state.weights[name], state.exp_avg[name], state.exp_avg_sq[name]]
    scales = [s[name] for s in (state.exp_avg_scale, state.exp_avg_sq_scale) if name in s]
    keys = _keys(f"{seed}/{name}", 2)
    found: list[_Chunk] = []
    for start in range(0, weight.numel(), size):
        part = slice(start, start + size)
        scale_part = slice(start // BLOCK, (start + size) // BLOCK)
        shape = (-1, BLOCK) if scales else (-1,)
        parts = (tensor.view(-1)[part].view(shape) for tensor in flat)
        # `.data` is no view: of a view, the compiler would look at the shape of the whole too, and
        # compile anew for each kind of it.
        tensors = tuple(t.data for t in (*parts, *(scale[scale_part] for scale in scales)))
        origin = torch.tensor([*keys, start], dtype=torch.int32, device=weight.device)
        found.append(_Chunk(name=name, start=start, tensors=tensors, origin=origin))
    return found
