"""One pass over a plan's micro-batches: forward-backward into the gradient sums, or forward alone.

The host does not wait for any result before the end of a pass.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratoon.model.policy_model import PolicyModel
from ratoon.model.router import RouteSums
from ratoon.rollout.packed import PackedBatch
from ratoon.shards.sequence_group import ALONE, SequenceGroup
from ratoon.train.clock import DeviceClock
from ratoon.train.load_balance import load_balance
from ratoon.train.loss.batch_loss import (
    BatchLoss,
    LossOfTerms,
    RowLoss,
    RowTerms,
    run_row_loss,
    whole_batch,
)
from ratoon.train.loss.compute import is_of_single_tokens
from ratoon.train.loss.sums import LossSums
from ratoon.train.micro_batches import (
    DeviceBatch,
    PackedMicroBatch,
    TokenOutputs,
    packed_micro_batches,
    put,
    run_model,
    to_device,
)
from ratoon.train.prepare import Prepared, PreparedForward
from ratoon.train.rollout_figures import TokenFigures, TokenParts
from ratoon.train.spec import PassHooks
from ratoon.train.stage_heads import add_up
from ratoon.train.staged_batch import StagedBatch
from ratoon_kernels import Span
from ratoon_kernels.precision import accumulation_dtype
from ratoon_proto.types import ReferenceKind, StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTotals:
    """What a pass did. `rows`: predicting rows over all micro-batches; times in seconds.

    The LM head of a loss of single tokens is in the backward, as its gradient is.
    """

    sums: LossSums
    tokens: TokenFigures
    routes: RouteSums
    rows: int
    forward_s: float
    backward_s: float
    # Seconds of each of several ranks.
    rank_seconds: tuple[float, ...] = ()

    @classmethod
    def over(cls, ranks: Sequence[PassTotals]) -> PassTotals:
        """Totals over all ranks, which ran at the same time: the times are those of the longest."""
        if len(ranks) == 1:
            return ranks[0]
        longest = max(ranks, key=lambda done: done.forward_s + done.backward_s)
        return cls(
            sums=reduce(operator.add, (done.sums for done in ranks)),
            tokens=TokenFigures.over([done.tokens for done in ranks]),
            routes=reduce(operator.add, (done.routes for done in ranks)),
            rows=sum(done.rows for done in ranks),
            forward_s=longest.forward_s,
            backward_s=longest.backward_s,
            rank_seconds=tuple(done.forward_s + done.backward_s for done in ranks),
        )


def forward_backward_pass(
    model: PolicyModel,
    prepared: Prepared,
    hooks: PassHooks,
    group: SequenceGroup = ALONE,
) -> PassTotals:
    """Add the gradient of the loss sum of every micro-batch to the parameters' gradients.

    Of several ranks in `group` each adds what its own tokens make of it, and none what others do.
    Raises `RatoonError` CANCELLED between micro-batches, with part of the gradients added, and
    INTERNAL where the plan is of another batch.
    """
    sums: list[Tensor] = []
    found = TokenParts()
    rows, clock = 0, DeviceClock(model.device)
    model.routes.clear()
    with model.carrying(prepared.load):
        for item in packed_micro_batches(model.device, prepared, prepared.term_mask_J, hooks):
            sums += _train(model, prepared, item, clock, group, found)
            rows += _counted_rows(item, group)
    seconds = clock.seconds()
    balance, total = model.routes.balance_loss(), LossSums.total(sums)
    loss = total.loss + prepared.loss.router_aux_loss_coefficient * balance
    return PassTotals(
        sums=replace(total, loss=loss, balance=balance),
        tokens=found.on_host(),
        routes=model.routes.take(),
        rows=rows,
        forward_s=seconds["forward"],
        backward_s=seconds["backward"],
    )


def _train(
    model: PolicyModel,
    prepared: Prepared,
    item: PackedMicroBatch,
    clock: DeviceClock,
    group: SequenceGroup,
    found: TokenParts,
) -> list[Tensor]:
    """Add the gradient of the loss sum of one micro-batch; the sums of each of its losses."""
    packed, device = item.packed, model.device
    batch = to_device(
        packed,
        device,
        model.windows,
        value_head=None if prepared.loss.value is None else model.value_head,
        moves_logprobs=prepared.loss.moves_logprobs,
    )
    balance = load_balance(model, prepared, packed, group)
    reference_L = _reference(model, prepared, item, batch, group)

    like = torch.empty(0, dtype=accumulation_dtype(model.lm_head_VD.dtype), device=device)
    loss = BatchLoss(prepared, packed, reference_L, found, like)
    is_of_rows = is_of_single_tokens(prepared.loss)
    if item.stages or group.size > 1:
        staged = StagedBatch(model, packed, batch, item.stages, item.check, group, balance)
        return staged.forward_backward(loss, clock, is_of_rows=is_of_rows)
    if balance is not None:
        whole = Span(0, packed.forest.num_tokens)
        balanced = balance.tokens(whole, whole)
        batch = replace(batch, routed=replace(batch.routed, balance=balanced))
    with model.routes.balancing(batch.routed):
        if is_of_rows:
            return train_rows(model, packed, batch, loss, clock).sums
        return [_train_in_two_phases(model, packed, batch, loss, clock)]


def train_rows(
    model: PolicyModel,
    packed: PackedBatch,
    batch: DeviceBatch,
    loss: LossOfTerms,
    clock: DeviceClock,
) -> RowLoss:
    """Add the gradient of a loss of single tokens to the parameters' gradients."""
    hidden_TD = model.forward_hidden(batch.tokens_T, batch.position_T, batch.layout, batch.routed)
    clock.lap("forward")
    hidden_RD = hidden_TD.index_select(0, batch.row_index_R)
    part, terms = whole_batch(packed), RowTerms(packed)
    done = run_row_loss(model.lm_head, hidden_RD, batch, part, terms, loss)
    done.backward()
    clock.lap("backward")
    return done


