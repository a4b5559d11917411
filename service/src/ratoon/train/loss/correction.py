"""Weight of the mismatch between the sampler and the trainer's old policy.

A sequence's weight is over all its trained tokens, counted or not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon.train.loss.ratio import sequence_sum
from ratoon_proto.types import CorrectionLevel, CorrectionMask, CorrectionMode, RolloutCorrection


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionTerms:
    """What a correction does to each term, detached, one length for all."""

    # As applied, 0 where masked.
    weight_L: Tensor
    # bool: taken out of the policy gradient; held at the upper bound.
    masked_L: Tensor
    truncated_L: Tensor

    def at(self, index_C: Tensor | slice) -> CorrectionTerms:
        return CorrectionTerms(
            weight_L=self.weight_L[index_C],
            masked_L=self.masked_L[index_C],
            truncated_L=self.truncated_L[index_C],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """log(old / sampler) of each term, [L], and whose terms they are."""

    gap_L: Tensor
    sequence_L: Tensor
    num_sequences: int

    def weight_at(self, level: CorrectionLevel) -> Tensor:
        """exp(gap) of the token, its product over the sequence, or the geometric mean; [L]."""
        if level is CorrectionLevel.TOKEN:
            return self.gap_L.exp()
        total_S = self._sums(self.gap_L)
        if level is CorrectionLevel.GEOMETRIC:
            total_S = total_S / self._sums(torch.ones_like(self.gap_L)).clamp(min=1)
        return total_S.exp()[self.sequence_L]

    def _sums(self, value_L: Tensor) -> Tensor:
        return sequence_sum(value_L, self.sequence_L, self.num_sequences)


def correction_terms(
    correction: RolloutCorrection | None, mask: CorrectionMask | None, mismatch: Mismatch
) -> CorrectionTerms:
    """The weight of the correction, 1 without one, and 0 where it or the mask says so.

    truncate: min(w, high), truncated importance sampling (Ionides, 2008); mask: w where low <= w <=
    high, else 0. The mask beside it looks at a weight of its own level, and leaves what it keeps as
    it is: `rollout_is` and `rollout_rs` of verl's rollout correction, with the same three levels.
    """
    weight_L = torch.ones_like(mismatch.gap_L)
    masked_L = truncated_L = torch.zeros_like(weight_L, dtype=torch.bool)
    if correction is not None:
        weight_L = mismatch.weight_at(correction.level)
        if correction.mode is CorrectionMode.TRUNCATE:
            truncated_L = weight_L > correction.high
            weight_L = weight_L.clamp(max=correction.high)
        else:
            masked_L = _is_outside(weight_L, correction)
    if mask is not None:
        masked_L = masked_L | _is_outside(mismatch.weight_at(mask.level), mask)
    return CorrectionTerms(
        weight_L=weight_L.masked_fill(masked_L, 0.0),
        masked_L=masked_L,
        truncated_L=truncated_L & ~masked_L,
    )


def _is_outside(weight_L: Tensor, bounds: RolloutCorrection | CorrectionMask) -> Tensor:
    return ~((weight_L >= bounds.low) & (weight_L <= bounds.high))
