"""Tensors that a folder has in MXFP4, read as bfloat16.

In: a folder's tensors by name, with experts as blocks of packed values and their scales. Out: one
tensor for each pair, unpacked whenever it is read. Invariant: every value is exact: bfloat16 has
all products of a value of four bits and a scale. Source of the format: OCP Microscaling Formats,
version 1.0, section 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import cast

import torch
from torch import Tensor

from ratoon.errors import invalid
from ratoon.model.safetensors_files import Stored, tensor_field, twice

BLOCKS, SCALES = "_blocks", "_scales"
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_POSITIVE, *(-value for value in _POSITIVE))
# Bytes of a block, of two values each; the exponent's bias of its scale.
_BLOCK_BYTES = 16
_BIAS = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpacked:
    """A tensor [E, D, F] of experts, whose features D lie in blocks: as safetensors has tensors.

    `blocks`: uint8 [E, F, D / 32, 16], the lower half of a byte first. `scales`: uint8
    [E, F, D / 32].
    """

    blocks: Stored
    scales: Stored

    def get_shape(self) -> list[int]:
        """Shape of what is read."""
        experts, features, blocks, _ = self.blocks.get_shape()
        return [experts, blocks * 2 * _BLOCK_BYTES, features]

    def get_dtype(self) -> str:
        """Word of safetensors for what is read."""
        return "BF16"

    def __getitem__(self, _all: EllipsisType) -> Tensor:
        """Values of all experts, bfloat16."""
        blocks, scales = cast("Tensor", self.blocks[...]), cast("Tensor", self.scales[...])
        pairs = torch.cartesian_prod(torch.tensor(_VALUES), torch.tensor(_VALUES)).flip(1)
        value_EDF = torch.empty(self.get_shape(), dtype=torch.bfloat16)
        # One expert after the other, because what lies between takes several times its bytes.
        for value_DF, block, scale in zip(value_EDF, blocks, scales, strict=True):
            unscaled = pairs[block.int()].flatten(-2)
            exponent = scale.int()[..., None] - _BIAS
            value_DF.copy_(torch.ldexp(unscaled, exponent).flatten(1).T)
        return value_EDF


def unpack(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Tensors of a folder, those in MXFP4 under the names of what they stand for.

    Raises INVALID_ARGUMENT naming a tensor that is no half of one.
    """
    found = dict(stored)
    for name in stored:
        if not name.endswith(BLOCKS):
            continue
        own = name.removesuffix(BLOCKS)
        blocks, scales = found.pop(name), found.pop(own + SCALES, None)
        if scales is None:
            raise invalid(tensor_field(own + SCALES), "missing", f"the scales of {name}")
        *shape, num_bytes = blocks.get_shape()
        if len(shape) != 3 or num_bytes != _BLOCK_BYTES or blocks.get_dtype() != "U8":
            got = f"{blocks.get_dtype()} {tuple(blocks.get_shape())}"
            raise invalid(tensor_field(name), got, f"U8 of four dimensions, {_BLOCK_BYTES} last")
        if scales.get_shape() != shape or scales.get_dtype() != "U8":
            got = f"{scales.get_dtype()} {tuple(scales.get_shape())}"
            raise invalid(tensor_field(own + SCALES), got, f"U8 {tuple(shape)}")
        if own in found:
            raise twice(own)
        found[own] = Unpacked(blocks=blocks, scales=scales)
    return found
