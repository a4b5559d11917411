"""How far the policy is from a teacher at one position: divergences of two whole distributions.

Each distribution is known by the teacher's K likeliest tokens and the mass of all others, which
counts as one more token. A divergence of those K + 1 is at most that over the whole vocabulary
(data processing), and equals it where the two agree on the rest's proportions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon.train.loss.spec import Distillation
from ratoon_proto.types import Divergence

# The rest has at least this mass: below it a sum of float32 probabilities says nothing of it.
LEAST_REST = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceTerms:
    """[L] each; `value_L`, the loss's divergence, carries the gradient, the others are detached."""

    value_L: Tensor
    # KL(policy || teacher), whatever the loss's divergence.
    reverse_kl_L: Tensor
    # Mass of the K tokens, by the teacher and by the policy.
    teacher_mass_L: Tensor
    policy_mass_L: Tensor


def divergence_terms(
    distillation: Distillation, policy_LK: Tensor, teacher_LK: Tensor
) -> DivergenceTerms:
    """Terms of K log-probs by each of the two.

    With q the teacher and p the policy: forward KL, KL(q || p), and reverse KL, KL(p || q) (Gu et
    al., MiniLLM, arXiv 2306.08543); the generalised Jensen-Shannon divergence with weight b of the
    teacher, b KL(q || m) + (1 - b) KL(p || m), m = b q + (1 - b) p (Agarwal et al., GKD, arXiv
    2306.13649, eq. 1).
    """
    p_LN, q_LN = _with_rest(policy_LK), _with_rest(teacher_LK)
    reverse_kl_L = _kl(p_LN, q_LN)
    match distillation.divergence:
        case Divergence.FORWARD_KL:
            value_L = _kl(q_LN, p_LN)
        case Divergence.REVERSE_KL:
            value_L = reverse_kl_L
        case Divergence.JENSEN_SHANNON:
            beta = distillation.beta
            # log(b q + (1 - b) p), from logs: a token may be far below what exp holds.
            mixed_LN = torch.logaddexp(q_LN + math.log(beta), p_LN + math.log1p(-beta))
            value_L = beta * _kl(q_LN, mixed_LN) + (1 - beta) * _kl(p_LN, mixed_LN)
    return DivergenceTerms(
        value_L=value_L,
        reverse_kl_L=reverse_kl_L.detach(),
        teacher_mass_L=teacher_LK.exp().sum(dim=1),
        policy_mass_L=policy_LK.detach().exp().sum(dim=1),
    )


def _with_rest(logprob_LK: Tensor) -> Tensor:
    """Log-probs [L, K + 1]: the last is that of all other tokens."""
    rest_L = (1.0 - logprob_LK.exp().sum(dim=1)).clamp(min=LEAST_REST)
    return torch.cat([logprob_LK, rest_L.log()[:, None]], dim=1)


def _kl(p_LN: Tensor, q_LN: Tensor) -> Tensor:
    """KL(p || q), [L], of log-probs."""
    return (p_LN.exp() * (p_LN - q_LN)).sum(dim=1)
