"""Ratios of sequences, over all their trained tokens."""

from __future__ import annotations

import torch
from torch import Tensor


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
