"""CISPO: clipped importance weights without a gradient, so that every token keeps its own."""

from __future__ import annotations

import torch

from ratoon.train.loss.spec import CispoObjective
from ratoon.train.loss.terms import PolicyInputs, PolicyTerms


def cispo_terms(inputs: PolicyInputs) -> PolicyTerms:
    """-sg(clip(r, lo, hi)) A log p: CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5)."""
    objective = inputs.objective
    assert isinstance(objective, CispoObjective)
    ratio_L = inputs.log_ratio_L.detach().exp()
    weight_L = ratio_L.clamp(objective.ratio_low, objective.ratio_high)
    return PolicyTerms(
        loss_L=-weight_L * inputs.advantage_L * inputs.logprob_L,
        clipped_low_L=ratio_L < objective.ratio_low,
        clipped_high_L=ratio_L > objective.ratio_high,
        clipped_dual_L=torch.zeros_like(ratio_L, dtype=torch.bool),
    )
