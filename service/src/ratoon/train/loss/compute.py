"""One micro-batch's loss: from log-probs to gradients with respect to them, in two phases.

First what depends on a whole path (sequence ratio, sequence weight), over all its trained tokens;
then the terms that count, one per (sequence path, trained token). Nothing is divided by a counter,
so no cut of the batch changes the result.

Shape letters of this package: L terms, C terms that count, S sequences of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon.train.loss.divergences import divergence_terms
from ratoon.train.loss.kinds import LOSSES
from ratoon.train.loss.objectives import PolicyInputs, held_gap, policy_terms
from ratoon.train.loss.ratios import (
    CorrectionTerms,
    Mismatch,
    clamp_gap,
    correction_terms,
    kl_terms,
    sequence_log_ratio,
)
from ratoon.train.loss.spec import Loss
from ratoon.train.loss.sums import CountedTerms, sum_terms
from ratoon.train.loss.values import value_terms
from ratoon_proto.types import CorrectionLevel


@dataclass(frozen=True, slots=True, kw_only=True)
class TermColumns:
    """What is known of each term before the model runs. None: the loss does not use it.

    Terms that do not count (`shared_tokens: once`, paid by an earlier path) are here all the same:
    sequence ratios and sequence weights are over all of a path's trained tokens.
    """

    # int64 [L], ascending: index of the term's sequence in 0 .. num_sequences - 1.
    sequence_L: Tensor
    num_sequences: int
    # int64 [C]: indexes of the terms that count, ascending, or the range of them.
    counted_C: Tensor | slice
    # [L]: 1 or 1 / (the path's counted tokens); unused where the term does not count.
    weight_L: Tensor
    # [L]: advantage, or the signed token weight of cross_entropy.
    advantage_L: Tensor
    # [L]; None: the loss has no old log-probs, or they are the current ones (on_policy).
    old_L: Tensor | None
    # [L]; bool [L]: false where the sampler's log-probs are not at the sampling temperature.
    sampler_L: Tensor | None
    sampler_usable_L: Tensor
    # [L]; None: no KL term.
    reference_L: Tensor | None
    # [L, K]: the teacher's log-probs of each term's candidates; None: no distillation term.
    teacher_LK: Tensor | None = None
    # [L]; None: no value term, no clip of it.
    return_L: Tensor | None = None
    old_value_L: Tensor | None = None

    def at(self, terms: Tensor | slice, counted_C: Tensor | slice) -> TermColumns:
        """Columns of some terms, of which `counted_C` count."""

        def pick(column_L: Tensor | None) -> Tensor | None:
            return None if column_L is None else column_L[terms]

        return TermColumns(
            sequence_L=self.sequence_L[terms],
            num_sequences=self.num_sequences,
            counted_C=counted_C,
            weight_L=self.weight_L[terms],
            advantage_L=self.advantage_L[terms],
            old_L=pick(self.old_L),
            sampler_L=pick(self.sampler_L),
            sampler_usable_L=self.sampler_usable_L[terms],
            reference_L=pick(self.reference_L),
            teacher_LK=pick(self.teacher_LK),
            return_L=pick(self.return_L),
            old_value_L=pick(self.old_value_L),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossGradients:
    """Gradients of the loss sum, [L] each, [L, K] of candidates.

    None: there is no entropy bonus, no distillation, no value term.
    """

    grad_logprob_L: Tensor
    grad_entropy_L: Tensor | None = None
    grad_candidate_LK: Tensor | None = None
    grad_value_L: Tensor | None = None

    def among(self, terms: Tensor | slice, num_terms: int) -> LossGradients:
        """The gradients of so many terms, of which these are `terms`; those of the others are 0."""

        def spread(grad_L: Tensor) -> Tensor:
            spread_L = grad_L.new_zeros((num_terms, *grad_L.shape[1:]))
            spread_L[terms] = grad_L
            return spread_L

        entropy_L, candidate_LK = self.grad_entropy_L, self.grad_candidate_LK
        value_L = self.grad_value_L
        return LossGradients(
            grad_logprob_L=spread(self.grad_logprob_L),
            grad_entropy_L=None if entropy_L is None else spread(entropy_L),
            grad_candidate_LK=None if candidate_LK is None else spread(candidate_LK),
            grad_value_L=None if value_L is None else spread(value_L),
        )


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
    return is_by_token and not loss.objective.ratio_is_of_sequence


def compute_loss(
    loss: Loss,
    columns: TermColumns,
    logprob_L: Tensor,
    entropy_L: Tensor,
    candidate_LK: Tensor | None = None,
    value_L: Tensor | None = None,
) -> LossOutput:
    """Loss sum over the counted terms and its gradient.

    `logprob_L` and `entropy_L`: detached, float32 or float64 [L], of the current policy at the
    sampling temperature; `candidate_LK`: log-probs of the candidates, for a loss that distils;
    `value_L`: values, for a loss with a value term.
    Where `columns.old_L` is None the old log-probs are the current ones.
    """
    logprob_L = logprob_L.detach().requires_grad_()
    entropy_L = entropy_L.detach().requires_grad_()
    old_L = logprob_L.detach() if columns.old_L is None else columns.old_L
    log_ratio_L = logprob_L - old_L
    if loss.objective.ratio_is_of_sequence:
        gap_L = held_gap(loss.objective, log_ratio_L.detach(), columns.advantage_L)
        log_ratio_L = sequence_log_ratio(
            logprob_L, gap_L, columns.sequence_L, columns.num_sequences
        )

    # Only counted terms go on: an overflow in another path's term times 0 would still be NaN.
    counted_C = columns.counted_C
    logprob_C, entropy_C = logprob_L[counted_C], entropy_L[counted_C]
    weight_C = columns.weight_L[counted_C]
    # Clamped here, whatever the loss makes of it: e^99 in one term is an infinite loss.
    free_log_ratio_C = log_ratio_L[counted_C]
    log_ratio_C = clamp_gap(free_log_ratio_C)
    policy = policy_terms(
        loss.objective,
        PolicyInputs(
            logprob_L=logprob_C,
            old_L=old_L[counted_C],
            log_ratio_L=log_ratio_C,
            advantage_L=columns.advantage_L[counted_C],
        ),
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
    divergence = None
    if loss.distillation is not None:
        assert candidate_LK is not None
        assert columns.teacher_LK is not None
        candidate_LK = candidate_LK.detach().requires_grad_()
        divergence = divergence_terms(
            loss.distillation, candidate_LK[counted_C], columns.teacher_LK[counted_C]
        )
        term_C = term_C + loss.distillation.coefficient * divergence.value_L
    value = None
    if loss.value is not None:
        assert value_L is not None
        assert columns.return_L is not None
        value_L = value_L.detach().requires_grad_()
        old_value_L = columns.old_value_L
        value = value_terms(
            loss.value,
            value_L[counted_C],
            columns.return_L[counted_C],
            None if old_value_L is None else old_value_L[counted_C],
        )
        term_C = term_C + loss.value.coefficient * value.loss_L

    inputs = {"grad_logprob_L": logprob_L}
    if loss.entropy_coefficient != 0:
        inputs["grad_entropy_L"] = entropy_L
    if divergence is not None and candidate_LK is not None:
        inputs["grad_candidate_LK"] = candidate_LK
    if value is not None and value_L is not None:
        inputs["grad_value_L"] = value_L
    gradients = _gradients((weight_C * term_C).sum(), inputs)
    has_ratio, has_clip = LOSSES[loss.kind].has_ratio, loss.objective.has_clip
    return LossOutput(
        **gradients,
        counted=CountedTerms(
            index_C=counted_C,
            weight_C=weight_C,
            loss_C=term_C,
            policy_gradient_C=gradient_term_C,
            kl=kl,
            divergence=divergence,
            value=value,
            entropy_C=entropy_C,
            logprob_C=logprob_C,
            log_ratio_C=free_log_ratio_C if has_ratio else None,
            advantage_C=columns.advantage_L[counted_C] if has_clip else None,
            old_C=None if loss.old_logprobs is None else old_L[counted_C],
            sampler_C=None if columns.sampler_L is None else columns.sampler_L[counted_C],
            sampler_usable_C=columns.sampler_usable_L[counted_C],
            policy=policy,
            clip_keeps_gradient=loss.objective.clip_keeps_gradient,
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


def _gradients(total: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of `total` with respect to each input, by its name, zero where it has none."""
    if not total.requires_grad:
        return {name: torch.zeros_like(value) for name, value in inputs.items()}
    found = torch.autograd.grad(
        total, [*inputs.values()], allow_unused=True, materialize_grads=True
    )
    return dict(zip(inputs, found, strict=True))
