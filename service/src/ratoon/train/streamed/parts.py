"""Which outputs of a packed batch each of its stages makes, and whose loss is known then.

Rows and targets belong to the stage that holds the row, terms to the one where their sequence ends.
Where several ranks run a stage together, each has the rows of its own tokens, and all have the
terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratoon.rollout.packed import PackedBatch, Stage
from ratoon.shards.sequence_group import SequenceGroup
from ratoon.train.device_batch import put
from ratoon.train.loss.row_loss import RowPart
from ratoon_kernels import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """What one stage adds to the outputs of the batch, as far as this rank runs it."""

    # Its packed tokens.
    tokens: Span
    # Its predicting rows and their targets.
    own: RowPart
    # Those targets on the device.
    targets_M: Tensor
    # int64 [n] on the host: terms of the sequences that end in the stage, ascending.
    terms: NDArray[np.int64]


def cut_outputs(
    packed: PackedBatch, stages: Sequence[Stage], group: SequenceGroup, device: torch.device
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
    return tuple(
        StagePart(
            tokens=shares[index],
            own=RowPart(
                rows=slice(int(row_bounds[2 * index]), int(row_bounds[2 * index + 1])),
                targets=targets[index],
            ),
            targets_M=put(targets[index], device),
            terms=terms[index],
        )
        for index in range(len(stages))
    )


def _split(stage: NDArray[np.int64], num_stages: int) -> list[NDArray[np.int64]]:
    """Indexes of each stage's elements, ascending; `stage` int64 [n] is the stage of each."""
    order = np.argsort(stage, kind="stable")
    bounds = np.searchsorted(stage[order], np.arange(1, num_stages))
    return np.split(order, bounds)
