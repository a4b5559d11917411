"""Clipped ratio: grpo, ppo_clip, dapo, dr_grpo, and gspo on the sequence's ratio.

A clipped term has gradient 0, and an unclipped one is -r A, so that no overflow of a clipped ratio
reaches the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ratoon.train.loss.spec import ClipObjective, SequenceClipObjective
from ratoon.train.loss.terms import PolicyInputs, PolicyTerms


def clip_terms(inputs: PolicyInputs) -> PolicyTerms:
    """-min(r A, clip(r, 1 - lo, 1 + hi) A), with dual clip also bounded by -c A where A < 0.

    PPO (Schulman et al., arXiv 1707.06347, eq. 7); the group-relative form of GRPO (arXiv
    2402.03300, eq. 3); clip-higher of DAPO (arXiv 2503.14476, eq. 8); Dr. GRPO (arXiv 2503.20783)
    differs in advantage and normalisation only; dual clip (Ye et al., arXiv 1912.09729, eq. 5).
    A term held by the dual clip counts as clipped high.
    """
    objective = inputs.objective
    assert isinstance(objective, ClipObjective)
    return held_ratio_terms(
        inputs.log_ratio_L,
        inputs.advantage_L,
        low=1.0 - objective.clip_low,
        high=1.0 + objective.clip_high,
        dual=objective.dual_clip,
    )


def sequence_clip_terms(inputs: PolicyInputs) -> PolicyTerms:
    """GSPO-token (Zheng et al., arXiv 2507.18071, eq. 13): the clip on the sequence's ratio.

    The log-ratio is already the sequence's, in its stop-gradient token form: see
    `ratio.sequence_log_ratio`.
    """
    objective = inputs.objective
    assert isinstance(objective, SequenceClipObjective)
    return held_ratio_terms(
        inputs.log_ratio_L,
        inputs.advantage_L,
        low=1.0 - objective.clip_low,
        high=1.0 + objective.clip_high,
        dual=float("inf"),
    )


def held_ratio_terms(
    log_ratio_L: Tensor, advantage_L: Tensor, *, low: float, high: float, dual: float
) -> PolicyTerms:
    """-min(r A, clip(r, low, high) A), case by case; r = exp(log_ratio)."""
    ratio_L = log_ratio_L.detach().exp()
    is_negative_L = advantage_L < 0
    clipped_low_L = is_negative_L & (ratio_L < low)
    clipped_dual_L = is_negative_L & (ratio_L > dual)
    clipped_high_L = (advantage_L > 0) & (ratio_L > high)
    is_held_L = clipped_low_L | clipped_high_L | clipped_dual_L
    bound_L = torch.full_like(ratio_L, high)
    bound_L = bound_L.masked_fill(clipped_dual_L, dual).masked_fill(clipped_low_L, low)
    # The exponent of a held term is replaced before exp: inf * 0 in its backward would be NaN.
    free_ratio_L = torch.where(is_held_L, torch.zeros_like(log_ratio_L), log_ratio_L).exp()
    held_L = torch.where(is_held_L, bound_L, free_ratio_L)
    return PolicyTerms(
        loss_L=-held_L * advantage_L,
        clipped_low_L=clipped_low_L,
        clipped_high_L=clipped_high_L | clipped_dual_L,
        clipped_dual_L=clipped_dual_L,
    )
