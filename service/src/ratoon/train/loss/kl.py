"""Estimators of the KL divergence to a reference, per trained token.

Source: J. Schulman, "Approximating KL divergence" (2020). Each is 0 where the two are equal.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ratoon.train.config import KlKind
from ratoon.train.loss.clamp import clamp_gap, clamp_k3, is_beyond


@dataclass(frozen=True, slots=True, kw_only=True)
class KlTerms:
    """[L] each: the estimate, which carries the gradient; bool: whether a clamp holds it."""

    value_L: Tensor
    clamped_L: Tensor


def kl_terms(kind: KlKind, logprob_L: Tensor, reference_L: Tensor) -> KlTerms:
    """k1: log p - log q; k2: (log p - log q)^2 / 2; k3: q / p - log(q / p) - 1; all clamped."""
    gap_L = logprob_L - reference_L
    match kind:
        case KlKind.K1:
            value_L, clamped_L = clamp_gap(gap_L), is_beyond(gap_L)
        case KlKind.K2:
            value_L, clamped_L = 0.5 * clamp_gap(gap_L).square(), is_beyond(gap_L)
        case KlKind.K3:
            value_L, clamped_L = clamp_k3(-gap_L)
    return KlTerms(value_L=value_L, clamped_L=clamped_L)
