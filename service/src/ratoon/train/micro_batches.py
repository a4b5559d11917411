"""The micro-batches of a plan on the model's device, and one run of the model over one of them.

They are packed one after the other while the device runs the one before. A GPU has at most one
micro-batch queued beyond the one known to be done, so that progress and cancellation keep up with
it. Log-probs and entropies are at the sampling temperature, in float32 (float64 for a float64
model).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.lm_head import LmHead
from ratoon.model.policy_model import PolicyModel
from ratoon.model.router import RoutedTokens
from ratoon.model.value_head import ValueHead
from ratoon.planner.waves import fits_forest
from ratoon.rollout.forest import build_forest, pack
from ratoon.rollout.packed import Forest, KeptTokens, MicroBatch, PackedBatch, Stage
from ratoon.train.clock import Moment
from ratoon.train.prepare import Prepared, PreparedForward
from ratoon.train.spec import PassHooks
from ratoon_kernels import SamplingMask, TreeLayout, best_tokens, build_layout, token_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBatch:
    """T packed tokens, R predicting rows, M targets, L terms; integers int64 but the mask's."""

    tokens_T: Tensor
    position_T: Tensor
    layout: TreeLayout
    # All of them, by the rollouts that each is part of.
    routed: RoutedTokens
    row_index_R: Tensor
    # float32.
    row_temperature_R: Tensor
    target_token_M: Tensor
    target_row_M: Tensor
    term_target_L: Tensor
    # Row that predicts each term's target.
    term_row_L: Tensor
    # What truncation left of each row's vocabulary; None: nothing is truncated.
    mask: SamplingMask | None
    # [L, K]: ids of each term's candidates; None: there are none.
    candidate_LK: Tensor | None = None
    # How many of each row's likeliest tokens are to be found: the candidates then. 0: none.
    num_best: int = 0
    # What gives each row a value; None: values are not asked for.
    value_head: ValueHead | None = None
    # Whether log-probs have a gradient; else values alone do.
    moves_logprobs: bool = True

    @property
    def has_candidates(self) -> bool:
        """Whether terms have candidates, given or to be found."""
        return self.candidate_LK is not None or self.num_best > 0

    def mask_of(self, rows: slice) -> SamplingMask | None:
        """The mask of a range of rows, counted from the first of them."""
        if self.mask is None or rows == slice(None):
            return self.mask
        return self.mask.of_rows(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutputs:
    """Log-prob of each target [M] and entropy of each predicting row [R].

    Log-probs [L, K] of each term's candidates, if there are any, and their ids [L, K], if they
    were to be found; value of each row [R], if the batch has a value head.
    """

    logprob_M: Tensor
    entropy_R: Tensor
    candidate_LK: Tensor | None = None
    best_LK: Tensor | None = None
    value_R: Tensor | None = None


def to_device(
    packed: PackedBatch,
    device: torch.device,
    windows: Collection[int] = (),
    *,
    num_best: int = 0,
    value_head: ValueHead | None = None,
    moves_logprobs: bool = True,
) -> DeviceBatch:
    """Copy the index arrays over and build the layout once for all layers, with their `windows`."""
    forest, candidates = packed.forest, packed.term_candidates
    return DeviceBatch(
        tokens_T=put(forest.tokens.astype(np.int64), device),
        position_T=put(packed.position, device),
        layout=build_layout(
            node_start=forest.node_start,
            node_stop=forest.node_stop,
            node_end=forest.node_end,
            node_parent=forest.node_parent,
            device=device,
            windows=windows,
        ),
        routed=RoutedTokens(
            copies_T=put(packed.copies, device),
            recorded_LTC=None if packed.routes is None else put(packed.routes, device),
        ),
        row_index_R=put(packed.row_index, device),
        row_temperature_R=put(packed.row_temperature, device),
        target_token_M=put(packed.target_token, device),
        target_row_M=put(packed.target_row, device),
        term_target_L=put(packed.term_target, device),
        term_row_L=put(packed.target_row[packed.term_target], device),
        mask=None if packed.kept is None else _mask_on(packed.kept, device),
        candidate_LK=None if candidates is None else put(candidates, device).long(),
        num_best=num_best,
        value_head=value_head,
        moves_logprobs=moves_logprobs,
    )


def _mask_on(kept: KeptTokens, device: torch.device) -> SamplingMask:
    row = np.repeat(np.arange(len(kept.offsets) - 1, dtype=np.int32), np.diff(kept.offsets))
    return SamplingMask(
        token_N=put(kept.tokens, device),
        row_N=put(row, device),
        first_R1=torch.from_numpy(kept.offsets),
    )


def put(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """A host array as a tensor on `device`, same dtype; nothing waits for a GPU."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return tensor.to(device)
    # Only from pinned memory is a copy asynchronous; torch holds it until the copy is done. This
    # thread alone fills it: torch's own would each wait for a core, while a version is written.
    pinned = torch.empty_like(tensor, pin_memory=True)
    np.copyto(pinned.numpy(), tensor.numpy())
    return pinned.to(device, non_blocking=True)


def put_index(values: NDArray[np.int64], device: torch.device) -> slice | Tensor:
    """What picks these of a tensor's rows: a slice where each follows the one before."""
    if len(values) and (np.diff(values) == 1).all():
        return slice(int(values[0]), int(values[-1]) + 1)
    return put(values, device)


def run_model(model: PolicyModel, batch: DeviceBatch) -> TokenOutputs:
    """One forward; gradients flow where they are enabled."""
    hidden_TD = model.forward_hidden(batch.tokens_T, batch.position_T, batch.layout, batch.routed)
    hidden_RD = hidden_TD.index_select(0, batch.row_index_R)
    every = slice(None)
    return run_head(model.lm_head, hidden_RD, batch, HeadPart(every, every, every))


@dataclass(frozen=True, slots=True)
class HeadPart:
    """Rows of a batch that the LM head is run on at once.

    Attributes:
        rows: The rows, one after the other.
        targets: The targets that they predict, int64 [m] ascending, or the range of them.
        terms: The terms of these targets, likewise [n]; unused where terms have no candidates.
    """

    rows: slice
    targets: slice | Tensor
    terms: slice | Tensor

    def tokens(self, batch: DeviceBatch) -> tuple[Tensor, Tensor]:
        """Ids that the rows have log-probs of, and the row of the part that predicts each, int64:
        the m targets, then the K candidates of each term."""
        token_M, row_M = batch.target_token_M[self.targets], batch.target_row_M[self.targets]
        if batch.candidate_LK is not None:
            candidate_NK = batch.candidate_LK[self.terms]
            row_NK = batch.term_row_L[self.terms, None].expand_as(candidate_NK)
            token_M = torch.cat([token_M, candidate_NK.flatten()])
            row_M = torch.cat([row_M, row_NK.flatten()])
        return token_M, row_M - self.rows.start if self.rows.start else row_M

    def split(self, logprob_M: Tensor, batch: DeviceBatch) -> tuple[Tensor, Tensor | None]:
        """Log-probs of what `tokens` returns: those [m] of targets and [n, K] of candidates."""
        if batch.candidate_LK is None:
            return logprob_M, None
        num_targets = len(batch.target_token_M[self.targets])
        shape = (-1, batch.candidate_LK.shape[1])
        return logprob_M[:num_targets], logprob_M[num_targets:].view(shape)


def run_head(head: LmHead, hidden_RD: Tensor, batch: DeviceBatch, part: HeadPart) -> TokenOutputs:
    """Outputs of a part's rows, targets and terms; gradients flow where they are enabled.

    Where the likeliest tokens of each row are to be found, they are the candidates.
    """
    if batch.num_best:
        return _run_best(head, hidden_RD, batch, part)
    token_M, row_M = part.tokens(batch)
    logprob_M, entropy_R = token_logprobs(
        hidden_RD,
        head.weight_VD,
        token_M,
        row_M,
        batch.row_temperature_R[part.rows],
        mask=batch.mask_of(part.rows),
        term=head.term(hidden_RD),
    )
    logprob_M, candidate_LK = part.split(logprob_M, batch)
    return TokenOutputs(
        logprob_M=logprob_M,
        entropy_R=entropy_R,
        candidate_LK=candidate_LK,
        value_R=None if batch.value_head is None else batch.value_head(hidden_RD),
    )


def _run_best(head: LmHead, hidden_RD: Tensor, batch: DeviceBatch, part: HeadPart) -> TokenOutputs:
    term = head.term(hidden_RD)
    best_RB = best_tokens(hidden_RD, head.weight_VD, batch.num_best, term=term)
    row_N = batch.term_row_L[part.terms] - (part.rows.start or 0)
    token_LB = batch.term_row_L.new_zeros((len(batch.term_row_L), batch.num_best))
    token_LB[part.terms] = best_RB[row_N]
    found = run_head(head, hidden_RD, replace(batch, num_best=0, candidate_LK=token_LB), part)
    assert found.candidate_LK is not None
    # Likely tokens may tie.
    logprob_NB, order_NB = found.candidate_LK.sort(dim=1, descending=True, stable=True)
    best_NB = token_LB[part.terms].gather(1, order_NB)
    return replace(found, candidate_LK=logprob_NB, best_LK=best_NB)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMicroBatch:
    """One micro-batch; `check` raises where the pass has been cancelled since it began."""

    packed: PackedBatch
    stages: tuple[Stage, ...]
    check: Callable[[], None]


def packed_micro_batches(
    device: torch.device,
    run: Prepared | PreparedForward,
    term_mask_J: NDArray[np.bool_],
    hooks: PassHooks,
) -> Iterator[PackedMicroBatch]:
    """Pack one micro-batch after the other, asking in between whether to go on.

    Once the caller has asked the device for one, this waits for the one before it.
    """
    planned, tokens = len(run.plan.micro_batches), 0
    num_ahead = 1 if device.type == "cuda" else 0
    under_way: deque[tuple[Moment, int, int]] = deque()
    hooks.on_progress(0, planned, 0)
    for done, micro_batch in enumerate(run.plan.micro_batches):
        _check_cancelled(hooks, done, planned)
        sequences = np.array(micro_batch.sequences, np.int64)
        forest = build_forest(run.batch, run.prefixes, sequences)
        if not _is_of(micro_batch, forest):
            raise RatoonError(
                ErrorCode.INTERNAL, f"micro-batch {done} of the plan is of another batch"
            )
        yield PackedMicroBatch(
            packed=pack(run.batch, forest, term_mask_J, run.candidates_JK),
            stages=micro_batch.stages,
            check=partial(_check_cancelled, hooks, done, planned),
        )
        tokens += int(forest.sequence_length.sum())
        under_way.append((Moment(device), done + 1, tokens))
        if len(under_way) > num_ahead:
            _follow(under_way.popleft(), planned, hooks)
    while under_way:
        _follow(under_way.popleft(), planned, hooks)
    _check_cancelled(hooks, planned, planned)


def _is_of(micro_batch: MicroBatch, forest: Forest) -> bool:
    """Whether a journaled plan cuts what is packed now."""
    if micro_batch.packed_tokens != forest.num_tokens:
        return False
    return not micro_batch.stages or fits_forest(micro_batch.stages, forest)


def _follow(micro_batch: tuple[Moment, int, int], planned: int, hooks: PassHooks) -> None:
    """Wait until the device is through with a micro-batch, and say so."""
    moment, done, tokens = micro_batch
    moment.wait()
    hooks.on_progress(done, planned, tokens)


def _check_cancelled(hooks: PassHooks, done: int, planned: int) -> None:
    if hooks.is_cancelled():
        raise RatoonError(
            ErrorCode.CANCELLED,
            f"cancelled after {done} of {planned} micro-batches",
            details={"micro_batches_done": str(done), "micro_batches_planned": str(planned)},
        )
