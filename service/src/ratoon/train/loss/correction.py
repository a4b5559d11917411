"""Weight of the mismatch between the sampler and the trainer's old policy.

A sequence's weight is over all its trained tokens, counted or not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon.train.config import CorrectionLevel, CorrectionMode, RolloutCorrection
from ratoon.train.loss.ratio import sequence_sum


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionTerms:
    """What a correction does to each term, detached, one length for all."""

    # As applied, 0 where masked.
    weight_L: Tensor
    # bool: taken out of the policy gradient; held at the upper bound.
    masked_L: Tensor
    truncated_L: Tensor

    def at(self, index_C: Tensor) -> CorrectionTerms:
        return CorrectionTerms(
            weight_L=self.weight_L[index_C],
            masked_L=self.masked_L[index_C],
            truncated_L=self.truncated_L[index_C],
        )


def correction_terms(
    correction: RolloutCorrection,
    old_L: Tensor,
    sampler_L: Tensor,
    sequence_L: Tensor,
    num_sequences: int,
) -> CorrectionTerms:
    """Of w = exp(old - sampler) of the token, or its product over the sequence; [L].

    truncate: min(w, high), truncated importance sampling (Ionides, 2008); mask: w where low <= w <=
    high, else 0.
    """
    log_weight_L = old_L - sampler_L
    if correction.level is CorrectionLevel.SEQUENCE:
        log_weight_L = sequence_sum(log_weight_L, sequence_L, num_sequences)[sequence_L]
    weight_L = log_weight_L.exp()
    nowhere_L = torch.zeros_like(weight_L, dtype=torch.bool)
    if correction.mode is CorrectionMode.TRUNCATE:
        return CorrectionTerms(
            weight_L=weight_L.clamp(max=correction.high),
            masked_L=nowhere_L,
            truncated_L=weight_L > correction.high,
        )
    is_kept_L = (weight_L >= correction.low) & (weight_L <= correction.high)
    return CorrectionTerms(
        weight_L=torch.where(is_kept_L, weight_L, torch.zeros_like(weight_L)),
        masked_L=~is_kept_L,
        truncated_L=nowhere_L,
    )
