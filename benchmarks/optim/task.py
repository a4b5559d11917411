"""A task whose best loss is known: groups of responses drawn from a random Markov source.

The source is the same for all seeds; a seed decides which groups are drawn from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.raw import RawGroup, RawRollout, RawSegment, SamplerLogprobsKind
from ratoon.rollout.validate import BatchLimits, validate_groups

_SOURCE_SEED = 20_240_229
# Standard deviation of a symbol's logits, given the two before it.
_LOGIT_STD = 2.0
_FIRST_SYMBOL = ord("a")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Each update trains on new groups: `num_responses` continuations per prompt.

    Text is a second-order Markov chain over `num_symbols` bytes; lengths are in tokens.
    """

    num_symbols: int
    num_groups: int
    num_responses: int
    prompt_tokens: int
    response_tokens: int


def transitions(task: Task) -> NDArray[np.float64]:
    """The source's probabilities, [symbol before the last, last, next]."""
    rng = np.random.default_rng(_SOURCE_SEED)
    weight = np.exp(rng.normal(scale=_LOGIT_STD, size=(task.num_symbols,) * 3))
    return weight / weight.sum(axis=2, keepdims=True)


def best_loss(task: Task) -> float:
    """Nats per token of a policy that knows the source: the source's entropy rate."""
    chain = transitions(task)
    pair = np.full(chain.shape[:2], 1 / task.num_symbols**2)
    for _ in range(200):
        pair = np.einsum("ab,abc->bc", pair, chain)
    return float(-np.einsum("ab,abc->", pair, chain * np.log(chain)))


def draw_batches(task: Task, num_updates: int, seed: int) -> list[RolloutBatch]:
    """One batch per update; every response token is trained with weight 1."""
    rng = np.random.default_rng(seed)
    groups = num_updates * task.num_groups
    start = rng.integers(0, task.num_symbols, (groups, 2))
    prompts = _continue(task, start, task.prompt_tokens, rng)
    ends = np.repeat(prompts[:, -2:], task.num_responses, axis=0)
    responses = _continue(task, ends, task.response_tokens, rng)
    responses = responses.reshape(groups, task.num_responses, task.response_tokens)
    return [
        _batch(prompts[first : first + task.num_groups], responses[first : first + task.num_groups])
        for first in range(0, groups, task.num_groups)
    ]


def _continue(
    task: Task, last_two: NDArray[np.integer], length: int, rng: np.random.Generator
) -> NDArray[np.int32]:
    """Symbols after `last_two` [rows, 2], as int32 [rows, length]."""
    cumulative = np.cumsum(transitions(task), axis=2)
    # The last sum is 1 only up to rounding; a draw beyond it would index past the end.
    cumulative[:, :, -1] = math.inf
    before, last = last_two[:, 0], last_two[:, 1]
    columns: list[NDArray[np.integer]] = []
    for _ in range(length):
        draw = rng.random(len(last))
        following = (cumulative[before, last] < draw[:, None]).sum(axis=1)
        before, last = last, following
        columns.append(following)
    return np.stack(columns, axis=1).astype(np.int32)


def _batch(prompts: NDArray[np.int32], responses: NDArray[np.int32]) -> RolloutBatch:
    groups = [
        RawGroup(
            group_id=f"group-{index}",
            prompt=_FIRST_SYMBOL + prompt,
            rollouts=tuple(_rollout(_FIRST_SYMBOL + response) for response in responses[index]),
        )
        for index, prompt in enumerate(prompts)
    ]
    limits = BatchLimits(
        vocab_size=256,
        max_sequence_tokens=1 << 15,
        max_groups=1 << 12,
        max_sequences=1 << 16,
        max_tokens=1 << 24,
    )
    return validate_groups(groups, limits)


def _rollout(tokens: NDArray[np.int32]) -> RawRollout:
    return RawRollout(
        segments=(RawSegment(tokens=tokens, trained=True),),
        loss_mask=None,
        sampler_logprobs=None,
        old_logprobs=None,
        reference_logprobs=None,
        reward=None,
        advantages=None,
        token_weights=np.ones(len(tokens), np.float32),
        temperature=1.0,
        sampler_logprobs_kind=SamplerLogprobsKind.PROCESSED,
        top_p=None,
        top_k=None,
        policy_version=None,
        truncated=False,
    )
