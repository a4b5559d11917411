"""Index arithmetic over rows of different length without a loop over rows; int64 throughout."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ratoon.rollout.batch import RolloutBatch


def ragged_arange(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """lengths[0] numbers from starts[0] on, then row 1's, and so on; int64 [sum of lengths]."""
    stops = np.cumsum(lengths)
    total = int(stops[-1]) if len(stops) else 0
    flat = np.repeat(starts - stops + lengths, lengths)
    flat += np.arange(total)
    return flat


def offsets_of(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Lengths [n] to offsets [n + 1], starting at 0."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def group_of_sequence(batch: RolloutBatch) -> NDArray[np.int64]:
    """Index of each sequence's group, int64 [S]."""
    return np.repeat(np.arange(batch.num_groups), np.diff(batch.group_offsets))


def prompt_lengths(batch: RolloutBatch) -> NDArray[np.int64]:
    """Tokens of each sequence's prompt, int64 [S]."""
    return np.diff(batch.prompt_offsets)[group_of_sequence(batch)]


def sequence_lengths(batch: RolloutBatch) -> NDArray[np.int64]:
    """Tokens of prompt and response of each sequence, int64 [S]."""
    return prompt_lengths(batch) + np.diff(batch.response_offsets)
