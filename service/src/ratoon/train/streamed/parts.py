"""Which outputs of a packed batch each of its stages makes, and whose loss is known then.

Rows and targets belong to the stage that holds the row, terms to the one where their sequence ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratoon.rollout.packed import PackedBatch, Stage
from ratoon.train.device_batch import put
from ratoon.train.loss.row_loss import RowPart


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """What one stage adds to the outputs of the batch."""

    # Its predicting rows and their targets.
    own: RowPart
    # Those targets on the device.
    targets_M: Tensor
    # int64 [n] on the host: terms of the sequences that end in the stage, ascending.
    terms: NDArray[np.int64]


def cut_outputs(
    packed: PackedBatch, stages: Sequence[Stage], device: torch.device
) -> tuple[StagePart, ...]:
    """The part of each stage."""
    bounds = np.array([*(stage.start for stage in stages), packed.forest.num_tokens], np.int64)
    row_bounds = np.searchsorted(packed.row_index, bounds)
    row_stage = np.repeat(np.arange(len(stages)), np.diff(row_bounds))
    ends = packed.forest.node_stop[packed.forest.sequence_node[packed.term_sequence]] - 1
    term_stage = np.searchsorted(bounds, ends, side="right") - 1
    targets = _split(row_stage[packed.target_row], len(stages))
    terms = _split(term_stage, len(stages))
    return tuple(
        StagePart(
            own=RowPart(
                rows=slice(int(row_bounds[index]), int(row_bounds[index + 1])),
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
