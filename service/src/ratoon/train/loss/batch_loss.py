"""The loss of a packed batch's terms, and the LM head run with it row by row.

What is known of terms before the model runs is put on the device once. A loss of single tokens is
computed together with the LM head, so that logits are computed once; the bits are those of the two
run one after the other, as the gradient of a log-prob depends on that log-prob alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import compress
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratoon.model.lm_head import LmHead
from ratoon.rollout.packed import PackedBatch
from ratoon.train.loss.compute import LossGradients, LossOutput, TermColumns, compute_loss
from ratoon.train.micro_batches import (
    DeviceBatch,
    HeadPart,
    TokenOutputs,
    put,
    put_index,
    run_head,
)
from ratoon.train.prepare import Prepared
from ratoon.train.rollout_figures import TokenParts
from ratoon_kernels import token_logprobs_forward_backward
from ratoon_proto.types import OldLogprobsKind


class BatchLoss:
    """The loss of any of a batch's terms: int64 [n], ascending indexes of the packed batch's."""

    def __init__(
        self,
        prepared: Prepared,
        packed: PackedBatch,
        reference_L: Tensor | None,
        found: TokenParts,
        like: Tensor,
    ) -> None:
        """`reference_L`: of all terms, None without a KL term; `found`: takes what is found of each
        term; `like`: of the device and dtype of log-probs."""
        self._loss, self._device = prepared.loss, like.device
        self._token_L = packed.term_token
        # Other terms are here for their log-probs alone.
        self._is_trained_L = prepared.columns.trained_J[packed.term_token]
        self._is_asked = prepared.asked_J is not None
        self._is_counted_L = prepared.columns.counted_J[packed.term_token]
        self._found = found
        self._columns = _columns(prepared, packed, reference_L, like)

    def of(
        self,
        terms: NDArray[np.int64],
        logprob_L: Tensor,
        entropy_L: Tensor,
        candidate_LK: Tensor | None = None,
        value_L: Tensor | None = None,
    ) -> LossGradients:
        """Gradients at terms with these log-probs, entropies, log-probs of candidates, values."""
        is_trained_L = self._is_trained_L[terms]
        if is_trained_L.all():
            return self._of(terms, logprob_L, entropy_L, candidate_LK, value_L)
        trained = put_index(np.flatnonzero(is_trained_L), self._device)
        outputs = _at(trained, candidate_LK), _at(trained, value_L)
        loss = self._of(terms[is_trained_L], logprob_L[trained], entropy_L[trained], *outputs)
        return loss.among(trained, len(terms))

    def _of(
        self,
        terms: NDArray[np.int64],
        logprob_L: Tensor,
        entropy_L: Tensor,
        candidate_LK: Tensor | None,
        value_L: Tensor | None,
    ) -> LossOutput:
        """The loss of trained terms."""
        counted = put_index(np.flatnonzero(self._is_counted_L[terms]), self._device)
        columns = self._columns.at(put_index(terms, self._device), counted)
        return compute_loss(self._loss, columns, logprob_L, entropy_L, candidate_LK, value_L)

    def sums(
        self,
        terms: NDArray[np.int64],
        logprob_L: Tensor,
        entropy_L: Tensor,
        candidate_LK: Tensor | None = None,
        value_L: Tensor | None = None,
    ) -> Tensor:
        """Sums of these terms for the report, as `LossOutput.sums`; asked once for each term."""
        if self._is_asked:
            self._found.answer(self._token_L[terms], logprob_L, entropy_L)
            is_trained_L = self._is_trained_L[terms]
            trained = put_index(np.flatnonzero(is_trained_L), self._device)
            terms = terms[is_trained_L]
            logprob_L, entropy_L = logprob_L[trained], entropy_L[trained]
            candidate_LK, value_L = _at(trained, candidate_LK), _at(trained, value_L)
        output = self._of(terms, logprob_L, entropy_L, candidate_LK, value_L)
        self._found.add(self._token_L[terms], logprob_L, output)
        return output.sums()


def _at(places: slice | Tensor, values: Tensor | None) -> Tensor | None:
    return None if values is None else values[places]


def _columns(
    prepared: Prepared,
    packed: PackedBatch,
    reference_L: Tensor | None,
    like: Tensor,
) -> TermColumns:
    """Columns of all terms, floats in the dtype of `like`, as if all of them counted."""
    batch, columns = prepared.batch, prepared.columns

    def take(column_J: NDArray[np.floating]) -> Tensor:
        """Values at terms of a column [J], or [J, K]."""
        return put(column_J[packed.term_token], like.device).to(like.dtype)

    old_J, sampler_J = _old_logprobs(prepared), batch.sampler_logprobs
    teacher_JK = None if prepared.loss.distillation is None else batch.teacher_logprobs
    value = prepared.loss.value
    return_J = None if value is None else batch.returns
    old_value_J = None if value is None or value.clip is None else batch.old_values
    is_usable_S = ~batch.sampler_is_raw[packed.forest.sequences]
    if sampler_J is None:
        is_usable_S = np.zeros_like(is_usable_S)
    return TermColumns(
        sequence_L=put(packed.term_sequence, like.device),
        num_sequences=len(packed.forest.sequences),
        counted_C=slice(None),
        weight_L=take(columns.weight_J),
        advantage_L=take(columns.advantage_J),
        old_L=None if old_J is None else take(old_J),
        sampler_L=None if sampler_J is None else take(sampler_J),
        sampler_usable_L=put(is_usable_S[packed.term_sequence], like.device),
        reference_L=None if reference_L is None else reference_L.to(like.dtype),
        teacher_LK=None if teacher_JK is None else take(teacher_JK),
        return_L=None if return_J is None else take(return_J),
        old_value_L=None if old_value_J is None else take(old_value_J),
    )


def _old_logprobs(prepared: Prepared) -> NDArray[np.floating] | None:
    """Old log-probs [J]; None: there are none, or they are the current ones."""
    old = prepared.loss.old_logprobs
    if old is None or old.kind is OldLogprobsKind.ON_POLICY:
        return None
    if old.kind is OldLogprobsKind.SAMPLER:
        return prepared.batch.sampler_logprobs
    if old.kind is OldLogprobsKind.GIVEN:
        return prepared.batch.old_logprobs
    return prepared.old_logprobs_J


class LossOfTerms(Protocol):
    """The loss of any of a packed batch's terms: int64 [n], ascending indexes of them, with their
    log-probs, entropies and, where the batch has candidates, log-probs [n, K] of these, and values
    [n] where it has a value head."""

    def of(
        self,
        terms: NDArray[np.int64],
        logprob_L: Tensor,
        entropy_L: Tensor,
        candidate_LK: Tensor | None,
        value_L: Tensor | None,
        /,
    ) -> LossGradients:
        """Its gradients."""
        ...

    def sums(
        self,
        terms: NDArray[np.int64],
        logprob_L: Tensor,
        entropy_L: Tensor,
        candidate_LK: Tensor | None,
        value_L: Tensor | None,
        /,
    ) -> Tensor:
        """Sums of the terms for the report, as `LossOutput.sums`; asked once for each term."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPart:
    """Predicting rows of a batch that one run of the model has, and what they predict."""

    # A range of the batch's rows.
    rows: slice
    # int64 [m] on the host: targets of those rows, ascending.
    targets: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLoss:
    """What became of a part's rows."""

    outputs: TokenOutputs
    # Hidden states [R, D] and, where they have a gradient, values [R]; gradients of these.
    roots: list[Tensor]
    seeds: list[Tensor]
    # As `LossOutput.sums`, if the part has a term.
    sums: list[Tensor]

    def backward(self) -> None:
        """Add the gradient of the loss to that of every parameter but the LM head's.

        Hidden states have no graph if nothing of the decoder is trained.
        """
        with_graph = [root.requires_grad for root in self.roots]
        if any(with_graph):
            roots, seeds = compress(self.roots, with_graph), compress(self.seeds, with_graph)
            torch.autograd.backward([*roots], [*seeds])


