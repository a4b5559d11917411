"""What becomes of the hidden states of stages: log-probs, a loss, and its backward.

Rows and targets belong to the stage that holds the row, terms to the one where their sequence ends.
Where several ranks run a stage together, each has the rows of its own tokens, and all have the
terms. A stage is run backward once, after all that descend from it.

A row is run in the stage that holds it, with all its targets: the last row of a prefix predicts the
first tokens of the waves below. A sequence's terms therefore lie in the stages along its path. A
loss of single tokens takes each of them where it is. Any other is computed in the stage that holds
the sequence's end, from all its terms: those of its path have been forwarded then, and none of them
has been run backward. So gradients that fall on prefixes wait with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratoon.model.attention import PathAttention
from ratoon.model.lm_head import LmHead
from ratoon.model.router import RoutedTokens
from ratoon.rollout.packed import PackedBatch, Stage
from ratoon.shards.sequence_group import SequenceGroup
from ratoon.train.clock import DeviceClock
from ratoon.train.loss.batch_loss import LossOfTerms, RowLoss, RowPart, RowTerms, run_row_loss
from ratoon.train.micro_batches import DeviceBatch, HeadPart, TokenOutputs, put, run_head
from ratoon_kernels import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """What one stage adds to the outputs of the batch, as far as this rank runs it."""

    # Its packed tokens.
    tokens: Span
    # Its predicting rows and their targets; with the terms of these on the device.
    own: RowPart
    head: HeadPart
    # int64 [n] on the host: terms of the sequences that end in the stage, ascending.
    terms: NDArray[np.int64]


def cut_outputs(
    packed: PackedBatch,
    stages: Sequence[Stage],
    group: SequenceGroup,
    device: torch.device,
    *,
    has_candidates: bool,
) -> tuple[StagePart, ...]:
    """The part of each stage."""
    bounds = np.array([*(stage.start for stage in stages), packed.forest.num_tokens], np.int64)
    shares = [group.share(Span(stage.start, stage.stop)) for stage in stages]
    row_bounds = np.searchsorted(
        packed.row_index, [bound for own in shares for bound in (own.start, own.stop)]
    )
    # Rows of other ranks are of no stage.
    row_stage = np.full(len(packed.row_index), len(stages))
    for index, (first, last) in enumerate(row_bounds.reshape(-1, 2).tolist()):
        row_stage[first:last] = index
    ends = packed.forest.node_stop[packed.forest.sequence_node[packed.term_sequence]] - 1
    term_stage = np.searchsorted(bounds, ends, side="right") - 1
    targets = _split(row_stage[packed.target_row], len(stages) + 1)
    terms = _split(term_stage, len(stages))
    predicted = RowTerms(packed) if has_candidates else None
    parts: list[StagePart] = []
    for index, tokens in enumerate(shares):
        first, last = row_bounds[2 * index : 2 * index + 2].tolist()
        rows = slice(first, last)
        own_terms = slice(0)
        if predicted is not None:
            own_terms = put(predicted.of(first, last), device)
        parts.append(
            StagePart(
                tokens=tokens,
                own=RowPart(rows=rows, targets=targets[index]),
                head=HeadPart(rows, put(targets[index], device), own_terms),
                terms=terms[index],
            )
        )
    return tuple(parts)


def _split(stage: NDArray[np.int64], num_stages: int) -> list[NDArray[np.int64]]:
    """Indexes of each stage's elements, ascending; `stage` int64 [n] is the stage of each."""
    order = np.argsort(stage, kind="stable")
    bounds = np.searchsorted(stage[order], np.arange(1, num_stages))
    return np.split(order, bounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRun:
    """A stage that has been forwarded; with its graph, where there is one."""

    index: int
    # Even where nothing of it is predicted from: stages that descend from it or other ranks' tokens
    # attend its keys, or its routes have a loss.
    has_gradient: bool
    attention: PathAttention
    # Final hidden states of its tokens, of this rank's alone, [t, D].
    hidden_TD: Tensor
    routed: RoutedTokens


class StageHead(Protocol):
    """Sees every stage twice."""

    def add(self, run: StageRun) -> None:
        """The stage has been forwarded."""
        ...

    def close(self, run: StageRun) -> None:
        """All that descend from it are closed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """What every head knows of the batch that is run in stages, and of the ranks that run it."""

    lm_head: LmHead
    packed: PackedBatch
    batch: DeviceBatch
    parts: Sequence[StagePart]
    group: SequenceGroup

    def zeros(self) -> TokenOutputs:
        """Zeros for all targets, rows and terms."""
        like, batch = self.lm_head.weight_VD, self.batch
        dtype = torch.float64 if like.dtype is torch.float64 else torch.float32
        sizes = (len(batch.target_token_M), len(batch.row_index_R))
        logprob_M, entropy_R = (torch.zeros(n, dtype=dtype, device=like.device) for n in sizes)
        candidate_LK = best_LK = None
        if batch.candidate_LK is not None:
            candidate_LK = torch.zeros_like(batch.candidate_LK, dtype=dtype)
        elif batch.num_best:
            best_LK = batch.term_row_L.new_zeros((len(batch.term_row_L), batch.num_best))
            candidate_LK = torch.zeros_like(best_LK, dtype=dtype)
        return TokenOutputs(
            logprob_M=logprob_M,
            entropy_R=entropy_R,
            candidate_LK=candidate_LK,
            best_LK=best_LK,
            value_R=None if batch.value_head is None else torch.zeros_like(entropy_R),
        )


class ForwardHead:
    """Outputs alone; to be used where gradients are off."""

    def __init__(self, whole: Whole) -> None:
        self.results = whole.zeros()
        self._whole = whole

    def add(self, run: StageRun) -> None:
        _store(_run_head(self._whole, run), self._whole.parts[run.index], self.results)

    def close(self, run: StageRun) -> None:
        pass


class RowHead:
    """A loss of single tokens: with the logits of a row its gradient is known."""

    def __init__(self, whole: Whole, loss: LossOfTerms, clock: DeviceClock) -> None:
        self.sums: list[Tensor] = []
        self._whole = whole
        self._terms = RowTerms(whole.packed)
        self._loss = loss
        self._clock = clock
        # The losses of open stages.
        self._rows: dict[int, RowLoss] = {}

    def add(self, run: StageRun) -> None:
        self._clock.lap("forward")
        whole, part = self._whole, self._whole.parts[run.index]
        if part.own.rows.start == part.own.rows.stop:
            return
        hidden_RD = _rows_of(run, whole.batch, part)
        done = run_row_loss(
            whole.lm_head, hidden_RD, whole.batch, part.own, self._terms, self._loss
        )
        self.sums += done.sums
        self._rows[run.index] = done

    def close(self, run: StageRun) -> None:
        found = self._rows.pop(run.index, None)
        if found is not None:
            found.backward()
        elif run.has_gradient:
            _backward_zeros(run)
        self._clock.lap("backward")


class TwoPhaseHead:
    """Any loss: that of a sequence in the stage of its end."""

    def __init__(self, whole: Whole, loss: LossOfTerms, clock: DeviceClock) -> None:
        self.sums: list[Tensor] = []
        self._whole = whole
        self._loss = loss
        self._clock = clock
        self._results = whole.zeros()
        # Their gradients.
        self._seeds = whole.zeros()
        self._has_entropy = self._has_value = False
        # Outputs of open stages, with their graphs.
        self._outputs: dict[int, TokenOutputs] = {}

    def add(self, run: StageRun) -> None:
        part, outputs = self._whole.parts[run.index], _run_head(self._whole, run)
        self._outputs[run.index] = outputs
        self._add_results(outputs, part)
        if len(part.terms):
            self._add_loss(part)
        self._clock.lap("forward")

    def close(self, run: StageRun) -> None:
        part, seeds = self._whole.parts[run.index], self._seeds
        outputs = self._outputs.pop(run.index)
        rows = part.own.rows
        if rows.start < rows.stop:
            heads, grads = [outputs.logprob_M], [seeds.logprob_M[part.head.targets]]
            if outputs.candidate_LK is not None and seeds.candidate_LK is not None:
                heads.append(outputs.candidate_LK)
                grads.append(seeds.candidate_LK[part.head.terms])
            if self._has_entropy:
                heads.append(outputs.entropy_R)
                grads.append(seeds.entropy_R[rows])
            if self._has_value and outputs.value_R is not None and seeds.value_R is not None:
                heads.append(outputs.value_R)
                grads.append(seeds.value_R[rows])
            torch.autograd.backward(heads, grads)
        elif run.has_gradient:
            _backward_zeros(run)
        self._clock.lap("backward")

    def _add_results(self, outputs: TokenOutputs, part: StagePart) -> None:
        """Keep the results of the whole stage."""
        if self._whole.group.size == 1:
            _store(outputs, part, self._results)
            return
        own = self._whole.zeros()
        _store(outputs, part, own)
        found = add_up(own, self._whole.group)
        self._results.logprob_M.add_(found.logprob_M)
        self._results.entropy_R.add_(found.entropy_R)
        if self._results.candidate_LK is not None and found.candidate_LK is not None:
            self._results.candidate_LK.add_(found.candidate_LK)
        if self._results.value_R is not None and found.value_R is not None:
            self._results.value_R.add_(found.value_R)

    def _add_loss(self, part: StagePart) -> None:
        """Add the loss of whole sequences, all of whose log-probs are there."""
        results, seeds = self._results, self._seeds
        batch, index_L = self._whole.batch, put(part.terms, self._results.logprob_M.device)
        target_L, row_L = batch.term_target_L[index_L], batch.term_row_L[index_L]
        candidate_LK = results.candidate_LK
        if candidate_LK is not None:
            candidate_LK = candidate_LK[index_L]
        value_L = None if results.value_R is None else results.value_R[row_L]
        outputs = results.logprob_M[target_L], results.entropy_R[row_L], candidate_LK, value_L
        loss = self._loss.of(part.terms, *outputs)
        seeds.logprob_M.index_add_(0, target_L, loss.grad_logprob_L)
        if loss.grad_entropy_L is not None:
            self._has_entropy = True
            seeds.entropy_R.index_add_(0, row_L, loss.grad_entropy_L)
        if seeds.candidate_LK is not None and loss.grad_candidate_LK is not None:
            seeds.candidate_LK[index_L] = loss.grad_candidate_LK
        if seeds.value_R is not None and loss.grad_value_L is not None:
            self._has_value = True
            seeds.value_R.index_add_(0, row_L, loss.grad_value_L)
        sums_F = self._loss.sums(part.terms, *outputs)
        # All ranks have the same.
        if self._whole.group.index == 0:
            self.sums.append(sums_F)


def add_up(outputs: TokenOutputs, group: SequenceGroup) -> TokenOutputs:
    """Outputs over all ranks, each of which has its own, and zeros elsewhere."""
    candidate_LK, value_R = outputs.candidate_LK, outputs.value_R
    return TokenOutputs(
        logprob_M=group.add_up(outputs.logprob_M),
        entropy_R=group.add_up(outputs.entropy_R),
        candidate_LK=None if candidate_LK is None else group.add_up(candidate_LK),
        value_R=None if value_R is None else group.add_up(value_R),
    )


def _run_head(whole: Whole, run: StageRun) -> TokenOutputs:
    """Outputs of what a stage's rows predict."""
    batch, part = whole.batch, whole.parts[run.index]
    return run_head(whole.lm_head, _rows_of(run, batch, part), batch, part.head)


def _rows_of(run: StageRun, batch: DeviceBatch, part: StagePart) -> Tensor:
    return run.hidden_TD.index_select(0, batch.row_index_R[part.own.rows] - part.tokens.start)


def _store(outputs: TokenOutputs, part: StagePart, results: TokenOutputs) -> None:
    results.logprob_M[part.head.targets] = outputs.logprob_M.detach()
    results.entropy_R[part.own.rows] = outputs.entropy_R.detach()
    if results.candidate_LK is not None and outputs.candidate_LK is not None:
        results.candidate_LK[part.head.terms] = outputs.candidate_LK.detach()
    if results.best_LK is not None and outputs.best_LK is not None:
        results.best_LK[part.head.terms] = outputs.best_LK
    if results.value_R is not None and outputs.value_R is not None:
        results.value_R[part.own.rows] = outputs.value_R.detach()


def _backward_zeros(run: StageRun) -> None:
    """Nothing of the stage is predicted from, but its keys or routes have gradients: they enter
    inside of each layer, which autograd must come by."""
    if run.hidden_TD.requires_grad:
        torch.autograd.backward([run.hidden_TD], [torch.zeros_like(run.hidden_TD)])
