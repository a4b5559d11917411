"""Whether time grows linearly in packed tokens, beyond attention.

Enters what steps of a sweep ran and took, leaves one rate for all products, one for attention, and
how far the steps are from them. Invariant: the fit is of relative errors, so that short steps count
as long ones do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.step_rows import OURS
from benchmarks.step_sizes import ModelSize, StepWork, step_flops
from ratoon.model.activation_plan import Kept

# Two rates and what a step takes however short: fewer steps would fit whatever they took.
MIN_STEPS = 5
# Of a weight of the LM head and a row: its backward makes the logits again.
_HEAD_FLOPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTime:
    """seconds = constant_s + product_flops / product_rate + attention_flops / attention_rate.

    Attributes:
        constant_s: Of every step.
        product_rate: FLOP/s of layers, which run per token, and of the head.
        attention_rate: FLOP/s.
        worst: Greatest relative error of the steps.
    """

    constant_s: float
    product_rate: float
    attention_rate: float
    worst: float


def run_flops(size: ModelSize, work: StepWork, layers_kept: Mapping[str, int]) -> dict[str, float]:
    """FLOPs of products, those that run again for the backward included, and of attention."""
    d, h = size.hidden_size, size.head_dim
    gate_up = 2 * d * size.intermediate_size
    projections = d * h * (2 * size.num_heads + 2 * size.num_kv_heads)
    again = {
        Kept.HOST: projections + gate_up,
        Kept.ATTENTION: projections + gate_up,
        Kept.NARROW: gate_up,
        Kept.PRODUCTS: 0,
    }
    run_again = sum(2 * again[Kept(kind)] * count for kind, count in layers_kept.items())
    layers = (6 * size.layer_parameters + run_again) * work.tokens
    head = _HEAD_FLOPS * size.vocab_size * d * work.rows
    pairs = StepWork(tokens=0, rows=0, pairs=work.pairs)
    return {
        "product_flops": float(layers + head),
        "attention_flops": step_flops(size, pairs),
    }


def linear_time(rows: Sequence[Mapping[str, Any]]) -> LinearTime | None:
    """The fit of packed steps with what `run_flops` says of them; None where they are too few."""
    found = [row for row in rows if "product_flops" in row and row["how"] in OURS]
    if len(found) < MIN_STEPS:
        return None
    seconds = np.array([row["seconds"] for row in found])
    flops = [[row["product_flops"], row["attention_flops"]] for row in found]
    # In units of 1e15, so that the columns are of one order.
    terms = np.column_stack([np.ones(len(found)), np.array(flops) / 1e15]) / seconds[:, None]
    constant, product, attention = np.linalg.lstsq(terms, np.ones(len(found)), rcond=None)[0]
    return LinearTime(
        constant_s=float(constant),
        product_rate=float(1e15 / product),
        attention_rate=float(1e15 / attention),
        worst=float(np.abs(terms @ [constant, product, attention] - 1).max()),
    )
