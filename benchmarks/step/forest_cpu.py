"""Seconds of sort, forest and pack for one update of a million packed tokens.

Enters a number of repeats, leave medians as plain values. Invariant: the batch is made before the
clock starts, and what was timed is checked to be what was asked for.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.forest import build_forest
from ratoon.rollout.pack import pack
from ratoon.rollout.prefixes import sort_sequences

NUM_GROUPS = 64
NUM_ROLLOUTS = 32
PROMPT_TOKENS = 2048
RESPONSE_TOKENS = 448
VOCAB_SIZE = 151_936


def million_token_batch(seed: int) -> RolloutBatch:
    """64 groups of 32 rollouts, P = 2048, R = 448: 1.05M packed tokens, 5.1M replicated."""
    rng = np.random.default_rng(seed)
    num_sequences = NUM_GROUPS * NUM_ROLLOUTS
    num_tokens = num_sequences * RESPONSE_TOKENS
    return RolloutBatch(
        group_ids=tuple(f"group-{g}" for g in range(NUM_GROUPS)),
        group_offsets=np.arange(NUM_GROUPS + 1) * NUM_ROLLOUTS,
        prompt_tokens=rng.integers(0, VOCAB_SIZE, NUM_GROUPS * PROMPT_TOKENS, np.int32),
        prompt_offsets=np.arange(NUM_GROUPS + 1) * PROMPT_TOKENS,
        response_tokens=rng.integers(0, VOCAB_SIZE, num_tokens, np.int32),
        response_offsets=np.arange(num_sequences + 1) * RESPONSE_TOKENS,
        loss_mask=np.ones(num_tokens, np.bool_),
        sampler_logprobs=None,
        old_logprobs=None,
        reference_logprobs=None,
        rewards=rng.normal(size=num_sequences),
        advantages=None,
        token_weights=None,
        temperature=np.ones(num_sequences, np.float32),
        sampler_is_raw=np.zeros(num_sequences, np.bool_),
        truncated=np.zeros(num_sequences, np.bool_),
        policy_version=np.full(num_sequences, -1),
        top_p=np.ones(num_sequences, np.float32),
        top_k=np.zeros(num_sequences, np.int32),
    )


def measure_forest_1m(repeats: int) -> dict[str, object]:
    """Medians over `repeats` (>= 1) runs, after one that is not counted; `*_seconds` in seconds."""
    batch = million_token_batch(seed=0)
    seconds: dict[str, list[float]] = {"sort": [], "forest": [], "pack": [], "total": []}
    packed_tokens = replicated_tokens = 0
    for repeat in range(repeats + 1):
        start = time.perf_counter()
        prefixes = sort_sequences(batch)
        sorted_at = time.perf_counter()
        forest = build_forest(batch, prefixes, None)
        grown_at = time.perf_counter()
        packed = pack(batch, forest, batch.loss_mask)
        packed_at = time.perf_counter()
        assert len(packed.term_target) == len(batch.loss_mask)
        packed_tokens = forest.num_tokens
        replicated_tokens = int(forest.sequence_length.sum())
        if repeat:
            seconds["sort"].append(sorted_at - start)
            seconds["forest"].append(grown_at - sorted_at)
            seconds["pack"].append(packed_at - grown_at)
            seconds["total"].append(packed_at - start)
    return {
        "groups": NUM_GROUPS,
        "rollouts_per_group": NUM_ROLLOUTS,
        "packed_tokens": packed_tokens,
        "replicated_tokens": replicated_tokens,
        "repeats": repeats,
        **{f"{name}_seconds": statistics.median(values) for name, values in seconds.items()},
        "raw_seconds": seconds,
    }
