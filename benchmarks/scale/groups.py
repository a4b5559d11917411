"""Draws the groups of an Update, cuts them and deals them to ranks; only lengths, no tokens."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.scale.constants import Values


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Groups of a prompt and lognormal responses: per group, tokens, predicting rows and pairs."""

    tokens_G: NDArray[np.float64]
    rows_G: NDArray[np.float64]
    pairs_G: NDArray[np.float64]

    @property
    def num_groups(self) -> int:
        return len(self.tokens_G)


def draw(num_groups: int, c: Values, seed: int) -> Batch:
    """Groups whose responses have the constants' mean length before the longest are cut."""
    rng = np.random.default_rng(seed)
    prompt, count = int(c["prompt"]), int(c["responses"])
    between, within = c["group_spread"], c["spread"]
    log_mean = math.log(c["response"]) - (between**2 + within**2) / 2
    spread_GN = between * rng.normal(size=(num_groups, 1))
    spread_GN = spread_GN + within * rng.normal(size=(num_groups, count))
    lengths_GN = np.clip(np.rint(np.exp(log_mean + spread_GN)), 1, c["longest"])
    rows_G = lengths_GN.sum(1)
    pairs_GN = prompt * lengths_GN + lengths_GN * (lengths_GN + 1) / 2
    return Batch(
        tokens_G=prompt + rows_G,
        rows_G=rows_G,
        pairs_G=prompt * (prompt + 1) / 2 + pairs_GN.sum(1),
    )


def num_calls(batch: Batch, c: Values) -> int:
    """ForwardBackward calls that take the batch within a server's limits."""
    tokens, rollouts = float(batch.tokens_G.sum()), batch.num_groups * c["responses"]
    return math.ceil(max(tokens / c["max_tokens"], rollouts / c["max_sequences"]))


def split(batch: Batch, most_rows: float, c: Values) -> Batch:
    """Groups of more predicting rows cut evenly into parts, at most one per response."""
    parts_G = np.clip(np.ceil(batch.rows_G / most_rows), 1, c["responses"]).astype(np.int64)
    prompt = int(c["prompt"])
    own_pairs_G = batch.pairs_G - prompt * (prompt + 1) / 2
    rows_P = np.repeat(batch.rows_G / parts_G, parts_G)
    return Batch(
        tokens_G=prompt + rows_P,
        rows_G=rows_P,
        pairs_G=prompt * (prompt + 1) / 2 + np.repeat(own_pairs_G / parts_G, parts_G),
    )


def deal(seconds_G: NDArray[np.float64], num_ranks: int) -> list[list[float]]:
    """Seconds of each rank's groups: longest first, each to the rank with the least to do."""
    ranks: list[list[float]] = [[] for _ in range(num_ranks)]
    loads = [(0.0, rank) for rank in range(num_ranks)]
    for seconds in np.sort(seconds_G)[::-1].tolist():
        load, rank = loads[0]
        ranks[rank].append(seconds)
        heapq.heapreplace(loads, (load + seconds, rank))
    return ranks


def turns(ranks: list[list[float]]) -> NDArray[np.float64]:
    """Seconds of the longest first micro-batch of any rank, of the longest second one, ..."""
    most = max(len(rank) for rank in ranks)
    return np.array([max(rank[k] for rank in ranks if k < len(rank)) for k in range(most)])
