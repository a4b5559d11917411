"""A packed micro-batch on the model's device, and one run of the model over it.

Log-probs and entropies are at the sampling temperature, in float32 (float64 for a float64 model).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratoon.model.policy_model import PolicyModel
from ratoon.model.router import RoutedTokens
from ratoon.rollout.packed import PackedBatch
from ratoon_kernels import TreeLayout, build_layout, token_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBatch:
    """T packed tokens, R predicting rows, M targets, L terms; all integers int64."""

    tokens_T: Tensor
    position_T: Tensor
    layout: TreeLayout
    # All of them, by the rollouts that each is part of.
    routed: RoutedTokens
    row_index_R: Tensor
    # float32.
    row_temperature_R: Tensor
    target_token_M: Tensor
    target_row_M: Tensor
    term_target_L: Tensor
    # Row that predicts each term's target.
    term_row_L: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutputs:
    """Log-prob of each target [M] and entropy of each predicting row [R]."""

    logprob_M: Tensor
    entropy_R: Tensor


def to_device(packed: PackedBatch, device: torch.device) -> DeviceBatch:
    """Copy the index arrays over and build the layout once for all layers."""
    forest = packed.forest
    return DeviceBatch(
        tokens_T=put(forest.tokens.astype(np.int64), device),
        position_T=put(packed.position, device),
        layout=build_layout(
            node_start=forest.node_start,
            node_stop=forest.node_stop,
            node_end=forest.node_end,
            node_parent=forest.node_parent,
            device=device,
        ),
        routed=RoutedTokens(
            copies_T=put(packed.copies, device),
            recorded_LTC=None if packed.routes is None else put(packed.routes, device),
        ),
        row_index_R=put(packed.row_index, device),
        row_temperature_R=put(packed.row_temperature, device),
        target_token_M=put(packed.target_token, device),
        target_row_M=put(packed.target_row, device),
        term_target_L=put(packed.term_target, device),
        term_row_L=put(packed.target_row[packed.term_target], device),
    )


def put(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """A host array as a tensor on `device`, same dtype; nothing waits for a GPU."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return tensor.to(device)
    # Only from pinned memory is a copy asynchronous; torch holds it until the copy is done. This
    # thread alone fills it: torch's own would each wait for a core, while a version is written.
    pinned = torch.empty_like(tensor, pin_memory=True)
    np.copyto(pinned.numpy(), tensor.numpy())
    return pinned.to(device, non_blocking=True)


def put_index(values: NDArray[np.int64], device: torch.device) -> slice | Tensor:
    """What picks these of a tensor's rows: a slice where each follows the one before."""
    if len(values) and (np.diff(values) == 1).all():
        return slice(int(values[0]), int(values[-1]) + 1)
    return put(values, device)


def run_model(model: PolicyModel, batch: DeviceBatch) -> TokenOutputs:
    """One forward; gradients flow where they are enabled."""
    hidden_TD = model.forward_hidden(batch.tokens_T, batch.position_T, batch.layout, batch.routed)
    logprob_M, entropy_R = token_logprobs(
        hidden_TD.index_select(0, batch.row_index_R),
        model.lm_head_VD,
        batch.target_token_M,
        batch.target_row_M,
        batch.row_temperature_R,
    )
    return TokenOutputs(logprob_M=logprob_M, entropy_R=entropy_R)
