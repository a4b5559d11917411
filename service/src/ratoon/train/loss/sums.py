"""Sums of a loss over its counted terms: what adds up over micro-batches, calls and ranks.

A figure of the report is declared, computed on the device and made a mean here. Nothing but
`LossSums.figures` divides; a sum of sums is the sum of the whole, whatever the cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ratoon.train.additive import (
    NUM_BINS,
    Counts,
    Merged,
    count_log_ratios,
    largest,
    mean,
    merges_of,
    quantile,
    scaled,
    smallest,
    total,
)
from ratoon.train.loss.divergences import DivergenceTerms
from ratoon.train.loss.objectives import PolicyTerms
from ratoon.train.loss.ratios import CorrectionTerms, KlTerms, clamp_gap, clamp_k3, is_beyond
from ratoon.train.loss.values import ValueTerms


@dataclass(frozen=True, slots=True)
class LossSums(Merged):
    """float64 sums. `loss` to `weight` carry the token weight, the others count each term once."""

    loss: float = total()
    policy_gradient: float = total()
    kl: float = total()
    entropy: float = total()
    # The routers' balance loss over the layers, without its coefficient.
    balance: float = total()
    # The token weights themselves.
    weight: float = total()
    terms: float = total()
    clipped_low: float = total()
    clipped_high: float = total()
    clipped_dual: float = total()
    # Terms whose policy gradient is zero by a mask or by a clip.
    silenced: float = total()
    # The loss's ratio, over terms that have one.
    ratio_terms: float = total()
    ratio: float = total()
    ratio_max: float = largest()
    ratio_min: float = smallest()
    # k3 estimates of KL(old || policy), over terms with old log-probs.
    old_terms: float = total()
    old_kl: float = total()
    # A rollout correction: terms that have one, its weights as applied, their squares, and the
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
    # A loss with a clip: terms by the sign of their advantage, and those that the clip holds.
    positive_terms: float = total()
    positive_clipped: float = total()
    negative_terms: float = total()
    negative_clipped: float = total()
    # A loss that distils: terms, KL(policy || teacher), and the mass of the teacher's tokens by
    # either.
    distilled: float = total()
    teacher_kl: float = total()
    teacher_mass: float = total()
    policy_mass: float = total()
    # A loss with a value term: the term without its coefficient, which carries the token weight;
    # terms, values, returns, their squares and bounds, those of returns less values, and clipped
    # terms.
    value_loss: float = total()
    valued: float = total()
    value: float = total()
    returned: float = total()
    return_square: float = total()
    return_min: float = smallest()
    return_max: float = largest(-math.inf)
    value_gap_square: float = total()
    value_clipped: float = total()
    log_ratios: Counts = field(default_factory=Counts)

    @classmethod
    def total(cls, parts: Sequence[Tensor]) -> LossSums:
        """Sums of parts, float64 [F] each, as `pack_sums` makes them; waits for the device."""
        if not parts:
            return cls()
        rows_PF = torch.stack(list(parts)).cpu().numpy()
        scalars = {
            name: float(merge.reduce(rows_PF[:, column]))
            for column, (name, merge) in enumerate(_MERGES.items())
        }
        bins = rows_PF[:, len(_MERGES) :].sum(axis=0)
        return cls(**scalars, log_ratios=Counts(tuple(map(int, bins))))

    def figures(self, divisor: float, *, has_kl: bool) -> dict[str, float | int | None]:
        """Fields of a `StepReport`, by name.

        Losses are over `divisor`; KL and entropy are weighted as the loss; the others are means
        over the terms that were run. A mean over nothing is None.
        """
        return {
            "loss": scaled(self.loss, divisor),
            "policy_gradient_loss": scaled(self.policy_gradient, divisor),
            "kl": scaled(self.kl, self.weight) if has_kl else None,
            "entropy": scaled(self.entropy, self.weight),
            "router_aux_loss": scaled(self.balance, self.weight) if self.balance else None,
            "clip_fraction_low": scaled(self.clipped_low, self.terms),
            "clip_fraction_high": scaled(self.clipped_high, self.terms),
            "clip_fraction_dual": scaled(self.clipped_dual, self.terms),
            "clip_fraction_positive": mean(self.positive_clipped, self.positive_terms),
            "clip_fraction_negative": mean(self.negative_clipped, self.negative_terms),
            "clamped_ratios": int(self.clamped_ratios),
            "clamped_kls": int(self.clamped_kls),
            "clamped_sampler_gaps": int(self.clamped_sampler_gaps),
            "old_kl": mean(self.old_kl, self.old_terms),
            **self._ratio_figures(),
            "correction_masked_fraction": mean(self.correction_masked, self.corrected),
            "correction_truncated_fraction": mean(self.correction_truncated, self.corrected),
            "correction_weight_mean": mean(self.correction_weight, self.corrected),
            "correction_ess_fraction": mean(self._effective_terms(), self.corrected),
            "teacher_kl": mean(self.teacher_kl, self.distilled),
            "teacher_mass": mean(self.teacher_mass, self.distilled),
            "policy_mass": mean(self.policy_mass, self.distilled),
            **self._value_figures(),
            "sampler_kl": mean(self.sampler_kl, self.sampler_terms),
            "sampler_gap_mean": mean(self.sampler_gap, self.sampler_terms),
            "sampler_gap_abs_mean": mean(self.sampler_gap_abs, self.sampler_terms),
            "sampler_gap_max": self.sampler_gap_max if self.sampler_terms else None,
        }

    def _ratio_figures(self) -> dict[str, float | int | None]:
        if not self.ratio_terms:
            return {}

        def ratio_at(share: float) -> float:
            # A bin's middle may be beyond all of its ratios.
            ratio = math.exp(quantile(self.log_ratios, share))
            return min(max(ratio, self.ratio_min), self.ratio_max)

        return {
            "ratio_mean": self.ratio / self.ratio_terms,
            "ratio_min": self.ratio_min,
            "ratio_max": self.ratio_max,
            "ratio_p01": ratio_at(0.01),
            "ratio_p50": ratio_at(0.5),
            "ratio_p99": ratio_at(0.99),
        }

    def _value_figures(self) -> dict[str, float | int | None]:
        if not self.valued:
            return {}
        value, returned = self.value / self.valued, self.returned / self.valued
        explained = None
        if self.return_min < self.return_max:
            variance = self.return_square / self.valued - returned**2
            left = self.value_gap_square / self.valued - (returned - value) ** 2
            explained = 1.0 - left / variance if variance > 0 else None
        return {
            "value_loss": scaled(self.value_loss, self.weight),
            "value_mean": value,
            "return_mean": returned,
            "explained_variance": explained,
            "value_clip_fraction": self.value_clipped / self.valued,
        }

    def _effective_terms(self) -> float:
        """Effective sample size of the correction's weights."""
        square = self.correction_square
        return self.correction_weight * self.correction_weight / square if square else 0.0