def _train_in_two_phases(
    model: PolicyModel,
    packed: PackedBatch,
    batch: DeviceBatch,
    loss: LossOfTerms,
    clock: DeviceClock,
) -> Tensor:
    """Add the gradient of any loss, from all log-probs at once; returns the sums of the loss."""
    outputs = run_model(model, batch)
    logprob_L = outputs.logprob_M.detach()[batch.term_target_L]
    entropy_L = outputs.entropy_R.detach()[batch.term_row_L]
    every = np.arange(len(packed.term_target))
    candidate_LK = None if outputs.candidate_LK is None else outputs.candidate_LK.detach()
    value_L = None if outputs.value_R is None else outputs.value_R.detach()[batch.term_row_L]
    output = loss.of(every, logprob_L, entropy_L, candidate_LK, value_L)
    clock.lap("forward")
    seeds = [_scatter(output.grad_logprob_L, batch.term_target_L, outputs.logprob_M)]
    heads = [outputs.logprob_M]
    if output.grad_entropy_L is not None:
        seeds.append(_scatter(output.grad_entropy_L, batch.term_row_L, outputs.entropy_R))
        heads.append(outputs.entropy_R)
    if outputs.candidate_LK is not None and output.grad_candidate_LK is not None:
        seeds.append(output.grad_candidate_LK)
        heads.append(outputs.candidate_LK)
    if outputs.value_R is not None and output.grad_value_L is not None:
        seeds.append(_scatter(output.grad_value_L, batch.term_row_L, outputs.value_R))
        heads.append(outputs.value_R)
    torch.autograd.backward(heads, seeds)
    clock.lap("backward")
    return loss.sums(every, logprob_L, entropy_L, candidate_LK, value_L)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardColumns:
    """float32 (float64 for a float64 model) [J] each, 0 where the loss mask is false.

    With log-probs of candidates [J, K] where they were asked for; ids of these, int32 [J, K],
    where they were to be found; values [J] of a model with a value head.
    """

    logprob_J: NDArray[np.floating]
    entropy_J: NDArray[np.floating]
    candidate_JK: NDArray[np.floating] | None
    best_JK: NDArray[np.int32] | None
    value_J: NDArray[np.floating] | None
    rows: int
    forward_s: float
    rank_seconds: tuple[float, ...] = ()

    @classmethod
    def over(cls, ranks: Sequence[ForwardColumns]) -> ForwardColumns:
        """Columns over all ranks, one of which ran the row of a token; the time of the longest."""
        if len(ranks) == 1:
            return ranks[0]
        return cls(
            logprob_J=reduce(operator.add, (done.logprob_J for done in ranks)),
            entropy_J=reduce(operator.add, (done.entropy_J for done in ranks)),
            candidate_JK=_sum_of([done.candidate_JK for done in ranks]),
            best_JK=_sum_of([done.best_JK for done in ranks]),
            value_J=_sum_of([done.value_J for done in ranks]),
            rows=sum(done.rows for done in ranks),
            forward_s=max(done.forward_s for done in ranks),
            rank_seconds=tuple(done.forward_s for done in ranks),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardArrays:
    """What a Forward answers per response token of the batch, [J], 0 where the mask is false.

    float32; float64 for a float64 model. None: not asked for.
    """

    logprobs: NDArray[np.floating]
    entropy: NDArray[np.floating] | None
    report: StepReport
    # [J, K]: the likeliest tokens, int32, the first one first, or the teacher's tokens of the
    # rollouts; and their log-probs.
    teacher: tuple[NDArray[np.int32], NDArray[np.floating]] | None = None
    # None: there is no value head, or the reference has answered.
    values: NDArray[np.floating] | None = None

    @classmethod
    def of(
        cls,
        prepared: PreparedForward,
        columns: ForwardColumns,
        report: StepReport,
        *,
        with_entropy: bool,
    ) -> ForwardArrays:
        """What was asked for of the columns over all ranks."""
        tokens_JK = columns.best_JK if prepared.num_best else prepared.candidates_JK
        teacher = None
        if tokens_JK is not None and columns.candidate_JK is not None:
            teacher = tokens_JK, columns.candidate_JK
        return cls(
            logprobs=columns.logprob_J,
            entropy=columns.entropy_J if with_entropy else None,
            report=report,
            teacher=teacher,
            values=columns.value_J,
        )


def _sum_of(arrays: Sequence[NDArray[Any] | None]) -> NDArray[Any] | None:
    """The sum over ranks of what all or none of them have."""
    found = [array for array in arrays if array is not None]
    return reduce(operator.add, found) if found else None


def forward_pass(
    model: PolicyModel,
    prepared: PreparedForward,
    hooks: PassHooks,
    group: SequenceGroup = ALONE,
) -> ForwardColumns:
    """Log-prob, entropy and value of every trained token, and what `prepared` asks of candidates,
    without gradients; 0 where other ranks of `group` ran its row. Raises CANCELLED."""
    tokens: list[NDArray[np.int64]] = []
    results: list[Tensor] = []
    candidates: list[Tensor] = []
    best: list[Tensor] = []
    rows, clock = 0, DeviceClock(model.device)
    mask_J = prepared.batch.loss_mask
    # Not inference mode, for whose tensors layers would be compiled again: a reference within an
    # update has others.
    with torch.no_grad():
        for item in packed_micro_batches(model.device, prepared, mask_J, hooks):
            device_batch = to_device(
                item.packed,
                model.device,
                model.windows,
                num_best=prepared.num_best,
                value_head=model.value_head,
            )
            outputs = _outputs(model, item, device_batch, group)
            logprob_L = outputs.logprob_M[device_batch.term_target_L]
            entropy_L = outputs.entropy_R[device_batch.term_row_L]
            columns = [logprob_L, entropy_L]
            if outputs.value_R is not None:
                columns.append(outputs.value_R[device_batch.term_row_L])
            results.append(torch.stack(columns))
            if outputs.candidate_LK is not None:
                candidates.append(outputs.candidate_LK)
            if outputs.best_LK is not None:
                best.append(outputs.best_LK.int())
            tokens.append(item.packed.term_token)
            rows += _counted_rows(item, group)
    clock.lap("forward")
    dtype = np.float64 if model.lm_head_VD.dtype is torch.float64 else np.float32
    place = np.concatenate(tokens) if tokens else np.empty(0, np.int64)
    has_values = model.value_head is not None
    columns_CJ = np.zeros((2 + has_values, len(mask_J)), dtype)
    if results:
        columns_CJ[:, place] = torch.cat(results, dim=1).cpu().numpy()
    num_candidates = prepared.num_candidates
    has_candidates, has_best = num_candidates > 0, prepared.num_best > 0
    shape = (len(mask_J), num_candidates)
    return ForwardColumns(
        logprob_J=columns_CJ[0],
        entropy_J=columns_CJ[1],
        candidate_JK=_at_tokens(place, candidates, shape, dtype) if has_candidates else None,
        best_JK=_at_tokens(place, best, shape, np.int32) if has_best else None,
        value_J=columns_CJ[2] if has_values else None,
        rows=rows,
        forward_s=clock.seconds()["forward"],
    )


def _at_tokens(
    place: NDArray[np.int64], results: list[Tensor], shape: tuple[int, int], dtype: type
) -> NDArray[Any]:
    """Results of terms [L, K] at their response tokens, [J, K] on the host, 0 elsewhere."""
    columns_JK = np.zeros(shape, dtype)
    if results:
        columns_JK[place] = torch.cat(results).cpu().numpy()
    return columns_JK


def _counted_rows(item: PackedMicroBatch, group: SequenceGroup) -> int:
    """Rows of all ranks that run the micro-batch, counted on the first of them."""
    return len(item.packed.row_index) if group.index == 0 else 0


def _outputs(
    model: PolicyModel, item: PackedMicroBatch, batch: DeviceBatch, group: SequenceGroup
) -> TokenOutputs:
    """Log-probs and entropies of a micro-batch, those of this rank's rows; to be called where
    gradients are off."""
    if item.stages or group.size > 1:
        return StagedBatch(model, item.packed, batch, item.stages, item.check, group).forward()
    return run_model(model, batch)


def _reference(
    model: PolicyModel,
    prepared: Prepared,
    item: PackedMicroBatch,
    batch: DeviceBatch,
    group: SequenceGroup,
) -> Tensor | None:
    """Reference log-prob of each term, [L]; None: the loss has no KL term."""
    kl = prepared.loss.kl
    if kl is None:
        return None
    if kl.reference is ReferenceKind.GIVEN:
        assert prepared.batch.reference_logprobs is not None
        return put(prepared.batch.reference_logprobs[item.packed.term_token], model.device)
    # Candidates and values are asked of the policy alone.
    batch = replace(batch, candidate_LK=None, value_head=None)
    with torch.no_grad(), model.reference():
        outputs = add_up(_outputs(model, item, batch, group), group)
        return outputs.logprob_M[batch.term_target_L]


def _scatter(grad_L: Tensor, index_L: Tensor, like: Tensor) -> Tensor:
    """Sum the terms' gradients at what they share, in the shape of `like`."""
    return torch.zeros_like(like).index_add_(0, index_L, grad_L)
