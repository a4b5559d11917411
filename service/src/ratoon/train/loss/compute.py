"""One micro-batch's loss: from log-probs to gradients with respect to them, in two phases.

First what depends on a whole path (sequence ratio, sequence weight), over all its trained tokens;
then the terms that count. Nothing is divided by a counter, so no cut of the batch changes the
result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon.train.loss.clamp import clamp_gap
from ratoon.train.loss.correction import CorrectionTerms, Mismatch, correction_terms
from ratoon.train.loss.kl import kl_terms
from ratoon.train.loss.ratio import token_log_ratio
from ratoon.train.loss.registry import LOSS_FUNCTIONS
from ratoon.train.loss.spec import (
    LOSS_DEFAULTS,
    CispoObjective,
    LinearObjective,
    Loss,
    SapoObjective,
)
from ratoon.train.loss.term_sums import CountedTerms, sum_terms
from ratoon.train.loss.terms import PolicyInputs, RatioInputs, TermColumns
from ratoon_proto.types import CorrectionLevel


@dataclass(frozen=True, slots=True, kw_only=True)
class LossGradients:
    """Of the loss sum, [L] each; `grad_entropy_L` None: no entropy bonus."""

    grad_logprob_L: Tensor
    grad_entropy_L: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput(LossGradients):
    """A loss with what its report is made of, by more operations than the gradients."""

    counted: CountedTerms

    def sums(self) -> Tensor:
        """float64 [F], as `LossSums.total` takes it, on the device of the log-probs."""
        return sum_terms(self.counted)


def is_of_single_tokens(loss: Loss) -> bool:
    """Whether a term's gradient depends on no other term: no sequence ratio, no such weight."""
    rules = (loss.correction, loss.correction_mask)
    is_by_token = all(rule is None or rule.level is CorrectionLevel.TOKEN for rule in rules)
    return LOSS_FUNCTIONS[loss.kind].ratio is token_log_ratio and is_by_token


def compute_loss(
    loss: Loss, columns: TermColumns, logprob_L: Tensor, entropy_L: Tensor
) -> LossOutput:
    """Loss sum over the counted terms and its gradient.

    `logprob_L` and `entropy_L`: detached, float32 or float64 [L], of the current policy at the
    sampling temperature. Where `columns.old_L` is None the old log-probs are the current ones.
    """
    logprob_L = logprob_L.detach().requires_grad_()
    entropy_L = entropy_L.detach().requires_grad_()
    old_L = logprob_L.detach() if columns.old_L is None else columns.old_L
    functions = LOSS_FUNCTIONS[loss.kind]
    log_ratio_L = functions.ratio(
        RatioInputs(
            logprob_L=logprob_L,
            old_L=old_L,
            sequence_L=columns.sequence_L,
            num_sequences=columns.num_sequences,
        )
    )

    # Only counted terms go on: an overflow in another path's term times 0 would still be NaN.
    counted_C = columns.counted_C
    logprob_C, entropy_C = logprob_L[counted_C], entropy_L[counted_C]
    weight_C = columns.weight_L[counted_C]
    # Clamped here, whatever the loss makes of it: e^99 in one term is an infinite loss.
    free_log_ratio_C = log_ratio_L[counted_C]
    log_ratio_C = clamp_gap(free_log_ratio_C)
    policy = functions.terms(
        PolicyInputs(
            objective=loss.objective,
            logprob_L=logprob_C,
            old_L=old_L[counted_C],
            log_ratio_L=log_ratio_C,
            advantage_L=columns.advantage_L[counted_C],
        )
    )
    gradient_term_C = policy.loss_L
    correction = _correction(loss, columns, old_L)
    if correction is not None:
        gradient_term_C = gradient_term_C * correction.weight_L
    term_C = gradient_term_C
    kl = None
    if loss.kl is not None:
        assert columns.reference_L is not None
        kl = kl_terms(loss.kl, logprob_C, columns.reference_L[counted_C], old_L[counted_C])
        term_C = term_C + loss.kl.coefficient * kl.value_L
    if loss.entropy_coefficient != 0:
        term_C = term_C - loss.entropy_coefficient * entropy_C

    grad_logprob_L, grad_entropy_L = _gradients((weight_C * term_C).sum(), logprob_L, entropy_L)
    has_ratio = LOSS_DEFAULTS[loss.kind].has_ratio
    has_no_clip = isinstance(loss.objective, LinearObjective | SapoObjective)
    return LossOutput(
        grad_logprob_L=grad_logprob_L,
        grad_entropy_L=grad_entropy_L if loss.entropy_coefficient != 0 else None,
        counted=CountedTerms(
            weight_C=weight_C,
            loss_C=term_C,
            policy_gradient_C=gradient_term_C,
            kl=kl,
            entropy_C=entropy_C,
            logprob_C=logprob_C,
            log_ratio_C=free_log_ratio_C if has_ratio else None,
            advantage_C=None if has_no_clip else columns.advantage_L[counted_C],
            old_C=None if loss.old_logprobs is None else old_L[counted_C],
            sampler_C=None if columns.sampler_L is None else columns.sampler_L[counted_C],
            sampler_usable_C=columns.sampler_usable_L[counted_C],
            policy=policy,
            clip_keeps_gradient=isinstance(loss.objective, CispoObjective),
            correction=correction,
        ),
    )


def _correction(loss: Loss, columns: TermColumns, old_L: Tensor) -> CorrectionTerms | None:
    """The correction of the counted terms; None: the loss has none."""
    if loss.correction is None and loss.correction_mask is None:
        return None
    assert columns.sampler_L is not None
    mismatch = Mismatch(
        gap_L=old_L - columns.sampler_L,
        sequence_L=columns.sequence_L,
        num_sequences=columns.num_sequences,
    )
    return correction_terms(loss.correction, loss.correction_mask, mismatch).at(columns.counted_C)


def _gradients(total: Tensor, logprob_L: Tensor, entropy_L: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `total` with respect to log-probs and entropies, zero where it has none."""
    if not total.requires_grad:
        return torch.zeros_like(logprob_L), torch.zeros_like(entropy_L)
    grads = torch.autograd.grad(
        total, [logprob_L, entropy_L], allow_unused=True, materialize_grads=True
    )
    return grads[0], grads[1]
