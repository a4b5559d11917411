"""The micro-batches of a plan on the model's device, and one run of the model over one of them.

They are packed one after the other while the device runs the one before. A GPU has at most one
micro-batch queued beyond the one known to be done, so that progress and cancellation keep up with
it. Log-probs and entropies are at the sampling temperature, in float32 (float64 for a float64
model).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.policy_model import PolicyModel
from ratoon.model.router import RoutedTokens
from ratoon.planner.waves import fits_forest
from ratoon.rollout.forest import build_forest, pack
from ratoon.rollout.packed import Forest, KeptTokens, MicroBatch, PackedBatch, Stage
from ratoon.train.clock import Moment
from ratoon.train.prepare import Prepared, PreparedForward
from ratoon_kernels import SamplingMask, TreeLayout, build_layout, token_logprobs


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

    def mask_of(self, rows: slice) -> SamplingMask | None:
        """The mask of a range of rows, counted from the first of them."""
        return None if self.mask is None else self.mask.of_rows(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutputs:
    """Log-prob of each target [M] and entropy of each predicting row [R]."""

    logprob_M: Tensor
    entropy_R: Tensor


def to_device(
    packed: PackedBatch, device: torch.device, windows: Collection[int] = ()
) -> DeviceBatch:
    """Copy the index arrays over and build the layout once for all layers, with their `windows`."""
    forest = packed.forest
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
    logprob_M, entropy_R = token_logprobs(
        hidden_TD.index_select(0, batch.row_index_R),
        model.lm_head_VD,
        batch.target_token_M,
        batch.target_row_M,
        batch.row_temperature_R,
        mask=batch.mask,
    )
    return TokenOutputs(logprob_M=logprob_M, entropy_R=entropy_R)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassHooks:
    """Called between micro-batches: `on_progress(done, planned, replicated tokens done)`."""

    on_progress: Callable[[int, int, int], None]
    is_cancelled: Callable[[], bool]


def no_progress(done: int, planned: int, tokens: int) -> None:
    """Progress that nobody follows."""


def never_cancelled() -> bool:
    return False


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
            packed=pack(run.batch, forest, term_mask_J),
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
