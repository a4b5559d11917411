"""What is kept of bfloat16 parameters for AdamW, by kind, and how a step reads and writes it.

It is a few flat tensors per weight. How many there are and their dtypes say what they are, so that
one function steps all kinds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon.shards.parts import NO_MATRICES, Matrices, origin_of
from ratoon.train.optim.rounding import (
    BLOCK,
    decode_positive,
    decode_signed,
    encode_positive,
    encode_signed,
    join_float32,
    round_bf16,
    split_float32,
)
from ratoon.train.optim.state import OptimizerState
from ratoon.train.spec import OptimizerStates

# A parameter of fewer elements, or not of whole blocks, has bfloat16 moments and no codes.
MIN_8BIT_ELEMENTS = 4096

# By kind: the dtype of what completes a weight to float32 (a remainder, a master or nothing), and
# that of the moments.
_KEPT = {
    OptimizerStates.FP32: (torch.float32, torch.float32),
    OptimizerStates.BF16_SPLIT: (torch.int16, torch.float32),
    OptimizerStates.BF16_SPLIT_8BIT: (torch.int16, torch.uint8),
    OptimizerStates.BF16_STOCHASTIC: (None, torch.bfloat16),
    OptimizerStates.BF16_8BIT: (None, torch.uint8),
}
Tensors = tuple[Tensor, ...]
# Random ones for weight, first and second moment; None where nothing is rounded by them.
Words = tuple[Tensor, Tensor, Tensor] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Views:
    """A weight and what is kept beside it: flat views, or of rows of BLOCK where the moments are
    codes.

    `weights`: the bfloat16 weight alone; or its bits (int16) and the remainder (int16) or master
    (float32). `moments`: first and second, or the momentum alone, and as many scales where they are
    codes.
    `origin`: int32 [3], two keys of the parameter and the index of the first element in it.
    """

    name: str
    weights: Tensors
    moments: Tensors
    origin: Tensor


def initial_state(
    weights: Mapping[str, Tensor], kind: OptimizerStates, matrices: Matrices = NO_MATRICES
) -> OptimizerState:
    """The state before the first step, on the device of `weights` (bfloat16), parameters or parts.

    Those that consist of `matrices` have no second moments.
    """
    beside, moment = _KEPT[kind]
    can_code = {
        name
        for name, weight in weights.items()
        if weight.numel() >= MIN_8BIT_ELEMENTS and weight.numel() % BLOCK == 0
    }
    is_coded = moment is torch.uint8
    coded = can_code if is_coded else set[str]()

    has_second = {name: w for name, w in weights.items() if origin_of(name)[0] not in matrices}

    def moments(of: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: torch.zeros_like(
                weight, dtype=torch.bfloat16 if is_coded and name not in coded else moment
            )
            for name, weight in of.items()
        }

    def scales(of: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: torch.zeros(weight.numel() // BLOCK, device=weight.device)
            for name, weight in of.items()
            if name in coded
        }

    return OptimizerState(
        kind=kind,
        weights={n: w.float() if beside is torch.float32 else w for n, w in weights.items()},
        weight_remainder={
            n: torch.zeros_like(w, dtype=beside)
            for n, w in weights.items()
            if beside is torch.int16
        },
        exp_avg=moments(weights),
        exp_avg_sq=moments(has_second),
        exp_avg_scale=scales(weights),
        exp_avg_sq_scale=scales(has_second),
        num_steps=0,
    )


def views_of(state: OptimizerState, name: str, weight: Tensor, seed: int) -> Views:
    """What a step reads and writes of one weight: a parameter, or a part of one by its name."""
    weights = [weight]
    if name in state.weight_remainder:
        weights = [weight.view(torch.int16), state.weight_remainder[name]]
    elif state.weights[name].dtype is torch.float32:
        weights = [weight.view(torch.int16), state.weights[name]]
    moments = [m[name] for m in (state.exp_avg, state.exp_avg_sq) if name in m]
    scales = [s[name] for s in (state.exp_avg_scale, state.exp_avg_sq_scale) if name in s]
    parameter, start = origin_of(name)
    origin = [*keys_of(f"{seed}/{parameter}", 2), start]
    shape = (-1, BLOCK) if scales else (-1,)
    return Views(
        name=name,
        weights=tuple(tensor.view(shape) for tensor in weights),
        moments=(*(tensor.view(shape) for tensor in moments), *scales),
        origin=torch.tensor(origin, dtype=torch.int32, device=weight.device),
    )


def is_master(weights: Tensors) -> bool:
    """Whether a float32 master is beside the weight."""
    return len(weights) > 1 and weights[1].dtype is torch.float32


def is_rounded(weights: Tensors, moments: Tensors) -> bool:
    """Whether anything is rounded stochastically."""
    return len(weights) == 1 or moments[0].dtype is not torch.float32


def read_weights(weights: Tensors) -> Tensor:
    """float32."""
    if len(weights) == 1:
        return weights[0].float()
    return weights[1] if is_master(weights) else join_float32(*weights)


def write_weights(weights: Tensors, updated: Tensor, words: Words) -> Tensor:
    """Returns, as bool, which bfloat16 weights have other bits now."""
    if len(weights) == 1:
        assert words is not None
        rounded = round_bf16(updated, words[0])
        changed = rounded.view(torch.int16) != weights[0].view(torch.int16)
        weights[0].copy_(rounded)
        return changed
    bits, remainder = split_float32(updated)
    changed = bits != weights[0]
    weights[0].copy_(bits)
    weights[1].copy_(updated if is_master(weights) else remainder)
    return changed


def read_moments(moments: Tensors) -> tuple[Tensor, Tensor]:
    """float32."""
    m, v, *scales = moments
    if not scales:
        return m.float(), v.float()
    return decode_signed(m, scales[0]), decode_positive(v, scales[1])


def write_moments(moments: Tensors, updated: tuple[Tensor, Tensor], words: Words) -> None:
    m, v, *scales = moments
    if words is None or m.dtype is torch.float32:
        m.copy_(updated[0])
        v.copy_(updated[1])
    elif scales:
        for codes, scale_out, encoded in (
            (m, scales[0], encode_signed(updated[0], words[1])),
            (v, scales[1], encode_positive(updated[1], words[2])),
        ):
            codes.copy_(encoded[0])
            scale_out.copy_(encoded[1])
    else:
        m.copy_(round_bf16(updated[0], words[1]))
        v.copy_(round_bf16(updated[1], words[2]))


def read_momentum(moments: Tensors) -> Tensor:
    """float32, of a weight without a second moment."""
    momentum, *scales = moments
    return decode_signed(momentum, scales[0]) if scales else momentum.float()


def write_momentum(moments: Tensors, updated: Tensor, words: Words) -> None:
    """Store the momentum of a weight without a second moment."""
    momentum, *scales = moments
    if words is None or momentum.dtype is torch.float32:
        momentum.copy_(updated)
    elif scales:
        codes, scale = encode_signed(updated, words[1])
        momentum.copy_(codes)
        scales[0].copy_(scale)
    else:
        momentum.copy_(round_bf16(updated, words[1]))


def keys_of(text: str, count: int) -> list[int]:
    """`count` <= 8 numbers in [-2**31, 2**31) that depend on all of `text`."""
    digest = hashlib.sha256(text.encode()).digest()
    return [int.from_bytes(digest[4 * i : 4 * i + 4], "little", signed=True) for i in range(count)]
