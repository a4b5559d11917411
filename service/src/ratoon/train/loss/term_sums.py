"""What one micro-batch's counted terms add to the sums of the report, all of it on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon.train.loss.clamp import clamp_gap, clamp_k3, is_beyond
from ratoon.train.loss.correction import CorrectionTerms
from ratoon.train.loss.histogram import count_log_ratios
from ratoon.train.loss.kl import KlTerms
from ratoon.train.loss.sums import pack_sums
from ratoon.train.loss.terms import PolicyTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedTerms:
    """Everything that is known of the terms that count, [C] each; gradients are ignored.

    None: the loss has no KL term, ratio, clip, old log-probs or correction; nobody sent sampler
    log-probs.
    """

    weight_C: Tensor
    # The loss, and those of its summands that are reported by themselves.
    loss_C: Tensor
    policy_gradient_C: Tensor
    kl: KlTerms | None
    entropy_C: Tensor
    logprob_C: Tensor
    # Of the ratio that the loss is built on, before its clamp: for gspo the sequence's.
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
    """float64 [F], as `LossSums.total` takes it; nothing waits for the device."""
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


def _clip(terms: CountedTerms) -> dict[str, Tensor]:
    """What the clip holds of each sign: of one sign it may hold most, and of all terms few."""
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