class RowTerms:
    """The terms of a packed batch by the row that predicts them."""

    def __init__(self, packed: PackedBatch) -> None:
        self._target = packed.term_target
        self._row = packed.target_row[packed.term_target]
        self._order = np.argsort(self._row, kind="stable")
        self._sorted_row = self._row[self._order]

    def of(self, start: int, stop: int) -> NDArray[np.int64]:
        """int64: terms of the rows [start, stop), ascending."""
        first, last = np.searchsorted(self._sorted_row, (start, stop))
        return np.sort(self._order[first:last])

    def target(self, terms: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._target[terms]

    def row(self, terms: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._row[terms]


def whole_batch(packed: PackedBatch) -> RowPart:
    """All rows and targets."""
    return RowPart(
        rows=slice(0, len(packed.row_index)), targets=np.arange(len(packed.target_token))
    )


def run_row_loss(
    lm_head: LmHead,
    hidden_RD: Tensor,
    batch: DeviceBatch,
    part: RowPart,
    terms: RowTerms,
    loss: LossOfTerms,
) -> RowLoss:
    """Loss of a part of `batch`, whose hidden states, [R, D] of its rows, enter with their graph.

    Gradients of the LM head's weight, where it is trained, and of an adapter on it are added to
    those of the parameters; `backward` of what is returned does the rest.
    """
    own = terms.of(part.rows.start, part.rows.stop)
    device = hidden_RD.device
    own_terms = put_index(own, device) if batch.has_candidates else slice(0)
    head = HeadPart(part.rows, put(part.targets, device), own_terms)
    token_M, row_M = head.tokens(batch)
    value_R = None if batch.value_head is None else batch.value_head(hidden_RD)
    seeds = _Seeds(part, own, head, batch, terms, loss, value_R)
    if value_R is not None and not batch.moves_logprobs:
        return _run_critic(lm_head, hidden_RD, value_R, batch, seeds)
    own_RD = hidden_RD.detach().requires_grad_()
    term = lm_head.term(own_RD)
    weight_VD = lm_head.weight_VD
    found = token_logprobs_forward_backward(
        own_RD,
        weight_VD,
        token_M,
        row_M,
        batch.row_temperature_R[part.rows],
        seeds.of_rows,
        needs_lm_head=weight_VD.requires_grad,
        mask=batch.mask_of(part.rows),
        term=term,
    )
    if weight_VD.requires_grad:
        # Through a view: a gradient that comes straight from here would be copied.
        torch.autograd.backward([weight_VD.view_as(weight_VD)], [found.dlm_head_VD])
    dhidden_RD = found.dhidden_RD
    if term is not None and found.dterm is not None:
        factors = [term.u_RA, term.b_VA.view_as(term.b_VA)]
        torch.autograd.backward(factors, [found.dterm.u_RA, found.dterm.b_VA])
        assert own_RD.grad is not None
        dhidden_RD = dhidden_RD + own_RD.grad
    logprob_M, candidate_LK = head.split(found.logprob_M, batch)
    outputs = TokenOutputs(
        logprob_M=logprob_M,
        entropy_R=found.entropy_R,
        candidate_LK=candidate_LK,
        value_R=None if value_R is None else value_R.detach(),
    )
    roots, grads = [hidden_RD], [dhidden_RD]
    if value_R is not None and seeds.dvalue_R is not None:
        roots.append(value_R)
        grads.append(seeds.dvalue_R)
    return RowLoss(outputs=outputs, roots=roots, seeds=grads, sums=seeds.sums(outputs))


def _run_critic(
    lm_head: LmHead, hidden_RD: Tensor, value_R: Tensor, batch: DeviceBatch, seeds: _Seeds
) -> RowLoss:
    """The loss of values alone: the LM head is run for the report, and is not run backward."""
    with torch.no_grad():
        outputs = run_head(lm_head, hidden_RD, replace(batch, value_head=None), seeds.head)
    outputs = replace(outputs, value_R=value_R.detach())
    seeds.of_rows(slice(0, len(hidden_RD)), outputs.logprob_M, outputs.entropy_R)
    assert seeds.dvalue_R is not None, "every row has a term"
    return RowLoss(
        outputs=outputs, roots=[value_R], seeds=[seeds.dvalue_R], sums=seeds.sums(outputs)
    )


class _Seeds:
    """Gradients of a part's log-probs, entropies and values, filled in as rows are run."""

    def __init__(
        self,
        part: RowPart,
        own: NDArray[np.int64],
        head: HeadPart,
        batch: DeviceBatch,
        terms: RowTerms,
        loss: LossOfTerms,
        value_R: Tensor | None,
    ) -> None:
        """`own`: the part's terms, ascending."""
        self._part, self._own = part, own
        self.head, self._batch = head, batch
        self._terms = terms
        self._loss = loss
        # As `HeadPart.tokens` has them.
        self._dlogprob_M: Tensor | None = None
        self._dentropy_R: Tensor | None = None
        self._value_R = None if value_R is None else value_R.detach()
        # Gradients of the values; None: there are none.
        self.dvalue_R: Tensor | None = None

    def of_rows(
        self, rows: slice, logprob_M: Tensor, entropy_R: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        first = self._part.rows.start
        terms = self._terms.of(first + rows.start, first + rows.stop)
        if len(terms):
            device = logprob_M.device
            target_L, row_L = self._places(terms, device)
            if self._dlogprob_M is None:
                self._dlogprob_M = torch.zeros_like(logprob_M)
            target_M, all_NK = self.head.split(logprob_M, self._batch)
            dtarget_M, dall_NK = self.head.split(self._dlogprob_M, self._batch)
            own_L = slice(0)
            if all_NK is not None:
                own_L = put_index(np.searchsorted(self._own, terms), device)
            loss = self._loss.of(
                terms,
                target_M[target_L],
                entropy_R[row_L],
                _at(own_L, all_NK),
                _at(row_L, self._value_R),
            )
            _add_terms(dtarget_M, target_L, loss.grad_logprob_L)
            if dall_NK is not None and loss.grad_candidate_LK is not None:
                dall_NK[own_L] = loss.grad_candidate_LK
            if loss.grad_entropy_L is not None:
                if self._dentropy_R is None:
                    self._dentropy_R = torch.zeros_like(entropy_R)
                _add_terms(self._dentropy_R, row_L, loss.grad_entropy_L)
            if self._value_R is not None and loss.grad_value_L is not None:
                if self.dvalue_R is None:
                    self.dvalue_R = torch.zeros_like(self._value_R)
                _add_terms(self.dvalue_R, row_L, loss.grad_value_L)
        return self._dlogprob_M, self._dentropy_R

    def sums(self, outputs: TokenOutputs) -> list[Tensor]:
        """Sums of all terms at once, which takes fewer operations than for each run of rows."""
        if not len(self._own):
            return []
        target_L, row_L = self._places(self._own, outputs.logprob_M.device)
        logprob_L, entropy_L = outputs.logprob_M[target_L], outputs.entropy_R[row_L]
        others = outputs.candidate_LK, _at(row_L, outputs.value_R)
        return [self._loss.sums(self._own, logprob_L, entropy_L, *others)]

    def _places(
        self, terms: NDArray[np.int64], device: torch.device
    ) -> tuple[slice | Tensor, slice | Tensor]:
        """Places of the terms' log-probs and entropies among the part's."""
        target = np.searchsorted(self._part.targets, self._terms.target(terms))
        row = self._terms.row(terms) - self._part.rows.start
        return put_index(target, device), put_index(row, device)


def _add_terms(sums: Tensor, index_L: slice | Tensor, grad_L: Tensor) -> None:
    """Sum the terms' gradients at what they share; no two of a range do."""
    if isinstance(index_L, slice):
        sums[index_L].add_(grad_L)
    else:
        sums.index_add_(0, index_L, grad_L)
