"""How much of a device a pass used: its FLOPs, over the device's peak where that is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from ratoon.model.policy_model import PolicyModel
from ratoon.rollout.batch import RolloutBatch, sequence_lengths
from ratoon.rollout.packed import UpdatePlan
from ratoon.rollout.selection import trained_lengths
from ratoon.train.numerics import peak_memory_bytes
from ratoon.train.passes import ForwardColumns, PassTotals

# Dense bfloat16 peak, FLOP/s, by a part of the device's name; the first that fits.
_BF16_PEAKS = (("H200", 989e12), ("H100", 989e12), ("A100", 312e12), ("B200", 2250e12))


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes that decide the work. Parameters are of the decoder layers, active ones per token."""

    layer_parameters: float
    trained_layer_parameters: float
    head_is_trained: bool
    num_layers: int
    num_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one pass over a batch runs through the model."""

    tokens: int
    # Rows that reach the LM head.
    rows: int
    # (query, key) pairs of one head of one layer.
    pairs: int


def geometry(model: PolicyModel) -> Geometry:
    """Read the sizes off a model; of routed experts the share that one token visits."""
    config = cast("Any", model.config)
    active = getattr(config, "num_experts_per_tok", None) or 1
    experts = getattr(config, "num_experts", None) or 1
    outside = {id(model.module.get_input_embeddings().weight), id(model.lm_head_VD)}
    all_layers = trained_layers = 0.0
    for name, parameter in model.module.named_parameters():
        if id(parameter) in outside:
            continue
        share = active / experts if ".experts." in name else 1.0
        all_layers += share * parameter.numel()
        trained_layers += share * parameter.numel() * parameter.requires_grad
    return Geometry(
        layer_parameters=all_layers,
        trained_layer_parameters=trained_layers,
        head_is_trained=model.lm_head_VD.requires_grad,
        num_layers=int(config.num_hidden_layers),
        num_heads=int(config.num_attention_heads),
        head_dim=int(
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        ),
        hidden_size=int(config.hidden_size),
        vocab_size=int(model.lm_head_VD.shape[0]),
    )


def packed_work(plan: UpdatePlan, rows: int) -> Work:
    """What the plan runs; `rows` are its distinct predicting rows."""
    return Work(tokens=plan.packed_tokens, rows=rows, pairs=plan.packed_pairs)


def logical_work(batch: RolloutBatch, plan: UpdatePlan) -> Work:
    """What replicated batches would run, attention counted without its causal half."""
    run = np.concatenate(
        [np.array(part.sequences, np.int64) for part in plan.micro_batches] or [np.array([], int)]
    )
    length_S = sequence_lengths(batch)[run]
    trained_S = trained_lengths(batch, batch.loss_mask)[run]
    return Work(
        tokens=plan.unshared_tokens, rows=int(trained_S.sum()), pairs=int((length_S**2).sum())
    )


def training_flops(sizes: Geometry, work: Work) -> float:
    """FLOPs of one forward and backward; recomputation is not counted.

    A weight costs 2 a token forward, 2 for the gradient of its input and 2 for its own where it is
    trained; a (query, key) pair 14 a head dimension: two products forward, five backward.
    """
    layers = work.tokens * (4 * sizes.layer_parameters + 2 * sizes.trained_layer_parameters)
    per_head_weight = 6 if sizes.head_is_trained else 4
    head = per_head_weight * sizes.vocab_size * sizes.hidden_size * work.rows
    attention = 14 * sizes.head_dim * sizes.num_heads * sizes.num_layers * work.pairs
    return float(layers + head + attention)


def forward_flops(sizes: Geometry, work: Work) -> float:
    """FLOPs of one forward alone."""
    layers = 2 * work.tokens * sizes.layer_parameters
    head = 2 * sizes.vocab_size * sizes.hidden_size * work.rows
    attention = 4 * sizes.head_dim * sizes.num_heads * sizes.num_layers * work.pairs
    return float(layers + head + attention)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of the device for `dtype`; None where it is not known, as on any CPU."""
    if device.type != "cuda" or dtype is not torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _BF16_PEAKS if part in name), None)


def utilisation(flops: float, seconds: float, peak: float | None) -> float | None:
    """Share of the peak; None without a peak or a time."""
    if peak is None or seconds <= 0:
        return None
    return flops / seconds / peak


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Share of the device's peak, None where that is not known; memory in bytes."""

    hardware_mfu: float | None
    logical_mfu: float | None
    peak_memory_bytes: int


class UsageMeter:
    """Holds the sizes of one model and the peak of its devices, of which each has it whole."""

    def __init__(self, model: PolicyModel, num_devices: int) -> None:
        self._device = model.device
        self._geometry = geometry(model)
        peak = peak_flops(model.device, model.lm_head_VD.dtype)
        self._peak_flops = None if peak is None else peak * num_devices

    def training(self, batch: RolloutBatch, plan: UpdatePlan, totals: PassTotals) -> Usage:
        """Usage of a forward-backward."""
        packed = packed_work(plan, totals.rows)
        logical = logical_work(batch, plan)
        return self._usage(
            training_flops(self._geometry, packed),
            training_flops(self._geometry, logical),
            totals.forward_s + totals.backward_s,
        )

    def forward(self, batch: RolloutBatch, plan: UpdatePlan, columns: ForwardColumns) -> Usage:
        """Usage of a forward alone."""
        packed = packed_work(plan, columns.rows)
        logical = logical_work(batch, plan)
        return self._usage(
            forward_flops(self._geometry, packed),
            forward_flops(self._geometry, logical),
            columns.forward_s,
        )

    def _usage(self, hardware_flops: float, logical_flops: float, seconds: float) -> Usage:
        return Usage(
            hardware_mfu=utilisation(hardware_flops, seconds, self._peak_flops),
            logical_mfu=utilisation(logical_flops, seconds, self._peak_flops),
            peak_memory_bytes=peak_memory_bytes(self._device),
        )
