"""Losses without a hard clip of the ratio: a soft gate, and a mask by probability."""

from __future__ import annotations

import torch

from ratoon.train.loss.spec import IpoObjective, SapoObjective
from ratoon.train.loss.terms import PolicyInputs, PolicyTerms


def sapo_terms(inputs: PolicyInputs) -> PolicyTerms:
    """-f(r) A with f(r) = 4 / tau sigmoid(tau (r - 1)): SAPO (arXiv 2511.20347, its objective).

    tau is one number for A > 0, another elsewhere. The gradient with respect to log p is that of
    -r A times 4 s (1 - s), s the sigmoid: 1 on policy, and falling off to either side.
    """
    objective = inputs.objective
    assert isinstance(objective, SapoObjective)
    ratio_L, advantage_L = inputs.log_ratio_L.exp(), inputs.advantage_L
    tau_L = torch.full_like(advantage_L, objective.tau_negative)
    tau_L = tau_L.masked_fill(advantage_L > 0, objective.tau_positive)
    nowhere_L = torch.zeros_like(advantage_L, dtype=torch.bool)
    return PolicyTerms(
        loss_L=-(4.0 / tau_L) * torch.sigmoid(tau_L * (ratio_L - 1.0)) * advantage_L,
        clipped_low_L=nowhere_L,
        clipped_high_L=nowhere_L,
        clipped_dual_L=nowhere_L,
    )


def ipo_terms(inputs: PolicyInputs) -> PolicyTerms:
    """-r A where -most_down <= p - p_old <= most_up, else 0, whatever the sign of A.

    IPO, the default loss of prime-rl (docs.primeintellect.ai/prime-rl/ipo), there with one bound
    of 0.3 for both. A ratio treats a rare token's probability as it treats a common one's; the
    difference bounds how far the distribution itself has moved.
    """
    objective = inputs.objective
    assert isinstance(objective, IpoObjective)
    moved_L = inputs.logprob_L.detach().exp() - inputs.old_L.exp()
    is_down_L = moved_L < -objective.most_down
    is_up_L = moved_L > objective.most_up
    is_held_L = is_down_L | is_up_L
    ratio_L = inputs.log_ratio_L.masked_fill(is_held_L, 0.0).exp()
    return PolicyTerms(
        loss_L=torch.where(is_held_L, 0.0, -ratio_L * inputs.advantage_L),
        clipped_low_L=is_down_L,
        clipped_high_L=is_up_L,
        clipped_dual_L=torch.zeros_like(is_held_L),
    )
