"""Order of advantages, drops and counters; what `once` counts, by brute force."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ratoon.errors import ErrorCode, RatoonError
from ratoon.planner.planning import cpu_planner
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.selection import Counters
from ratoon.rollout.validate import validate_groups
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.prepare import Prepared, prepare
from ratoon_proto.types import (
    AdvantageKind,
    KlConfig,
    KlKind,
    LossConfig,
    LossKind,
    OldLogprobs,
    OldLogprobsKind,
    OverlongFilter,
    ReferenceKind,
    SharedTokens,
    StalenessAction,
    StalenessConfig,
    TokenWeight,
)
from tests import builders

_ON_POLICY = OldLogprobs(kind=OldLogprobsKind.ON_POLICY)


def _prepare(
    batch: RolloutBatch,
    entropy_J: NDArray[np.floating] | None = None,
    *,
    version: int = 0,
    tokens: int = 64,
    **changes: Any,
) -> Prepared:
    fields: dict[str, Any] = {"kind": LossKind.PPO_CLIP, "old_logprobs": _ON_POLICY}
    loss = resolve_loss(LossConfig(**(fields | changes)), batch, has_frozen_reference=True)
    return prepare(batch, loss, version=version, plan=cpu_planner(tokens), entropy_J=entropy_J)


def _sequence_values(batch: RolloutBatch, column_J: NDArray[Any]) -> list[list[float]]:
    offsets = batch.response_offsets
    return [column_J[a:b].tolist() for a, b in pairwise(offsets)]


def test_advantages_come_before_drops() -> None:
    """The dropped rollout's reward is in its group's mean: (1) advantages, (2) drops."""
    rollouts = [
        builders.rollout([1, 2], reward=0.0),
        builders.rollout([3], reward=1.0),
        builders.rollout([4], reward=5.0, truncated=True),
    ]
    batch = validate_groups([builders.group([9], rollouts)], builders.limits())
    prepared = _prepare(batch, advantage=AdvantageKind.GROUP_MEAN, overlong=OverlongFilter())
    assert _sequence_values(batch, prepared.columns.advantage_J) == [[-2.0, -2.0], [-1.0], [3.0]]
    assert prepared.columns.trained_J.tolist() == [True, True, True, False]
    assert prepared.selection.dropped_truncated == 1
    counters = prepared.counters
    assert (counters.tokens, counters.sequences, counters.groups) == (3, 2, 1)
    assert prepared.plan.micro_batches[0].sequences == (0, 1)


def test_counters_leave_out_what_trains_nothing() -> None:
    """An empty response and a wholly masked one are in no counter, nor is their group."""
    trained = builders.rollout([1, 2, 3], reward=1.0, loss_mask=np.array([True, False, True]))
    masked = builders.rollout([1, 2], reward=0.0, loss_mask=np.zeros(2, np.bool_))
    empty = builders.rollout([], reward=0.0)
    batch = validate_groups(
        [
            builders.group([7], [trained, masked, empty], "a"),
            builders.group([8], [masked, empty], "b"),
        ],
        builders.limits(),
    )
    prepared = _prepare(batch, token_weight=TokenWeight.PER_SEQUENCE)
    counters = prepared.counters
    assert (counters.tokens, counters.sequences, counters.groups) == (2, 1, 1)
    assert prepared.columns.weight_J[:3].tolist() == [0.5, 0.5, 0.5]
    # What trains nothing is not run either.
    assert [part.sequences for part in prepared.plan.micro_batches] == [(0,)]


def test_staleness_drops_or_refuses() -> None:
    rollouts = [builders.rollout([n, 1], reward=float(n), policy_version=n) for n in range(4)]
    batch = validate_groups([builders.group([9], rollouts)], builders.limits())
    drop = StalenessConfig(max_versions=1, action=StalenessAction.DROP)
    prepared = _prepare(batch, version=3, staleness=drop)
    assert prepared.selection.kept_S.tolist() == [False, False, True, True]
    assert prepared.selection.dropped_stale == 2
    with pytest.raises(RatoonError) as caught:
        _prepare(batch, version=3, staleness=replace(drop, action=StalenessAction.REFUSE))
    assert caught.value.code is ErrorCode.STALE_ROLLOUTS


@pytest.mark.parametrize("seed", range(6))
def test_once_counts_each_token_for_its_first_path(seed: int) -> None:
    """Brute force: of the paths that train the same prefix, the first in request order pays."""
    rng = np.random.default_rng(seed)
    batch = builders.random_batch(
        rng, num_groups=5, vocab_size=3, max_response=6, temperatures=(1.0, 0.7)
    )
    kept_S = rng.random(batch.num_sequences) < 0.8
    kept_S[0] = True
    batch = replace(batch, truncated=~kept_S)
    prepared = _prepare(
        batch,
        shared_tokens=SharedTokens.ONCE,
        token_weight=TokenWeight.PER_SEQUENCE,
        overlong=OverlongFilter(),
        tokens=20,
    )
    paid: set[tuple[float, tuple[int, ...]]] = set()
    counted_J = np.zeros(len(batch.loss_mask), np.bool_)
    for sequence in np.flatnonzero(kept_S).tolist():
        tokens = batch.sequence_tokens(sequence)
        start, stop = batch.response_offsets[sequence : sequence + 2].tolist()
        for column in range(start, stop):
            prefix = tuple(tokens[: len(tokens) - (stop - column) + 1].tolist())
            key = (float(batch.temperature[sequence]), prefix)
            if batch.loss_mask[column] and key not in paid:
                paid.add(key)
                counted_J[column] = True
    np.testing.assert_array_equal(prepared.columns.counted_J, counted_J)
    np.testing.assert_array_equal(
        prepared.columns.trained_J,
        batch.loss_mask & np.repeat(kept_S, np.diff(batch.response_offsets)),
    )
    assert (prepared.columns.trained_J != counted_J).any()
    lengths = [sum(values) for values in _sequence_values(batch, counted_J)]
    assert prepared.counters.tokens == sum(lengths)
    assert prepared.counters.sequences == sum(length > 0 for length in lengths)
    for sequence, weights in enumerate(_sequence_values(batch, prepared.columns.weight_J)):
        assert weights == [1.0 / max(lengths[sequence], 1)] * len(weights)


def test_groups_with_given_advantages_are_told_apart_by_id_and_prompt() -> None:
    """Trap 3: two prompts under one id are two groups; parts of one group are one."""

    def keys(prompt: list[int], name: str, *, reward: bool = False) -> frozenset[bytes]:
        outcome = {"reward": 1.0} if reward else {"advantages": np.ones(2, np.float32)}
        rollout = builders.rollout([1, 2], **outcome)
        batch = validate_groups([builders.group(prompt, [rollout], name)], builders.limits())
        return _prepare(batch).group_keys

    assert keys([5], "a") == keys([5], "a")
    assert len(keys([5], "a")) == 1
    assert keys([5], "a") != keys([6], "a")
    assert keys([5], "a") != keys([5], "b")
    assert keys([5], "a", reward=True) == frozenset()


def test_warnings_say_what_was_not_used_and_what_was_cut() -> None:
    rollout = builders.rollout(
        [1, 2],
        reward=1.0,
        top_p=0.9,
        old_logprobs=np.zeros(2, np.float32),
        reference_logprobs=np.zeros(2, np.float32),
    )
    batch = validate_groups([builders.group([5], [rollout])], builders.limits())
    text = " ".join(map(str, _prepare(batch).warnings))
    for word in ("top_p", "old_logprobs were sent", "reference_logprobs were sent"):
        assert word in text
    rollouts = [builders.rollout([1, n], reward=float(n)) for n in range(2)]
    plain = validate_groups([builders.group([5], rollouts)], builders.limits())
    assert _prepare(plain).warnings == ()


def _two_groups(second_rewards: list[float]) -> RolloutBatch:
    """Rewards 0 and 1 for the first prompt, others for the second; lengths 2 and 3 in each."""

    def group(prompt: int, rewards: list[float], name: str) -> Any:
        rollouts = [
            builders.rollout([n + 1] * (n + 2), reward=reward) for n, reward in enumerate(rewards)
        ]
        return builders.group([prompt], rollouts, name)

    groups = [group(8, [0.0, 1.0], "mixed"), group(9, second_rewards, "second")]
    return validate_groups(groups, builders.limits())


def test_rollouts_without_advantages_are_counted_but_not_run() -> None:
    """Their terms and gradients are zero: they were packed and run all the same."""
    flat, mixed = _prepare(_two_groups([1.0, 1.0])), _prepare(_two_groups([1.0, 0.0]))
    assert [part.sequences for part in flat.plan.micro_batches] == [(0, 1)]
    assert [part.sequences for part in mixed.plan.micro_batches] == [(0, 1, 2, 3)]
    assert flat.counters == mixed.counters
    assert flat.counters.tokens == 10
    np.testing.assert_array_equal(flat.columns.counted_J, mixed.columns.counted_J)
    np.testing.assert_array_equal(flat.columns.weight_J, mixed.columns.weight_J)
    assert flat.not_run_S.tolist() == [False, False, True, True]
    assert not mixed.not_run_S.any()


@pytest.mark.parametrize(
    "term",
    [
        {"entropy_coefficient": 0.1},
        {"kl": KlConfig(kind=KlKind.K2, coefficient=0.0, reference=ReferenceKind.FROZEN)},
    ],
)
def test_a_term_without_advantages_runs_every_rollout(term: dict[str, Any]) -> None:
    """A KL is measured even where its coefficient is 0."""
    prepared = _prepare(_two_groups([1.0, 1.0]), **term)
    assert [part.sequences for part in prepared.plan.micro_batches] == [(0, 1, 2, 3)]


def test_an_owner_without_advantage_leaves_the_next_path_nothing_to_run() -> None:
    """Under `once` the first path pays for a shared token, whatever its advantage."""

    def rollout(response: list[int], advantage: float) -> Any:
        values = np.full(len(response), advantage, np.float32)
        return builders.rollout(response, advantages=values)

    rollouts = [rollout([1, 2], 0.0), rollout([1, 2], 5.0), rollout([1, 3], 5.0)]
    batch = validate_groups([builders.group([9], rollouts)], builders.limits())
    prepared = _prepare(batch, shared_tokens=SharedTokens.ONCE)
    assert [part.sequences for part in prepared.plan.micro_batches] == [(2,)]
    assert (prepared.counters.tokens, prepared.counters.sequences) == (3, 2)
    summed = _prepare(batch)
    assert [part.sequences for part in summed.plan.micro_batches] == [(1, 2)]


def test_nothing_to_learn_is_said() -> None:
    flat = [builders.rollout([1, 2], reward=1.0), builders.rollout([3], reward=1.0)]
    batch = validate_groups([builders.group([9], flat)], builders.limits())
    prepared = _prepare(batch)
    assert prepared.plan.micro_batches == ()
    assert prepared.counters.tokens == 3
    assert [each.kind for each in prepared.warnings] == ["equal_rewards"]
    given = [replace(raw, reward=None, advantages=np.zeros(1, np.float32)) for raw in flat[1:]]
    ready = _prepare(validate_groups([builders.group([9], given)], builders.limits()))
    assert [each.kind for each in ready.warnings] == ["zero_advantages"]


def test_sequences_without_a_trained_token_count_where_asked_for() -> None:
    """A mean over all that were sampled, as TRL's where it masks truncated ones; tokens, groups and
    what is dropped for another cause count as ever."""
    none = np.zeros(2, np.bool_)
    groups = [
        builders.group(
            [9],
            [
                builders.rollout([1, 2], reward=1.0),
                builders.rollout([3, 4], reward=0.0, loss_mask=none),
                builders.rollout([5, 6], reward=0.5, truncated=True),
            ],
            "a",
        ),
        builders.group([8], [builders.rollout([1, 2], reward=1.0, loss_mask=none)], "b"),
        builders.group([7], [builders.rollout([n], reward=1.0) for n in (1, 2)], "flat"),
    ]
    batch = validate_groups(groups, builders.limits())
    options = {"overlong": OverlongFilter(), "drop_zero_variance_groups": True}
    plain = _prepare(batch, **options)
    asked = _prepare(batch, count_untrained=True, **options)
    assert plain.counters == Counters(tokens=2, sequences=1, groups=1)
    assert asked.counters == replace(plain.counters, sequences=4)
    assert asked.plan == plain.plan


FORWARD = OldLogprobs(kind=OldLogprobsKind.FROM_FORWARD, forward_operation_id="p.op")


def test_only_tokens_of_most_entropy_have_an_advantage() -> None:
    """Two fifths of five counted tokens are two, plus those that tie with the second; all count."""
    masked = np.array([True, False, True])
    rollouts = [
        builders.rollout([1, 2, 3], advantages=np.full(3, 2.0, np.float32), loss_mask=masked),
        builders.rollout([4, 5, 6], advantages=np.full(3, -1.0, np.float32)),
    ]
    batch = validate_groups([builders.group([9], rollouts)], builders.limits())
    prepared = _prepare(batch, old_logprobs=FORWARD, top_entropy_share=0.4)
    # The second is not trained, whatever its entropy.
    entropy = np.array([0.5, 9.0, 3.0, 0.1, 1.0, 1.0], np.float32)
    kept = _prepare(batch, entropy, old_logprobs=FORWARD, top_entropy_share=0.4)
    assert kept.plan == prepared.plan
    assert kept.columns.advantage_J.tolist() == [0.0, 0.0, 2.0, 0.0, -1.0, -1.0]
    assert kept.counters == prepared.counters
    np.testing.assert_array_equal(kept.columns.weight_J, prepared.columns.weight_J)
    everything = _prepare(batch, old_logprobs=FORWARD, top_entropy_share=1.0)
    trained_J = everything.columns.trained_J
    np.testing.assert_array_equal(
        _prepare(batch, entropy, old_logprobs=FORWARD, top_entropy_share=1.0).columns.advantage_J[
            trained_J
        ],
        everything.columns.advantage_J[trained_J],
    )


def test_the_share_of_entropy_is_rounded_up_in_decimal() -> None:
    """0.1 of 30 tokens are 3, though 0.1 * 30 is more than 3; 0.15 of them are 5."""
    rollout = builders.rollout([1] * 30, advantages=np.ones(30, np.float32))
    batch = validate_groups([builders.group([9], [rollout])], builders.limits())
    entropy = np.arange(30, dtype=np.float32)
    for share, first in ((0.1, 27), (0.15, 25)):
        kept = _prepare(batch, entropy, old_logprobs=FORWARD, top_entropy_share=share)
        assert np.flatnonzero(kept.columns.advantage_J).tolist() == list(range(first, 30))
