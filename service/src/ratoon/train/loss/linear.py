"""Losses without a clip: importance sampling, REINFORCE, weighted cross-entropy."""

from __future__ import annotations

import torch
from torch import Tensor

from ratoon.train.loss.terms import PolicyInputs, PolicyTerms


def importance_sampling_terms(inputs: PolicyInputs) -> PolicyTerms:
    """-r A: the surrogate of the off-policy policy gradient (Schulman et al., arXiv 1502.05477)."""
    return _unclipped(-inputs.log_ratio_L.exp() * inputs.advantage_L)


def logprob_terms(inputs: PolicyInputs) -> PolicyTerms:
    """-A log p: REINFORCE (Williams, 1992); with signed token weights for A, cross-entropy."""
    return _unclipped(-inputs.advantage_L * inputs.logprob_L)


def _unclipped(loss_L: Tensor) -> PolicyTerms:
    nowhere_L = torch.zeros_like(loss_L, dtype=torch.bool)
    return PolicyTerms(
        loss_L=loss_L,
        clipped_low_L=nowhere_L,
        clipped_high_L=nowhere_L,
        clipped_dual_L=nowhere_L,
    )
