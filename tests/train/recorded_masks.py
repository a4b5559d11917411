"""Batches with sampling masks, for models of `VOCAB_SIZE` tokens if nothing else is said."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.packed import PackedBatch
from tests.equivalence import near_policy, paths_of
from tests.train.equivalence_runs import VOCAB_SIZE, Pair, random_batch_near


def with_kept(batch: RolloutBatch, kept: list[NDArray[np.integer]]) -> RolloutBatch:
    """`batch` with these ids of each response token."""
    return replace(
        batch,
        sampling_mask=np.concatenate([np.sort(ids) for ids in kept]).astype(np.int32),
        mask_offsets=np.cumsum([0, *(len(ids) for ids in kept)]).astype(np.int64),
    )


def masked(batch: RolloutBatch, *, vocab_size: int = VOCAB_SIZE) -> RolloutBatch:
    """Random masks of trained tokens, each with its own.

    After equal tokens they are equal, but in a part of a rollout that has a mind of its own. Some
    are of one token, some rollouts have none, and the first of a batch keeps all.
    """
    kept: list[NDArray[np.integer]] = []
    for s, path in enumerate(paths_of(batch)):
        mind_from = len(path.response) if s % 3 else len(path.response) // 2
        for t, token in enumerate(path.response.tolist()):
            mind = s if t >= mind_from else 0
            prefix = path.tokens[: len(path.prompt) + t].tolist()
            rng = np.random.default_rng([mind, int(path.temperature * 100), *prefix])
            share = 0.0 if rng.random() < 0.2 else rng.choice([0.1, 0.5])
            is_kept = rng.random(vocab_size) < (1.0 if s == 0 else share)
            is_kept[token] = True
            is_kept &= bool(path.mask[t]) and s % 5 != 4
            kept.append(np.flatnonzero(is_kept))
    return with_kept(batch, kept)


def masked_batch_near(pair: Pair, seed: int) -> RolloutBatch:
    """`random_batch_near` with masks; its log-probs are near to the policy's over what is kept."""
    batch = masked(random_batch_near(pair, seed))
    return near_policy(batch, pair.oracle.model, np.random.default_rng(seed))


def split_tokens(packed: PackedBatch) -> int:
    """How many packed tokens are predicted by several rows, as their masks differ."""
    packed_of_target = packed.row_index[packed.target_row], packed.target_token
    pairs = list(zip(*(column.tolist() for column in packed_of_target), strict=True))
    return len(pairs) - len(set(pairs))
