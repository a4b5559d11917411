"""The LM head and a loss of single tokens, run together row by row, so that logits are computed
once.

The bits are those of the two run one after the other: the gradient of a log-prob depends on that
log-prob alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratoon.rollout.packed import PackedBatch
from ratoon.train.device_batch import DeviceBatch, TokenOutputs, put
from ratoon.train.loss.compute import LossOutput
from ratoon_kernels import token_logprobs_forward_backward

# Terms (int64 [n], indexes of the packed batch's), their log-probs and entropies -> their loss.
LossOfTerms = Callable[[NDArray[np.int64], Tensor, Tensor], LossOutput]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPart:
    """Predicting rows of a batch that one run of the model has, and what they predict."""

    # A range of the batch's rows.
    rows: slice
    # int64 [m] on the host: targets of those rows, ascending.
    targets: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLoss:
    """What became of a part's rows. `dhidden_RD` in the dtype of the hidden states."""

    outputs: TokenOutputs
    dhidden_RD: Tensor
    # `LossOutput.sums_F` of each run of rows.
    sums: list[Tensor]


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
    lm_head_VD: Tensor,
    hidden_RD: Tensor,
    batch: DeviceBatch,
    part: RowPart,
    terms: RowTerms,
    loss_of: LossOfTerms,
) -> RowLoss:
    """Loss and gradients of a part of `batch`, whose hidden states, [R, D] of its rows, enter.

    The gradient of the LM head, where it is trained, is added to its parameter's.
    """
    rows, targets_M = part.rows, put(part.targets, hidden_RD.device)
    seeds = _Seeds(part, terms, loss_of)
    found = token_logprobs_forward_backward(
        hidden_RD,
        lm_head_VD,
        batch.target_token_M[targets_M],
        batch.target_row_M[targets_M] - rows.start,
        batch.row_temperature_R[rows],
        seeds.of_rows,
        needs_lm_head=lm_head_VD.requires_grad,
    )
    if lm_head_VD.requires_grad:
        # Through a view: a gradient that comes straight from here would be copied.
        torch.autograd.backward([lm_head_VD.view_as(lm_head_VD)], [found.dlm_head_VD])
    return RowLoss(
        outputs=TokenOutputs(logprob_M=found.logprob_M, entropy_R=found.entropy_R),
        dhidden_RD=found.dhidden_RD,
        sums=seeds.sums,
    )


class _Seeds:
    """Gradients of a part's log-probs and entropies, filled in as rows are run."""

    def __init__(self, part: RowPart, terms: RowTerms, loss_of: LossOfTerms) -> None:
        self.sums: list[Tensor] = []
        self._part = part
        self._terms = terms
        self._loss_of = loss_of
        self._dlogprob_M: Tensor | None = None
        self._dentropy_R: Tensor | None = None

    def of_rows(
        self, rows: slice, logprob_M: Tensor, entropy_R: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        first, device = self._part.rows.start, logprob_M.device
        terms = self._terms.of(first + rows.start, first + rows.stop)
        if len(terms):
            target_M = np.searchsorted(self._part.targets, self._terms.target(terms))
            target_L, row_L = put(target_M, device), put(self._terms.row(terms) - first, device)
            loss = self._loss_of(terms, logprob_M[target_L], entropy_R[row_L])
            self.sums.append(loss.sums_F)
            if self._dlogprob_M is None:
                self._dlogprob_M = torch.zeros_like(logprob_M)
            _add_terms(self._dlogprob_M, target_L, loss.grad_logprob_L)
            if loss.grad_entropy_L is not None:
                if self._dentropy_R is None:
                    self._dentropy_R = torch.zeros_like(entropy_R)
                _add_terms(self._dentropy_R, row_L, loss.grad_entropy_L)
        return self._dlogprob_M, self._dentropy_R


def _add_terms(sums: Tensor, index_L: Tensor, grad_L: Tensor) -> None:
    """Sum the terms' gradients at what they share."""
    sums.index_add_(0, index_L, grad_L)
