"""Equivalence over recorded rollouts: real prompts, real branching, byte tokens.

Advantages are random, non-zero and different per token; recorded rewards are a second case, as many
groups have equal ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.validate import validate_groups
from ratoon_proto.types import (
    KlConfig,
    KlKind,
    LossConfig,
    LossKind,
    OptimStepConfig,
    ReferenceKind,
    SharedTokens,
)
from tests.builders import dressed, group, limits, rollout
from tests.equivalence import assert_close, near_policy
from tests.recorded import RecordedGroup, RecordedRollout
from tests.tiny_models import write_folder
from tests.train.equivalence_runs import (
    WHOLE,
    Pair,
    check_step,
    forward_backward,
    make_pair,
    make_request,
    oracle_loss,
)

LIMIT_TOKENS = 4096
# The airline system prompt has 6,155 bytes, more than the cut leaves: its beginning stands for it.
SYSTEM_TOKENS = 1024
FROZEN = KlConfig(kind=KlKind.K3, coefficient=0.1, reference=ReferenceKind.FROZEN)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    folder = write_folder(tmp_path / "base", "qwen3", vocab_size=260, num_heads=2)
    return make_pair(folder, scratch=tmp_path / "adapter", attention="sdpa")


def _cut(
    recorded: RecordedRollout, *, system_tokens: int, limit_tokens: int
) -> tuple[np.ndarray, list[tuple[np.ndarray, bool]]]:
    """First segment as the prompt, the others as segments; both cut to their limits."""
    first, *others = recorded.segments
    assert not first.is_trained
    prompt = first.tokens[:system_tokens]
    room = limit_tokens - len(prompt)
    parts: list[tuple[np.ndarray, bool]] = []
    for segment in others:
        if room > 0:
            parts.append((segment.tokens[:room], segment.is_trained))
            room -= len(parts[-1][0])
    return prompt, parts


def _batch(
    pair: Pair,
    groups: Sequence[RecordedGroup],
    *,
    seed: int,
    use_rewards: bool = False,
    is_cut: bool = False,
) -> RolloutBatch:
    """The groups, all their paths, with log-probs near to the policy's."""
    rng = np.random.default_rng(seed)
    system_tokens, limit_tokens = (SYSTEM_TOKENS, LIMIT_TOKENS) if is_cut else (WHOLE, WHOLE)
    raw_groups = []
    for recorded in groups:
        cut = [
            _cut(one, system_tokens=system_tokens, limit_tokens=limit_tokens)
            for one in recorded.rollouts
        ]
        raws = [
            dressed(rollout(parts), rng, outcome="advantages", with_logprobs=True)
            for _, parts in cut
        ]
        if use_rewards:
            raws = [
                replace(raw, advantages=None, reward=one.reward)
                for raw, one in zip(raws, recorded.rollouts, strict=True)
            ]
        assert len({prompt.tobytes() for prompt, _ in cut}) == 1
        raw_groups.append(group(cut[0][0], raws, recorded.group_id))
    batch = validate_groups(raw_groups, limits(vocab_size=260))
    return near_policy(batch, pair.oracle.model, rng)


def _step(
    pair: Pair, batch: RolloutBatch, request: LossConfig, *, micro_batch_tokens: int
) -> float:
    """One checked step; returns the token reduction."""
    report, _ = forward_backward(pair, batch, request, micro_batch_tokens=micro_batch_tokens)
    assert_close(pair.gradient_errors(), pair.tolerance)
    optim = OptimStepConfig(learning_rate=1e-2, max_grad_norm=1.0)
    check_step(pair, optim, divide_by=oracle_loss(request, batch).divide_by)
    assert report.token_reduction is not None
    return report.token_reduction


def test_gsm8k_three_steps(pair: Pair, gsm8k_groups: tuple[RecordedGroup, ...]) -> None:
    """Four problems a step, one loss a step, in one to several micro-batches; rewards at one."""
    requests = [
        LossConfig(kind=LossKind.GRPO, kl=FROZEN),
        LossConfig(kind=LossKind.DAPO, entropy_coefficient=0.01),
        make_request(LossKind.GSPO, shared_tokens=SharedTokens.ONCE),
    ]
    for step, request in enumerate(requests):
        groups = gsm8k_groups[4 * step : 4 * step + 4]
        batch = _batch(pair, groups, seed=step, use_rewards=step == 1)
        _step(pair, batch, request, micro_batch_tokens=(WHOLE, 3000, 1)[step])
    assert pair.trainer.version == len(requests)


@pytest.mark.more
def test_airline_three_steps(pair: Pair, airline_groups: tuple[RecordedGroup, ...]) -> None:
    """Three tasks, all four paths, conversations cut at 4,096 tokens: all at once, then by task."""
    tasks = airline_groups[:3]
    batch = _batch(pair, tasks, seed=0, is_cut=True)
    lengths = np.diff(batch.response_offsets)
    assert lengths.max() == LIMIT_TOKENS - SYSTEM_TOKENS
    assert (lengths == lengths.max()).sum() == 10
    request = LossConfig(kind=LossKind.GRPO, kl=FROZEN)
    reduction = _step(pair, batch, request, micro_batch_tokens=WHOLE)
    # The system prompt is there once, for three groups of four, and the four of a task share more.
    num_replicated = lengths.sum() + len(lengths) * SYSTEM_TOKENS
    assert reduction > num_replicated / (lengths.sum() + SYSTEM_TOKENS)
    for step, kind in ((1, LossKind.GSPO), (2, LossKind.DAPO)):
        task = tasks[step : step + 1]
        batch = _batch(pair, task, seed=step, use_rewards=step == 2, is_cut=True)
        request = make_request(kind, shared_tokens=SharedTokens.ONCE)
        _step(pair, batch, request, micro_batch_tokens=6000)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_airline_uncut(pair: Pair, airline_groups: tuple[RecordedGroup, ...]) -> None:
    """One whole task, system prompt and all."""
    batch = _batch(pair, airline_groups[1:2], seed=0)
    assert batch.prompt_offsets[-1] == 6155
    assert np.diff(batch.response_offsets).max() > 5000
    request = LossConfig(kind=LossKind.GRPO, kl=FROZEN, entropy_coefficient=0.01)
    assert _step(pair, batch, request, micro_batch_tokens=WHOLE) > 1.5
