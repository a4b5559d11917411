"""Drops, owners of shared tokens and counters, against loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ratoon.errors import ErrorCode, RatoonError
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.prefixes import sort_sequences
from ratoon.rollout.raw import RawRollout
from ratoon.rollout.selection import (
    Selection,
    counters,
    first_owner_mask,
    select_sequences,
    trained_lengths,
    trained_mask,
)
from ratoon.rollout.validate import validate_groups
from tests.builders import group, limits, rollout
from tests.oracle.advantages import are_equal
from tests.rollout import oracle
from tests.rollout.strategies import CHECKED, batches, kept_masks


def _batch(*groups: list[RawRollout]) -> RolloutBatch:
    return validate_groups(
        [group([1], members, f"group-{g}") for g, members in enumerate(groups)], limits()
    )


def _select(
    batch: RolloutBatch,
    *,
    version: int = 10,
    max_versions: int | None = None,
    refuse_stale: bool = False,
    drop_truncated: bool = False,
    drop_zero_variance: bool = False,
) -> Selection:
    return select_sequences(
        batch,
        version=version,
        max_versions=max_versions,
        refuse_stale=refuse_stale,
        drop_truncated=drop_truncated,
        drop_zero_variance=drop_zero_variance,
    )


@CHECKED
@given(
    batch=batches(),
    ahead=st.integers(0, 20),
    max_versions=st.none() | st.integers(0, 15),
    drop_truncated=st.booleans(),
    drop_zero_variance=st.booleans(),
)
def test_drops_are_counted_once_in_order(
    batch: RolloutBatch,
    ahead: int,
    max_versions: int | None,
    drop_truncated: bool,
    drop_zero_variance: bool,
) -> None:
    version = int(batch.policy_version.max()) + ahead
    selection = select_sequences(
        batch,
        version=version,
        max_versions=max_versions,
        refuse_stale=False,
        drop_truncated=drop_truncated,
        drop_zero_variance=drop_zero_variance,
    )
    assert batch.rewards is not None
    reasons: list[str] = []
    for s in range(batch.num_sequences):
        g = oracle.group_of(batch, s)
        rewards = batch.rewards[batch.group_offsets[g] : batch.group_offsets[g + 1]].tolist()
        if max_versions is not None and version - batch.policy_version[s] > max_versions:
            reasons.append("stale")
        elif drop_truncated and batch.truncated[s]:
            reasons.append("truncated")
        elif drop_zero_variance and len(rewards) > 1 and are_equal(rewards):
            reasons.append("zero variance")
        else:
            reasons.append("")
    assert selection.kept_S.tolist() == [not reason for reason in reasons]
    assert selection.dropped_stale == reasons.count("stale")
    assert selection.dropped_truncated == reasons.count("truncated")
    assert selection.dropped_zero_variance == reasons.count("zero variance")


def test_variance_is_of_the_group_as_received() -> None:
    """Dropping the one truncated rollout leaves equal rewards, yet the group had variance."""
    batch = _batch(
        [
            rollout([1], reward=1.0),
            rollout([2], reward=1.0),
            rollout([3], reward=0.0, truncated=True),
        ]
    )
    selection = _select(batch, drop_truncated=True, drop_zero_variance=True)
    assert selection.kept_S.tolist() == [True, True, False]
    assert selection.dropped_zero_variance == 0


def test_a_group_of_one_has_an_advantage_and_stays() -> None:
    batch = _batch([rollout([1], reward=1.0)])
    assert _select(batch, drop_zero_variance=True).kept_S.tolist() == [True]


def test_ready_made_advantages_have_no_variance_to_drop() -> None:
    batch = _batch([rollout([1], advantages=np.zeros(1, np.float32)) for _ in range(2)])
    assert _select(batch, drop_zero_variance=True).kept_S.tolist() == [True, True]


def test_stale_rollouts_are_refused_by_number_and_name() -> None:
    batch = _batch(
        [rollout([1], policy_version=9), rollout([2], policy_version=7)],
        [rollout([3], policy_version=6)],
    )
    with pytest.raises(RatoonError) as caught:
        _select(batch, max_versions=2, refuse_stale=True)
    assert caught.value.code == ErrorCode.STALE_ROLLOUTS
    assert caught.value.field == "groups[0].rollouts[1].policy_version"
    assert caught.value.details["num_stale"] == "2"
    assert caught.value.message == (
        "2 of 3 rollouts are stale, first groups[0].rollouts[1].policy_version: "
        "got version 7, 3 behind 10, expected at most 2 behind"
    )
    assert _select(batch, max_versions=4, refuse_stale=True).dropped_stale == 0


@pytest.mark.parametrize("refuse_stale", [True, False])
def test_a_rollout_that_does_not_say_its_version_cannot_be_judged(refuse_stale: bool) -> None:
    batch = _batch([rollout([1], policy_version=10), rollout([2])])
    with pytest.raises(RatoonError) as caught:
        _select(batch, max_versions=2, refuse_stale=refuse_stale)
    assert caught.value.code == ErrorCode.INVALID_ARGUMENT
    assert caught.value.field == "groups[0].rollouts[1].policy_version"
    assert _select(batch).kept_S.all()


@pytest.mark.parametrize("refuse_stale", [True, False])
def test_a_version_that_is_yet_to_come_is_refused(refuse_stale: bool) -> None:
    """It would count as fresh for as long as it takes the policy to get there."""
    batch = _batch([rollout([1], policy_version=10), rollout([2], policy_version=11)])
    with pytest.raises(RatoonError) as caught:
        _select(batch, max_versions=2, refuse_stale=refuse_stale)
    assert caught.value.code == ErrorCode.INVALID_ARGUMENT
    assert caught.value.field == "groups[0].rollouts[1].policy_version"
    assert _select(batch).kept_S.all()


@CHECKED
@given(data=st.data())
def test_a_shared_token_belongs_to_the_first_kept_path_that_trains_it(
    data: st.DataObject,
) -> None:
    batch = data.draw(batches())
    kept = data.draw(kept_masks(batch))
    mask = first_owner_mask(batch, sort_sequences(batch), kept)
    expected = oracle.owner_mask(batch, np.flatnonzero(kept).tolist())
    assert mask.tolist() == expected.tolist()
    _check_counters(batch, kept)


def _check_counters(batch: RolloutBatch, kept: NDArray[np.bool_]) -> None:
    """They are over what remains."""
    mask = trained_mask(batch, kept)
    num_trained = [
        sum(bool(batch.loss_mask[j]) for j, _ in oracle.response_prefixes(batch, s))
        if kept[s]
        else 0
        for s in range(batch.num_sequences)
    ]
    assert trained_lengths(batch, mask).tolist() == num_trained
    counted = counters(batch.loss_mask, batch, kept)
    assert counted.tokens == sum(num_trained)
    assert counted.sequences == sum(number > 0 for number in num_trained)
    assert counted.groups == len(
        {oracle.group_of(batch, s) for s, number in enumerate(num_trained) if number}
    )


def test_the_first_path_may_hold_a_token_without_training_it() -> None:
    batch = _batch(
        [
            rollout([(np.array([5]), False), (np.array([6]), True)]),
            rollout([5, 6]),
            rollout([5, 7]),
        ]
    )
    mask = first_owner_mask(batch, sort_sequences(batch), np.ones(3, np.bool_))
    assert mask.tolist() == [False, True, True, False, False, True]
