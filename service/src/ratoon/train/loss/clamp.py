"""How far apart two log-probs of a token may be before they say nothing about the policy.

A term beyond a bound keeps the bound's value and has no gradient; below it nothing changes. The
numbers are those of verl's `kl_penalty` and `compute_policy_loss`.
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