_MERGES = merges_of(LossSums)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedTerms:
    """Everything that is known of the terms that count, [C] each; gradients are ignored.

    None: the loss has no KL term, teacher, value term, ratio, clip, old log-probs or correction;
    nobody sent sampler log-probs.
    """

    # Places among the terms that the loss was asked for.
    index_C: Tensor | slice
    weight_C: Tensor
    # The loss, and those of its summands that are reported by themselves.
    loss_C: Tensor
    policy_gradient_C: Tensor
    kl: KlTerms | None
    divergence: DivergenceTerms | None
    value: ValueTerms | None
    entropy_C: Tensor
    logprob_C: Tensor
    # Log of the loss's ratio, before its clamp: for gspo the sequence's.
    log_ratio_C: Tensor | None
    advantage_C: Tensor | None
    old_C: Tensor | None
    sampler_C: Tensor | None
    # bool: the sampler's log-probs are at the sampling temperature.
    sampler_usable_C: Tensor
    policy: PolicyTerms
    # Whether a clipped term still has a gradient, as those of cispo have.
    clip_keeps_gradient: bool
    correction: CorrectionTerms | None


@torch.no_grad()
def sum_terms(terms: CountedTerms) -> Tensor:
    """Sums of the terms, float64 [F], as `LossSums.total` takes them, without waiting for them."""
    weight_C = terms.weight_C.double()
    if len(weight_C) == 0:
        return pack_sums({}, None, weight_C)
    values = {
        "loss": (weight_C * terms.loss_C.double()).sum(),
        "policy_gradient": (weight_C * terms.policy_gradient_C.double()).sum(),
        "entropy": (weight_C * terms.entropy_C.double()).sum(),
        "weight": weight_C.sum(),
        "terms": _number(weight_C),
        "clipped_low": _sum(terms.policy.clipped_low_L),
        "clipped_high": _sum(terms.policy.clipped_high_L),
        "clipped_dual": _sum(terms.policy.clipped_dual_L),
        "silenced": _silenced(terms),
        **_kl(terms, weight_C),
        **_divergence(terms),
        **_value(terms, weight_C),
        **_clip(terms),
        **_ratio(terms),
        **_correction(terms),
        **_sampler(terms),
    }
    log_ratios = None if terms.log_ratio_C is None else count_log_ratios(terms.log_ratio_C)
    return pack_sums(values, log_ratios, weight_C)


