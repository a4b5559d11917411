"""Version spans: which version sampled which token, and what staleness is judged by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from ratoon.errors import ErrorCode, RatoonError
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.columns import versions_of_tokens
from ratoon.rollout.selection import select_sequences
from ratoon.rollout.serial import batch_from_bytes, batch_to_bytes
from ratoon.rollout.validate import validate_groups
from tests import builders


def _batch(*rollouts: Mapping[str, Any]) -> RolloutBatch:
    group = builders.group([1, 2], [builders.rollout([3, 4, 5], **fields) for fields in rollouts])
    return validate_groups([group], builders.limits())


def test_a_token_has_its_spans_version_and_a_rollout_its_oldest() -> None:
    batch = _batch({"version_spans": ((0, 4), (1, 6))}, {"policy_version": 5}, {})
    assert batch.policy_version.tolist() == [4, 5, -1]
    assert batch.token_version is not None
    assert batch.token_version.tolist() == [4, 6, 6, 5, 5, 5, -1, -1, -1]
    is_dated_S = batch.policy_version >= 0
    assert versions_of_tokens(batch, is_dated_S).tolist() == [4, 6, 6, 5, 5, 5]


def test_without_spans_tokens_have_their_rollouts_version() -> None:
    batch = _batch({"policy_version": 5}, {"policy_version": 7})
    assert batch.token_version is None
    assert versions_of_tokens(batch, np.array([False, True])).tolist() == [7, 7, 7]


def test_spans_are_in_the_body_that_is_journaled() -> None:
    batch = _batch({"version_spans": ((0, 4), (2, 6))}, {"policy_version": 5})
    again = batch_from_bytes(batch_to_bytes(batch))
    assert again.token_version is not None
    assert again.token_version.tolist() == [4, 4, 6, 5, 5, 5]
    plain = _batch({"policy_version": 4}, {"policy_version": 5})
    assert batch_to_bytes(plain) != batch_to_bytes(batch)
    assert batch_from_bytes(batch_to_bytes(plain)).token_version is None


def _select(batch: RolloutBatch, version: int, *, refuse: bool = False) -> list[bool]:
    selection = select_sequences(
        batch,
        version=version,
        max_versions=1,
        refuse_stale=refuse,
        drop_truncated=False,
        drop_zero_variance=False,
    )
    return selection.kept_S.tolist()


def test_staleness_is_that_of_the_oldest_span() -> None:
    batch = _batch({"version_spans": ((0, 4), (2, 6))}, {"version_spans": ((0, 5), (1, 6))})
    assert _select(batch, 6) == [False, True]
    with pytest.raises(RatoonError) as caught:
        _select(batch, 6, refuse=True)
    assert caught.value.code is ErrorCode.STALE_ROLLOUTS
    assert caught.value.field == "groups[0].rollouts[0].policy_version"


def test_a_span_of_a_version_to_come_is_refused_where_staleness_is_bounded() -> None:
    batch = _batch({"policy_version": 4}, {"version_spans": ((0, 4), (2, 6))})
    with pytest.raises(RatoonError) as caught:
        _select(batch, 5)
    assert caught.value.field == "groups[0].rollouts[1].version_spans"


@pytest.mark.parametrize(
    ("rollout", "field"),
    [
        ({"version_spans": ((1, 4),)}, "version_spans[0].first_token"),
        ({"version_spans": ((0, 4), (0, 5))}, "version_spans[1].first_token"),
        ({"version_spans": ((0, 4), (2, 5), (1, 6))}, "version_spans[2].first_token"),
        ({"version_spans": ((0, 4), (3, 5))}, "version_spans[1].first_token"),
        ({"version_spans": ((0, -1),)}, "version_spans[0].version"),
        ({"version_spans": ((0, 4), (1, 5)), "policy_version": 5}, "policy_version"),
    ],
)
def test_spans_that_do_not_cover_the_response_in_order_are_refused(
    rollout: Mapping[str, Any], field: str
) -> None:
    with pytest.raises(RatoonError) as caught:
        _batch({}, rollout)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert caught.value.field == f"groups[0].rollouts[1].{field}"
