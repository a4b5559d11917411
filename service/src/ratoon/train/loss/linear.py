"""Losses without a clip: importance sampling, REINFORCE, weighted cross-entropy.

Enters log-probs (or log-ratios) and advantages, leaves policy terms. Invariant: nothing is held.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ratoon.train.loss.terms import PolicyInputs, PolicyTerms


def importance_sampling_terms(inputs: PolicyInputs) -> PolicyTerms:
    """-r A: the surrogate of the off-policy policy gradient (Schulman et al., arXiv 1502.05477)."""
    ratio_L = inputs.log_ratio_L.exp()
    return _unclipped(-ratio_L * inputs.advantage_L, ratio_L.detach())


def logprob_terms(inputs: PolicyInputs) -> PolicyTerms:
    """-A log p: REINFORCE (Williams, 1992); with signed token weights for A, cross-entropy."""
    loss_L = -inputs.advantage_L * inputs.logprob_L
    return _unclipped(loss_L, torch.zeros_like(inputs.advantage_L))


def _unclipped(loss_L: Tensor, ratio_L: Tensor) -> PolicyTerms:
    nowhere_L = torch.zeros_like(ratio_L, dtype=torch.bool)
    return PolicyTerms(
        loss_L=loss_L, ratio_L=ratio_L, clipped_low_L=nowhere_L, clipped_high_L=nowhere_L
    )