def _kl(terms: CountedTerms, weight_C: Tensor) -> dict[str, Tensor]:
    if terms.kl is None:
        return {}
    return {
        "kl": (weight_C * terms.kl.value_L.double()).sum(),
        "clamped_kls": _sum(terms.kl.clamped_L),
    }


def _divergence(terms: CountedTerms) -> dict[str, Tensor]:
    """How far the policy is from its teacher."""
    if terms.divergence is None:
        return {}
    return {
        "distilled": _number(terms.divergence.reverse_kl_L),
        "teacher_kl": _sum(terms.divergence.reverse_kl_L),
        "teacher_mass": _sum(terms.divergence.teacher_mass_L),
        "policy_mass": _sum(terms.divergence.policy_mass_L),
    }


def _value(terms: CountedTerms, weight_C: Tensor) -> dict[str, Tensor]:
    """How far the values are from the returns."""
    if terms.value is None:
        return {}
    value_C, return_C = terms.value.value_L.double(), terms.value.return_L.double()
    return {
        "value_loss": (weight_C * terms.value.loss_L.double()).sum(),
        "valued": _number(value_C),
        "value": value_C.sum(),
        "returned": return_C.sum(),
        "return_square": return_C.square().sum(),
        "return_min": return_C.min(),
        "return_max": return_C.max(),
        "value_gap_square": (return_C - value_C).square().sum(),
        "value_clipped": _sum(terms.value.clipped_L),
    }


def _clip(terms: CountedTerms) -> dict[str, Tensor]:
    """Terms that the clip holds, by sign: it may hold most of one sign, and few of all terms."""
    if terms.advantage_C is None:
        return {}
    held_C = _held(terms)
    positive_C, negative_C = terms.advantage_C > 0, terms.advantage_C < 0
    return {
        "positive_terms": _sum(positive_C),
        "positive_clipped": _sum(positive_C & held_C),
        "negative_terms": _sum(negative_C),
        "negative_clipped": _sum(negative_C & held_C),
    }


def _held(terms: CountedTerms) -> Tensor:
    """bool [C]: at a bound of the clip."""
    return terms.policy.clipped_low_L | terms.policy.clipped_high_L


def _silenced(terms: CountedTerms) -> Tensor:
    silenced_C = torch.zeros_like(terms.policy.clipped_low_L)
    if not terms.clip_keeps_gradient:
        silenced_C = _held(terms)
    if terms.correction is not None:
        silenced_C = silenced_C | terms.correction.masked_L
    return _sum(silenced_C)


def _ratio(terms: CountedTerms) -> dict[str, Tensor]:
    """The ratio of the loss, and how far the policy has come from the old one."""
    values: dict[str, Tensor] = {}
    if terms.log_ratio_C is not None:
        ratio_C = clamp_gap(terms.log_ratio_C.double()).exp()
        values |= {
            "clamped_ratios": _sum(is_beyond(terms.log_ratio_C)),
            "ratio_terms": _number(ratio_C),
            "ratio": ratio_C.sum(),
            "ratio_max": ratio_C.max(),
            "ratio_min": ratio_C.min(),
        }
    if terms.old_C is not None:
        values["old_terms"] = _number(terms.old_C)
        values["old_kl"] = clamp_k3(terms.logprob_C.double() - terms.old_C.double())[0].sum()
    return values


def _correction(terms: CountedTerms) -> dict[str, Tensor]:
    if terms.correction is None:
        return {}
    weight_C = terms.correction.weight_L.double()
    return {
        "corrected": _number(weight_C),
        "correction_weight": weight_C.sum(),
        "correction_square": weight_C.square().sum(),
        "correction_masked": _sum(terms.correction.masked_L),
        "correction_truncated": _sum(terms.correction.truncated_L),
    }


def _sampler(terms: CountedTerms) -> dict[str, Tensor]:
    """How far the sampler's log-probs are from the policy's, where they can be compared."""
    if terms.sampler_C is None:
        return {}
    gap_C = terms.logprob_C.double() - terms.sampler_C.double()
    gap_C = torch.where(terms.sampler_usable_C, gap_C, torch.zeros_like(gap_C))
    kl_C, clamped_C = clamp_k3(gap_C)
    return {
        "sampler_terms": _sum(terms.sampler_usable_C),
        "sampler_kl": kl_C.sum(),
        "clamped_sampler_gaps": _sum(clamped_C),
        "sampler_gap": gap_C.sum(),
        "sampler_gap_abs": gap_C.abs().sum(),
        "sampler_gap_max": gap_C.abs().max(),
    }


def _sum(value_C: Tensor) -> Tensor:
    return value_C.sum(dtype=torch.float64)


def _number(value_C: Tensor) -> Tensor:
    return value_C.new_full((), float(len(value_C)), dtype=torch.float64)


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
