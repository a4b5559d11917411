"""Sums of a loss over its counted terms: what adds up over micro-batches, calls and ranks.

They come from `term_sums` as tensors of the device and go into the window and the report as
numbers. Nothing here is divided by a counter; a sum of sums is the sum of the whole, whatever the
cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ratoon.train.additive import Counts, Merged, largest, merges_of, smallest, total
from ratoon.train.loss.histogram import NUM_BINS


@dataclass(frozen=True, slots=True)
class LossSums(Merged):
    """float64 sums. `loss` to `weight` carry the token weight, the others count each term once."""

    loss: float = total()
    policy_gradient: float = total()
    kl: float = total()
    entropy: float = total()
    # Of the routers' balance loss over the layers, without its coefficient.
    balance: float = total()
    # Of the token weights themselves.
    weight: float = total()
    terms: float = total()
    clipped_low: float = total()
    clipped_high: float = total()
    clipped_dual: float = total()
    # Terms whose policy gradient is zero by a mask or by a clip.
    silenced: float = total()
    # Of the loss's ratio, over terms that have one.
    ratio_terms: float = total()
    ratio: float = total()
    ratio_max: float = largest()
    ratio_min: float = smallest()
    # k3 estimates of KL(old || policy), over terms with old log-probs.
    old_terms: float = total()
    old_kl: float = total()
    # Of a rollout correction: terms that have one, its weights as applied, their squares, and the
    # terms that it masked or truncated.
    corrected: float = total()
    correction_weight: float = total()
    correction_square: float = total()
    correction_masked: float = total()
    correction_truncated: float = total()
    # Over terms whose sampler log-probs can be compared: k3 estimates of KL(sampler || policy), and
    # log p - log p_sampler, signed and absolute.
    sampler_terms: float = total()
    sampler_kl: float = total()
    sampler_gap: float = total()
    sampler_gap_abs: float = total()
    sampler_gap_max: float = largest()
    # Terms that a clamp holds: of the loss's ratio, of the KL term, of `sampler_kl`.
    clamped_ratios: float = total()
    clamped_kls: float = total()
    clamped_sampler_gaps: float = total()
    # Of a loss with a clip: terms by the sign of their advantage, and those that the clip holds.
    positive_terms: float = total()
    positive_clipped: float = total()
    negative_terms: float = total()
    negative_clipped: float = total()
    log_ratios: Counts = field(default_factory=Counts)

    @classmethod
    def total(cls, parts: Sequence[Tensor]) -> LossSums:
        """Of parts that are float64 [F] each, as `pack_sums` makes them; waits for the device."""
        if not parts:
            return cls()
        rows_PF = torch.stack(list(parts)).cpu().numpy()
        scalars = {
            name: float(merge.reduce(rows_PF[:, column]))
            for column, (name, merge) in enumerate(_MERGES.items())
        }
        bins = rows_PF[:, len(_MERGES) :].sum(axis=0)
        return cls(**scalars, log_ratios=Counts(tuple(map(int, bins))))


_MERGES = merges_of(LossSums)


def pack_sums(values: Mapping[str, Tensor], log_ratios: Tensor | None, like: Tensor) -> Tensor:
    """One float64 [F] tensor of scalars by name and of `count_log_ratios`, on the device of `like`.

    What is left out is as if there were no term of it.
    """
    assert values.keys() <= _MERGES.keys()
    nothing, zero = LossSums(), like.new_zeros((), dtype=torch.float64)
    filled: list[Tensor] = []
    for name in _MERGES:
        default: float = getattr(nothing, name)
        filled.append(values.get(name, zero + default if default else zero))
    if log_ratios is None:
        log_ratios = like.new_zeros(NUM_BINS, dtype=torch.float64)
    return torch.cat([torch.stack(filled), log_ratios])
