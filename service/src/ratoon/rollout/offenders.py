"""The rollouts and tokens that a warning names, by group and index as their caller sent them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ratoon.rollout.batch import RolloutBatch, sent_places
from ratoon_proto.types import Offender

# Rollouts or tokens that one warning names at most.
MAX_OFFENDERS = 8


def offenders(
    batch: RolloutBatch,
    sequences: NDArray[np.integer],
    *,
    value_S: NDArray[np.number] | None = None,
    token_S: NDArray[np.integer] | None = None,
) -> tuple[Offender, ...]:
    """The first `MAX_OFFENDERS` of these sequences, in their order.

    Args:
        batch: S sequences.
        sequences: Their indexes, worst first.
        value_S: What each is named for, [S]; None, or no number: nothing.
        token_S: Index among its response tokens, [S]; None, or negative: the whole rollout.
    """
    named: list[Offender] = []
    worst: list[int] = sequences[:MAX_OFFENDERS].tolist()
    if not worst:
        return ()
    group_S, rollout_S = sent_places(batch)
    for sequence in worst:
        group = int(np.searchsorted(batch.group_offsets, sequence, side="right")) - 1
        value = None if value_S is None else float(value_S[sequence])
        token = -1 if token_S is None else int(token_S[sequence])
        named.append(
            Offender(
                group=int(group_S[sequence]),
                group_id=batch.group_ids[group],
                rollout=int(rollout_S[sequence]),
                token=None if token < 0 else token,
                value=None if value is None or np.isnan(value) else value,
            )
        )
    return tuple(named)


def worst_first(value_S: NDArray[np.number], among_S: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Indexes of the sequences in `among_S` by falling value, equal ones in request order."""
    sequences = np.flatnonzero(among_S)
    return sequences[np.argsort(-value_S[sequences].astype(np.float64), kind="stable")]
