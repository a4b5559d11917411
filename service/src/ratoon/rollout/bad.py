"""A batch without the rollouts that cannot be trained, of a call that drops them.

What is left is the batch of a call without them, in every column that training reads; beside them
it keeps what was sent, so that indexes in reports and results are those of the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ratoon.rollout.batch import RolloutBatch, group_of_sequence, offsets_of, sent_places
from ratoon.rollout.offenders import MAX_OFFENDERS
from ratoon.rollout.raw import Fault
from ratoon.rollout.serial import ARRAYS
from ratoon_proto.types import BadRollout, BadRolloutReason, Offender

# The order is that of codes in bodies on disk.
_REASONS = tuple(BadRolloutReason)
# Columns of what was sent, where something was dropped.
_SENT = frozenset({"sent_group", "sent_rollout", "bad_rollouts"})


def without(batch: RolloutBatch, faults: Mapping[int, Fault]) -> RolloutBatch:
    """`batch` without the sequences that have a fault, and groups that lose all; it may be empty.

    A batch that has lost some already keeps what was sent then.
    """
    if not faults:
        return batch
    kept_S = np.ones(batch.num_sequences, np.bool_)
    kept_S[[*faults]] = False
    length_S, (sent_group_S, sent_rollout_S) = np.diff(batch.response_offsets), sent_places(batch)
    rows = [
        (sent_group_S[s], sent_rollout_S[s], _REASONS.index(reason), token, length_S[s])
        for s, (reason, token) in faults.items()
    ]
    bad = np.array(rows, np.int64)
    if batch.bad_rollouts is not None:
        bad = np.concatenate([batch.bad_rollouts, bad])
    kept_G = np.bincount(group_of_sequence(batch)[kept_S], minlength=batch.num_groups) > 0
    return replace(
        selected(batch, kept_S),
        sent_ids=batch.group_ids if batch.sent_ids is None else batch.sent_ids,
        sent_group=sent_group_S[batch.group_offsets[:-1]][kept_G],
        sent_rollout=sent_rollout_S[kept_S],
        bad_rollouts=bad[np.lexsort((bad[:, 1], bad[:, 0]))],
    )


def selected(batch: RolloutBatch, kept_S: NDArray[np.bool_]) -> RolloutBatch:
    """The sequences of `batch` in `kept_S`, bool [S], without groups that lose all of theirs.

    It is as if nothing else had been sent.
    """
    length_S, group_S = np.diff(batch.response_offsets), group_of_sequence(batch)
    size_G = np.bincount(group_S[kept_S], minlength=batch.num_groups)
    kept_G = size_G > 0
    kept = {
        "G": kept_G,
        "S": kept_S,
        "J": np.repeat(kept_S, length_S),
        "prompt": np.repeat(kept_G, np.diff(batch.prompt_offsets)),
    }
    if batch.route_offsets is not None:
        kept["N"] = np.repeat(kept_S, np.diff(batch.route_offsets))
    if batch.mask_offsets is not None:
        kept["K"] = np.repeat(kept["J"], np.diff(batch.mask_offsets))
    fields: dict[str, Any] = dict.fromkeys(("sent_ids", *_SENT))
    for name, (_, axis) in ARRAYS.items():
        value: NDArray[Any] | None = getattr(batch, name)
        if value is None or name in _SENT:
            continue
        if axis.endswith("+1"):
            lengths = size_G if name == "group_offsets" else np.diff(value)
            fields[name] = offsets_of(lengths[kept[axis.removesuffix("+1")]])
        else:
            fields[name] = value[kept[axis]]
    if "N" in kept and not kept["N"].any():
        fields |= {"routed_experts": None, "route_first": None, "route_offsets": None}
    if "K" in kept and not kept["K"].any():
        fields |= {"sampling_mask": None, "mask_offsets": None}
    if batch.outside_mask is not None and not fields["outside_mask"].any():
        fields["outside_mask"] = None
    ids = zip(batch.group_ids, kept_G.tolist(), strict=True)
    fields["group_ids"] = tuple(group_id for group_id, is_kept in ids if is_kept)
    return replace(batch, **fields)


def bad_rollouts(batch: RolloutBatch) -> tuple[BadRollout, ...]:
    """What was dropped of the request, in its order."""
    if batch.bad_rollouts is None:
        return ()
    rows: list[list[int]] = batch.bad_rollouts.tolist()
    return tuple(
        BadRollout(
            group=group,
            rollout=rollout,
            reason=_REASONS[reason],
            token=None if token < 0 else token,
        )
        for group, rollout, reason, token, _ in rows
    )


def bad_offenders(batch: RolloutBatch) -> tuple[Offender, ...]:
    """The first of them, as a warning names them."""
    ids = batch.sent_ids or ()
    return tuple(
        Offender(group=bad.group, group_id=ids[bad.group], rollout=bad.rollout, token=bad.token)
        for bad in bad_rollouts(batch)[:MAX_OFFENDERS]
    )


def as_sent(
    batch: RolloutBatch, value_J: NDArray[np.floating]
) -> tuple[NDArray[np.int64], NDArray[np.floating]]:
    """Offsets of all rollouts of the request, and values [J] of the batch's tokens among all of
    theirs; NaN at those that were dropped."""
    if batch.bad_rollouts is None:
        return batch.response_offsets, value_J
    group_S, rollout_S = sent_places(batch)
    group, rollout = np.concatenate([batch.bad_rollouts[:, :2].T, [group_S, rollout_S]], axis=1)
    order = np.lexsort((rollout, group))
    num_bad = len(batch.bad_rollouts)
    lengths = np.concatenate([batch.bad_rollouts[:, 4], np.diff(batch.response_offsets)])[order]
    sent = np.full(int(lengths.sum()), np.nan, value_J.dtype)
    sent[np.repeat(order >= num_bad, lengths)] = value_J
    return offsets_of(lengths), sent
