"""Log-ratios of tokens and of whole sequences, and how far apart two log-probs may be.

Beyond a bound, two log-probs of a token say nothing about the policy: such a term keeps the
bound's value and has no gradient; below it nothing changes. The numbers are those of verl's
`kl_penalty` and `compute_policy_loss`.
"""

from __future__ import annotations

import torch
from torch import Tensor

# In nats: of a log-ratio, and of log p - log q in a KL estimate.
MAX_GAP = 20.0
# Bound of the k3 estimate of one token.
MAX_K3 = 10.0


def clamp_gap(gap_L: Tensor) -> Tensor:
    return gap_L.clamp(-MAX_GAP, MAX_GAP)


def is_beyond(gap_L: Tensor) -> Tensor:
    """bool [L]: where `clamp_gap` holds a value."""
    return gap_L.detach().abs() > MAX_GAP


def k3(gap_L: Tensor) -> Tensor:
    """exp(u) - u - 1 of u = `gap_L`, unbounded: estimates KL(q || p) of u = log p - log q on q's
    tokens."""
    return torch.expm1(gap_L) - gap_L


def clamp_k3(gap_L: Tensor) -> tuple[Tensor, Tensor]:
    """`k3` of the clamped gap, at most `MAX_K3`; bool: where a bound holds it."""
    value_L = k3(clamp_gap(gap_L))
    return value_L.clamp(max=MAX_K3), is_beyond(gap_L) | (value_L.detach() > MAX_K3)


def sequence_log_ratio(
    logprob_L: Tensor, old_L: Tensor, sequence_L: Tensor, num_sequences: int
) -> Tensor:
    """log of GSPO's sequence ratio in its stop-gradient token form, [L].

    s = exp(mean over trained tokens of log r); the token's form is sg(s) p / sg(p): its value is s,
    its gradient s d(log p) (Zheng et al., arXiv 2507.18071, eq. 7 and 14).
    """
    detached_L = logprob_L.detach()
    total_S = sequence_sum(detached_L - old_L, sequence_L, num_sequences)
    count_S = sequence_sum(torch.ones_like(old_L), sequence_L, num_sequences)
    mean_L = (total_S / count_S.clamp(min=1))[sequence_L]
    return mean_L + (logprob_L - detached_L)


def sequence_sum(value_L: Tensor, sequence_L: Tensor, num_sequences: int) -> Tensor:
    """Sum over the terms of each sequence, [S]."""
    total_S = torch.zeros(num_sequences, dtype=value_L.dtype, device=value_L.device)
    return total_S.index_add_(0, sequence_L, value_L)
