"""Weight of the mismatch between the sampler and the trainer's old policy.

Enters old and sampler log-probs, leaves a detached weight per term. Invariant: a sequence's weight
is over all its trained tokens, counted or not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ratoon.train.config import CorrectionLevel, CorrectionMode, RolloutCorrection
from ratoon.train.loss.ratio import sequence_sum


def correction_weight(
    correction: RolloutCorrection,
    old_L: Tensor,
    sampler_L: Tensor,
    sequence_L: Tensor,
    num_sequences: int,
) -> Tensor:
    """w = exp(old - sampler) of the token, or its product over the sequence; [L].

    truncate: min(w, high), truncated importance sampling (Ionides, 2008); mask: w where low <= w <=
    high, else 0.
    """
    log_weight_L = old_L - sampler_L
    if correction.level is CorrectionLevel.SEQUENCE:
        log_weight_L = sequence_sum(log_weight_L, sequence_L, num_sequences)[sequence_L]
    weight_L = log_weight_L.exp()
    if correction.mode is CorrectionMode.TRUNCATE:
        return weight_L.clamp(max=correction.high)
    is_kept_L = (weight_L >= correction.low) & (weight_L <= correction.high)
    return torch.where(is_kept_L, weight_L, torch.zeros_like(weight_L))
