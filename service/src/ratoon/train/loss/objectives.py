"""Policy-gradient terms of each objective, from log-probs, ratios and advantages.

One function an objective. Where a bound holds a term, nothing that overflows reaches its gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import singledispatch

import torch
from torch import Tensor

from ratoon.train.loss.kinds import (
    CispoObjective,
    ClipObjective,
    GeometricClipObjective,
    IpoObjective,
    LogprobObjective,
    NoObjective,
    Objective,
    RatioObjective,
    SapoObjective,
    SequenceClipObjective,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInputs:
    """What a policy-gradient term is made of; log-prob and log-ratio carry the gradient."""

    logprob_L: Tensor
    # Old log-prob of the token, even if the ratio is the sequence's.
    old_L: Tensor
    log_ratio_L: Tensor
    advantage_L: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTerms:
    """Policy-gradient terms, [L] each; `loss_L` carries the gradient, the others are detached."""

    loss_L: Tensor
    # bool: held at the lower, at the upper bound; of the latter those that the dual clip holds.
    clipped_low_L: Tensor
    clipped_high_L: Tensor
    clipped_dual_L: Tensor


@singledispatch
def policy_terms(objective: Objective, inputs: PolicyInputs) -> PolicyTerms:
    """The terms of `objective`, which one of the functions below computes."""
    raise TypeError(f"{type(objective).__name__} has no terms: {len(inputs.logprob_L)}")


@policy_terms.register
def clip_terms(objective: ClipObjective, inputs: PolicyInputs) -> PolicyTerms:
    """-min(r A, clip(r, 1 - lo, 1 + hi) A), with dual clip also bounded by -c A where A < 0.

    PPO (Schulman et al., arXiv 1707.06347, eq. 7); the group-relative form of GRPO (arXiv
    2402.03300, eq. 3); clip-higher of DAPO (arXiv 2503.14476, eq. 8); Dr. GRPO (arXiv 2503.20783)
    differs in advantage and normalisation only; dual clip (Ye et al., arXiv 1912.09729, eq. 5).
    A term held by the dual clip counts as clipped high.
    """
    low, high = 1.0 - objective.clip_low, 1.0 + objective.clip_high
    return _held_ratio(inputs, low=low, high=high, dual=objective.dual_clip)


@policy_terms.register
def sequence_clip_terms(objective: SequenceClipObjective, inputs: PolicyInputs) -> PolicyTerms:
    """GSPO-token (Zheng et al., arXiv 2507.18071, eq. 13): the clip on the sequence's ratio.

    The log-ratio is already the sequence's, in its stop-gradient token form: see
    `ratio.sequence_log_ratio`.
    """
    low, high = 1.0 - objective.clip_low, 1.0 + objective.clip_high
    return _held_ratio(inputs, low=low, high=high, dual=math.inf)


@policy_terms.register
def geometric_clip_terms(objective: GeometricClipObjective, inputs: PolicyInputs) -> PolicyTerms:
    """-s A, s the geometric mean of a path's held ratios: GMPO (arXiv 2507.20673, its objective).

    The log-ratio is already the sequence's, of log-ratios as `held_gap` leaves them; a held token
    is a constant factor of s, and has no gradient.
    """
    gap_L = (inputs.logprob_L - inputs.old_L).detach()
    clipped_low_L = (inputs.advantage_L < 0) & (gap_L < -objective.most_down)
    clipped_high_L = (inputs.advantage_L > 0) & (gap_L > objective.most_up)
    log_ratio_L = inputs.log_ratio_L
    is_held_L = clipped_low_L | clipped_high_L
    ratio_L = torch.where(is_held_L, log_ratio_L.detach(), log_ratio_L).exp()
    return PolicyTerms(
        loss_L=-ratio_L * inputs.advantage_L,
        clipped_low_L=clipped_low_L,
        clipped_high_L=clipped_high_L,
        clipped_dual_L=torch.zeros_like(is_held_L),
    )


def held_gap(objective: Objective, gap_L: Tensor, advantage_L: Tensor) -> Tensor:
    """Log-ratios as the mean of their sequence takes them: GMPO clips each before, by its sign."""
    if not isinstance(objective, GeometricClipObjective):
        return gap_L
    least_L, most_L = gap_L.clamp(min=-objective.most_down), gap_L.clamp(max=objective.most_up)
    return torch.where(advantage_L < 0, least_L, most_L)


@policy_terms.register
def cispo_terms(objective: CispoObjective, inputs: PolicyInputs) -> PolicyTerms:
    """-sg(clip(r, lo, hi)) A log p: CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5).

    The importance weight has no gradient, so that every token keeps its own.
    """
    ratio_L = inputs.log_ratio_L.detach().exp()
    weight_L = ratio_L.clamp(objective.ratio_low, objective.ratio_high)
    return PolicyTerms(
        loss_L=-weight_L * inputs.advantage_L * inputs.logprob_L,
        clipped_low_L=ratio_L < objective.ratio_low,
        clipped_high_L=ratio_L > objective.ratio_high,
        clipped_dual_L=torch.zeros_like(ratio_L, dtype=torch.bool),
    )


@policy_terms.register
def sapo_terms(objective: SapoObjective, inputs: PolicyInputs) -> PolicyTerms:
    """-f(r) A with f(r) = 4 / tau sigmoid(tau (r - 1)): SAPO (arXiv 2511.20347, its objective).

    tau is one number for A > 0, another elsewhere. The gradient with respect to log p is that of
    -r A times 4 s (1 - s), s the sigmoid: 1 on policy, and falling off to either side.
    """
    ratio_L, advantage_L = inputs.log_ratio_L.exp(), inputs.advantage_L
    tau_L = torch.full_like(advantage_L, objective.tau_negative)
    tau_L = tau_L.masked_fill(advantage_L > 0, objective.tau_positive)
    return _unclipped(-(4.0 / tau_L) * torch.sigmoid(tau_L * (ratio_L - 1.0)) * advantage_L)


@policy_terms.register
def ipo_terms(objective: IpoObjective, inputs: PolicyInputs) -> PolicyTerms:
    """-r A where -most_down <= p - p_old <= most_up, else 0, whatever the sign of A.

    IPO, the default loss of prime-rl (docs.primeintellect.ai/prime-rl/ipo), there with one bound
    of 0.3 for both. A ratio treats a rare token's probability as it treats a common one's; the
    difference bounds how far the distribution itself has moved.
    """
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


@policy_terms.register
def ratio_terms(_objective: RatioObjective, inputs: PolicyInputs) -> PolicyTerms:
    """-r A: the surrogate of the off-policy policy gradient (Schulman et al., arXiv 1502.05477)."""
    return _unclipped(-inputs.log_ratio_L.exp() * inputs.advantage_L)


@policy_terms.register
def logprob_terms(_objective: LogprobObjective, inputs: PolicyInputs) -> PolicyTerms:
    """-A log p: REINFORCE (Williams, 1992); with signed token weights for A, cross-entropy."""
    return _unclipped(-inputs.advantage_L * inputs.logprob_L)


@policy_terms.register
def no_terms(_objective: NoObjective, inputs: PolicyInputs) -> PolicyTerms:
    """0: the loss has no policy gradient."""
    return _unclipped(torch.zeros_like(inputs.old_L))


def _unclipped(loss_L: Tensor) -> PolicyTerms:
    nowhere_L = torch.zeros_like(loss_L, dtype=torch.bool)
    return PolicyTerms(
        loss_L=loss_L,
        clipped_low_L=nowhere_L,
        clipped_high_L=nowhere_L,
        clipped_dual_L=nowhere_L,
    )


def _held_ratio(inputs: PolicyInputs, *, low: float, high: float, dual: float) -> PolicyTerms:
    """-min(r A, clip(r, low, high) A), case by case; r = exp(log_ratio).

    A clipped term has gradient 0, and an unclipped one is -r A, so that no overflow of a clipped
    ratio reaches the gradient.
    """
    log_ratio_L, advantage_L = inputs.log_ratio_L, inputs.advantage_L
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
