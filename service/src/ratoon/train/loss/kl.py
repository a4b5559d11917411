"""Estimators of the KL divergence to a reference, per trained token.

Enters log-probs of the policy and of the reference, leaves an estimate with gradient. Source: J.
Schulman, "Approximating KL divergence" (2020). Invariant: each is 0 where the two are equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ratoon.train.config import KlKind


def kl_estimate(kind: KlKind, logprob_L: Tensor, reference_L: Tensor) -> Tensor:
    """k1: log p - log q; k2: (log p - log q)^2 / 2; k3: q / p - log(q / p) - 1. [L]."""
    gap_L = logprob_L - reference_L
    match kind:
        case KlKind.K1:
            return gap_L
        case KlKind.K2:
            return 0.5 * gap_L.square()
        case KlKind.K3:
            return torch.expm1(-gap_L) + gap_L
