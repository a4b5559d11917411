"""KL divergence to a reference as a term of the loss, per trained token.

Estimators: J. Schulman, "Approximating KL divergence" (2020). Each is 0 where the two are equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon.train.loss.clamp import clamp_gap, clamp_k3, is_beyond
from ratoon_proto.types import KlConfig, KlKind


@dataclass(frozen=True, slots=True, kw_only=True)
class KlTerms:
    """[L] each: the estimate, which carries the gradient; bool: whether a clamp holds it."""

    value_L: Tensor
    clamped_L: Tensor


def kl_terms(kl: KlConfig, logprob_L: Tensor, reference_L: Tensor, old_L: Tensor) -> KlTerms:
    """The estimate of `kl.kind`, or, importance weighted, p / p_old times it.

    With the weight, and its gradient, k1 and k3 are unbiased in value and gradient under tokens of
    p_old (DeepSeek-V3.2, arXiv 2512.02556, eq. 7). What a clamp holds has no gradient then, through
    the weight neither: the weight of a term held at its bound says nothing of p and q.
    """
    found = _estimate(kl.kind, logprob_L - reference_L)
    if not kl.importance_weighted:
        return found
    log_ratio_L = logprob_L - old_L
    clamped_L = found.clamped_L | is_beyond(log_ratio_L)
    value_L = clamp_gap(log_ratio_L).exp() * found.value_L
    return KlTerms(value_L=torch.where(clamped_L, value_L.detach(), value_L), clamped_L=clamped_L)


def _estimate(kind: KlKind, gap_L: Tensor) -> KlTerms:
    """Of log p - log q. k1: itself; k2: half its square; k3: q / p - log(q / p) - 1; all clamped.

    k1_plus and k3_plus: the value of k1 and k3 with the gradient of k2, whose expectation on policy
    is that of KL(p || q); those of k1 and k3 are 0 and that of KL(q || p).
    """
    k2_L = 0.5 * clamp_gap(gap_L).square()
    k1 = KlTerms(value_L=clamp_gap(gap_L), clamped_L=is_beyond(gap_L))
    match kind:
        case KlKind.K1:
            return k1
        case KlKind.K2:
            return KlTerms(value_L=k2_L, clamped_L=k1.clamped_L)
        case KlKind.K3:
            return _k3(gap_L)
        case KlKind.K1_PLUS:
            return _straight_through(k1, k2_L)
        case KlKind.K3_PLUS:
            return _straight_through(_k3(gap_L), k2_L)


def _k3(gap_L: Tensor) -> KlTerms:
    value_L, clamped_L = clamp_k3(-gap_L)
    return KlTerms(value_L=value_L, clamped_L=clamped_L)


def _straight_through(value: KlTerms, gradient_L: Tensor) -> KlTerms:
    """The value of one with the gradient of the other."""
    value_L = gradient_L - gradient_L.detach() + value.value_L.detach()
    return KlTerms(value_L=value_L, clamped_L=value.clamped_L)
