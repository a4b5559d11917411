"""Sums of a loss over its counted terms: what adds up over micro-batches, calls and ranks.

Enters from `compute_loss` as tensors of the device, leaves into the window and the report as
numbers. Invariant: nothing here is divided by a counter; a sum of sums is the sum of the whole,
whatever the cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossSums:
    """float64 sums. `loss` to `weight` carry the token weight, the others count each term once."""

    loss: float = 0.0
    policy_gradient: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    # Of the token weights themselves.
    weight: float = 0.0
    terms: float = 0.0
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    ratio_max: float = 0.0
    # k3 estimates of KL(sampler || trainer), over terms whose sampler log-probs can be compared.
    sampler_kl: float = 0.0
    sampler_terms: float = 0.0
    sampler_gap_max: float = 0.0

    @classmethod
    def total(cls, parts: Sequence[Tensor]) -> LossSums:
        """Of parts that are float64 [F] each, F the fields here in order; waits for the device."""
        if not parts:
            return cls()
        rows_PF = torch.stack(list(parts)).cpu().numpy()
        return sum((cls(*map(float, row_F)) for row_F in rows_PF), cls())

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(
            loss=self.loss + other.loss,
            policy_gradient=self.policy_gradient + other.policy_gradient,
            kl=self.kl + other.kl,
            entropy=self.entropy + other.entropy,
            weight=self.weight + other.weight,
            terms=self.terms + other.terms,
            clipped_low=self.clipped_low + other.clipped_low,
            clipped_high=self.clipped_high + other.clipped_high,
            ratio_max=max(self.ratio_max, other.ratio_max),
            sampler_kl=self.sampler_kl + other.sampler_kl,
            sampler_terms=self.sampler_terms + other.sampler_terms,
            sampler_gap_max=max(self.sampler_gap_max, other.sampler_gap_max),
        )


SUM_NAMES = tuple(field.name for field in fields(LossSums))
