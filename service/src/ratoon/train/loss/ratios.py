"""How far two policies are apart at a token or over a sequence: ratios, KL terms, corrections.

Beyond a bound, two log-probs of a token say nothing about the policy: such a term keeps the
bound's value and has no gradient; below it nothing changes. The numbers are those of verl's
`kl_penalty` and `compute_policy_loss`. KL estimators: J. Schulman, "Approximating KL divergence"
(2020); each is 0 where the two are equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon_proto.types import (
    CorrectionLevel,
    CorrectionMask,
    CorrectionMode,
    KlConfig,
    KlKind,
    RolloutCorrection,
)

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
    logprob_L: Tensor, gap_L: Tensor, sequence_L: Tensor, num_sequences: int
) -> Tensor:
    """log of GSPO's sequence ratio in its stop-gradient token form, [L].

    s = exp(mean over trained tokens of log r), `gap_L`; the token's form is sg(s) p / sg(p): its
    value is s, its gradient s d(log p) (Zheng et al., arXiv 2507.18071, eq. 7 and 14).
    """
    total_S = sequence_sum(gap_L, sequence_L, num_sequences)
    count_S = sequence_sum(torch.ones_like(gap_L), sequence_L, num_sequences)
    mean_L = (total_S / count_S.clamp(min=1))[sequence_L]
    return mean_L + (logprob_L - logprob_L.detach())


def sequence_sum(value_L: Tensor, sequence_L: Tensor, num_sequences: int) -> Tensor:
    """Sum over the terms of each sequence, [S]."""
    total_S = torch.zeros(num_sequences, dtype=value_L.dtype, device=value_L.device)
    return total_S.index_add_(0, sequence_L, value_L)


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
    """Estimates from log p - log q, all of them clamped.

    k1: the gap itself; k2: half its square; k3: q / p - log(q / p) - 1.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionTerms:
    """What a correction does to each term, detached, one length for all."""

    # As applied, 0 where masked.
    weight_L: Tensor
    # bool: taken out of the policy gradient; held at the upper bound.
    masked_L: Tensor
    truncated_L: Tensor

    def at(self, index_C: Tensor | slice) -> CorrectionTerms:
        return CorrectionTerms(
            weight_L=self.weight_L[index_C],
            masked_L=self.masked_L[index_C],
            truncated_L=self.truncated_L[index_C],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """log(old / sampler) of each term, [L], and whose terms they are."""

    gap_L: Tensor
    sequence_L: Tensor
    num_sequences: int

    def weight_at(self, level: CorrectionLevel) -> Tensor:
        """exp(gap) of the token, its product over the sequence, or the geometric mean; [L]."""
        if level is CorrectionLevel.TOKEN:
            return self.gap_L.exp()
        total_S = self._sums(self.gap_L)
        if level is CorrectionLevel.GEOMETRIC:
            total_S = total_S / self._sums(torch.ones_like(self.gap_L)).clamp(min=1)
        return total_S.exp()[self.sequence_L]

    def _sums(self, value_L: Tensor) -> Tensor:
        return sequence_sum(value_L, self.sequence_L, self.num_sequences)


def correction_terms(
    correction: RolloutCorrection | None, mask: CorrectionMask | None, mismatch: Mismatch
) -> CorrectionTerms:
    """The weight of the correction, 1 without one, and 0 where it or the mask says so.

    truncate: min(w, high), truncated importance sampling (Ionides, 2008); mask: w where low <= w <=
    high, else 0. The mask beside it looks at a weight of its own level, and leaves what it keeps as
    it is: `rollout_is` and `rollout_rs` of verl's rollout correction, with the same three levels.
    """
    weight_L = torch.ones_like(mismatch.gap_L)
    masked_L = truncated_L = torch.zeros_like(weight_L, dtype=torch.bool)
    if correction is not None:
        weight_L = mismatch.weight_at(correction.level)
        if correction.mode is CorrectionMode.TRUNCATE:
            truncated_L = weight_L > correction.high
            weight_L = weight_L.clamp(max=correction.high)
        else:
            masked_L = _is_outside(weight_L, correction)
    if mask is not None:
        masked_L = masked_L | _is_outside(mismatch.weight_at(mask.level), mask)
    return CorrectionTerms(
        weight_L=weight_L.masked_fill(masked_L, 0.0),
        masked_L=masked_L,
        truncated_L=truncated_L & ~masked_L,
    )


def _is_outside(weight_L: Tensor, bounds: RolloutCorrection | CorrectionMask) -> Tensor:
    return ~((weight_L >= bounds.low) & (weight_L <= bounds.high))
