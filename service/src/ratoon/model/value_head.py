"""A value head: one number for each hidden state, beside the LM head.

In: hidden states [R, D], and a folder's tensors of a head. Out: values [R]. Invariant: values and
gradients are of float32 sums at least, whatever the model's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import PreTrainedModel

from ratoon.model.folder import ModelFolder
from ratoon.model.safetensors_files import (
    InMemory,
    Stored,
    add_tensors,
    check_finite,
    check_floats,
    check_names_and_shapes,
    on_meta,
    open_tensors,
    twice,
)
from ratoon_kernels.precision import accumulation_dtype

# Its place in a module, and the folder of its file in a model's: readers of models look at the
# files of the folder itself, where they would refuse tensors that are not the model's.
NAME = "value_head"
FILE = f"{NAME}/model.safetensors"
WEIGHT, BIAS = f"{NAME}.weight", f"{NAME}.bias"
# Names that a head has among a model's tensors: those of sequence and token classification in
# transformers, and of TRL.
_OTHER_NAMES = {"score.": f"{NAME}.", "v_head.summary.": f"{NAME}."}
# Rows that are widened at once: 64 MiB of a model of 16,384 features.
_BLOCK_ROWS = 1024


class ValueHead(nn.Module):
    """The map of a hidden state h to the value w h + b, zero at first."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, hidden_RD: Tensor) -> Tensor:
        """Values [R], float32 (float64 for a float64 model)."""
        return _Values.apply(hidden_RD, self.weight, self.bias)


class _Values(torch.autograd.Function):
    """Rows are widened block by block: all of them at once would take the memory of two or four
    more hidden states."""

    @staticmethod
    def forward(ctx: Any, hidden_RD: Tensor, weight_1D: Tensor, bias_1: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_RD, weight_1D)
        wide = accumulation_dtype(hidden_RD.dtype)
        weight_D = weight_1D[0].to(wide)
        value_R = hidden_RD.new_empty(len(hidden_RD), dtype=wide)
        for rows in _blocks(len(hidden_RD)):
            value_R[rows] = hidden_RD[rows].to(wide) @ weight_D
        return value_R.add_(bias_1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (dvalue_R,) = grads
        hidden_RD, weight_1D = ctx.saved_tensors
        wide = dvalue_R.dtype
        weight_D, dhidden_RD = weight_1D[0].to(wide), torch.empty_like(hidden_RD)
        dweight_D = torch.zeros_like(weight_D)
        for rows in _blocks(len(hidden_RD)):
            dhidden_RD[rows] = dvalue_R[rows, None] * weight_D
            dweight_D += dvalue_R[rows] @ hidden_RD[rows].to(wide)
        dtype = weight_1D.dtype
        return dhidden_RD, dweight_D[None].to(dtype), dvalue_R.sum()[None].to(dtype)


def _blocks(num_rows: int) -> Iterator[slice]:
    return (slice(start, start + _BLOCK_ROWS) for start in range(0, num_rows, _BLOCK_ROWS))


def value_head_of(module: nn.Module) -> ValueHead | None:
    """The value head of a model; None: it has none."""
    return cast("ValueHead | None", getattr(module, NAME, None))


def add_value_head(module: PreTrainedModel, stored: Mapping[str, Stored]) -> None:
    """Put a head on `module`, with the values that a folder has of one, or zeros.

    Raises INVALID_ARGUMENT naming a tensor of another shape or that is not finite.
    """
    weight = cast("Any", module.get_output_embeddings()).weight
    head = ValueHead(weight.shape[1], weight.dtype)
    if stored:
        check_floats(stored)
        like = {WEIGHT: head.weight, BIAS: head.bias}
        check_names_and_shapes({name: on_meta(name, each) for name, each in stored.items()}, like)
        with torch.no_grad():
            for name, parameter in like.items():
                tensor = stored[name][...]
                check_finite(name, tensor)
                parameter.copy_(tensor)
    module.add_module(NAME, head)


def take_head(stored: dict[str, Stored], folder: ModelFolder | None = None) -> dict[str, Stored]:
    """Take a head's tensors out of a model's; returns them by their own names, none or both.

    `folder`: the model's, whose file of a head is read, too. A bias that is not there is zero.
    Raises INVALID_ARGUMENT for a tensor that is there twice.
    """
    found = dict[str, Stored]()
    for name in [*stored]:
        own = own_name(name)
        if own in (WEIGHT, BIAS):
            if own in found:
                raise twice(name)
            found[own] = stored.pop(name)
    if folder is not None and folder.has(NAME):
        add_tensors(found, open_tensors(folder.below(NAME)))
    if WEIGHT in found and BIAS not in found:
        found[BIAS] = InMemory(dtype="F32", shape=[1], data=bytearray(4))
    return found


def own_name(name: str) -> str:
    """The name here of a tensor that others call otherwise."""
    for theirs, own in _OTHER_NAMES.items():
        if name.startswith(theirs):
            return own + name.removeprefix(theirs)
    return name


def first_values(parameters: Mapping[str, Parameter]) -> dict[str, Tensor]:
    """Copies of the head's values among a model's trained parameters."""
    return {
        name: parameter.detach().clone()
        for name, parameter in parameters.items()
        if is_of_head(name)
    }


def is_of_head(name: str) -> bool:
    """Whether a parameter, of a model or of one with an adapter, is the value head's."""
    return name.endswith((WEIGHT, BIAS))
