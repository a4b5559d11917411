"""The micro-batches of a plan, packed one after the other while the device runs the one before.

A GPU has at most one micro-batch queued beyond the one known to be done, so that progress and
cancellation keep up with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from ratoon.errors import ErrorCode, RatoonError
from ratoon.planner.waves import fits_forest
from ratoon.rollout.forest import build_forest, pack
from ratoon.rollout.packed import Forest, MicroBatch, PackedBatch, Stage
from ratoon.train.prepare import Prepared, PreparedForward
from ratoon.train.report.clock import Moment


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
