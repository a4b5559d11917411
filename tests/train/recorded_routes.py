"""Batches with recorded routes, for `tiny_models`' qwen3_moe if nothing else is said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ratoon.rollout.batch import RolloutBatch
from tests.equivalence import paths_of

LAYERS, NUM_EXPERTS, TOP_K = 2, 4, 2


def with_routes(batch: RolloutBatch, rows: Sequence[tuple[int, NDArray[np.int64]]]) -> RolloutBatch:
    """`batch` with routes: for each sequence the first token with a row, and its rows."""
    joined = np.concatenate([np.sort(part, axis=2) for _, part in rows])
    return replace(
        batch,
        routed_experts=joined.astype(np.uint8),
        route_first=np.array([first for first, _ in rows], np.int64),
        route_offsets=np.cumsum([0, *(len(part) for _, part in rows)]).astype(np.int64),
    )


def routed(
    batch: RolloutBatch,
    *,
    agree: bool = False,
    layers: int = LAYERS,
    num_experts: int = NUM_EXPERTS,
) -> RolloutBatch:
    """Random experts. Equal prefixes have equal ones, but where a rollout changes its mind.

    The last token has no row, as of samplers; some rollouts have none of their prompt, or at all.
    """
    rows: list[tuple[int, NDArray[np.int64]]] = []
    for s, path in enumerate(paths_of(batch)):
        tokens = path.tokens
        changes_at = len(tokens) if agree or s % 3 else len(tokens) // 2
        part = np.zeros((len(tokens), layers, TOP_K), np.int64)
        for t in range(len(tokens)):
            mind = s if t >= changes_at else 0
            seed = [mind, int(path.temperature * 100), *tokens[: t + 1].tolist()]
            keys = np.random.default_rng(seed).random((layers, num_experts))
            part[t] = keys.argsort(-1)[:, :TOP_K]
        stop = len(tokens) if agree else max(len(tokens) - 1, 0)
        first = min(len(path.prompt), stop) if s % 7 == 5 and not agree else 0
        stop = first if s % 11 == 7 and not agree else stop
        rows.append((first, part[first:stop]))
    return with_routes(batch, rows)
