"""A critic's loss: how far values are from returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon.train.loss.spec import ValueLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueTerms:
    """[L] each; `loss_L`, without its coefficient, carries the gradient; others are detached."""

    loss_L: Tensor
    value_L: Tensor
    return_L: Tensor
    # bool: the clip holds the term, which has no gradient.
    clipped_L: Tensor


def value_terms(
    rule: ValueLoss, value_L: Tensor, return_L: Tensor, old_L: Tensor | None
) -> ValueTerms:
    """Half the squared difference of value and return.

    With a clip c it is the larger of that and of what it is for the value held in [old - c,
    old + c], as in the implementation of PPO (Schulman et al., 2017, arXiv 1707.06347; openai
    baselines): a value that is already farther than c from the old one, on the side of the return,
    is not moved on.
    """
    square_L = (value_L - return_L).square()
    clipped_L = torch.zeros_like(return_L, dtype=torch.bool)
    if rule.clip is not None:
        assert old_L is not None
        held_L = torch.minimum(torch.maximum(value_L, old_L - rule.clip), old_L + rule.clip)
        held_square_L = (held_L - return_L).square()
        clipped_L = (held_square_L > square_L).detach()
        square_L = torch.where(clipped_L, held_square_L, square_L)
    return ValueTerms(
        loss_L=square_L / 2, value_L=value_L.detach(), return_L=return_L, clipped_L=clipped_L
    )
