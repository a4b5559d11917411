"""Rollouts that cannot be trained: which they are, and that a batch without them knows no trace of
them but where the request had what is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ratoon.errors import RatoonError
from ratoon.rollout.bad import as_sent, bad_offenders, bad_rollouts
from ratoon.rollout.batch import RolloutBatch, sent_field, sent_index
from ratoon.rollout.offenders import MAX_OFFENDERS, offenders
from ratoon.rollout.raw import RawGroup, RawRollout
from ratoon.rollout.routes import RouteSizes
from ratoon.rollout.serial import batch_from_bytes, batch_to_bytes
from ratoon.rollout.validate import validate_groups
from ratoon_proto.types import BadRollout, BadRolloutReason
from tests.builders import group, limits, rollout

LIMITS = limits(vocab_size=100, max_sequence_tokens=12, media_tokens={"image_token_id": 90})
_SENT = ("sent_ids", "sent_group", "sent_rollout", "bad_rollouts")
_NAN, _INF = float("nan"), float("inf")


def _rollout(seed: int, length: int, **changes: Any) -> RawRollout:
    rng = np.random.default_rng(seed)
    columns = {
        name: -rng.uniform(0.1, 2.0, length).astype(np.float32)
        for name in ("sampler_logprobs", "old_logprobs", "reference_logprobs")
    }
    fields: dict[str, Any] = {
        **columns,
        "reward": float(seed),
        "policy_version": seed,
        "token_weights": rng.normal(size=length).astype(np.float32),
        "loss_mask": np.arange(length) != 1,
        "routed_experts": rng.permutation([[[0, 1]], [[1, 2]]]).astype(np.uint8),
    }
    return rollout(rng.integers(0, 80, length), **(fields | changes))


_ROUTED = replace(LIMITS, routes=RouteSizes(layers=1, num_experts=4, experts_per_token=2))


def _groups() -> list[RawGroup]:
    """Groups of 2, 3 and 1 rollouts of 3 to 5 tokens."""
    return [
        group([7, 8], [_rollout(1, 3), _rollout(2, 4)], "a"),
        group([7, 9], [_rollout(3, 5), _rollout(4, 3), _rollout(5, 4)], "b"),
        group([6], [_rollout(6, 3)], "c"),
    ]


def _changed(
    groups: Sequence[RawGroup], places: Sequence[tuple[int, int]], change: Callable[..., RawRollout]
) -> list[RawGroup]:
    return [
        replace(
            each,
            rollouts=tuple(
                change(raw) if (g, r) in places else raw for r, raw in enumerate(each.rollouts)
            ),
        )
        for g, each in enumerate(groups)
    ]


def _left(groups: Sequence[RawGroup], places: Sequence[tuple[int, int]]) -> list[RawGroup]:
    """The request as it would be sent without these rollouts."""
    left = [
        replace(
            each,
            rollouts=tuple(raw for r, raw in enumerate(each.rollouts) if (g, r) not in places),
        )
        for g, each in enumerate(groups)
    ]
    return [each for each in left if each.rollouts]


def _at(name: str, token: int, value: float) -> Callable[[RawRollout], RawRollout]:
    def change(raw: RawRollout) -> RawRollout:
        column = getattr(raw, name).copy()
        column[token] = value
        return replace(raw, **{name: column})

    return change


def _with_token(token: int, value: int) -> Callable[[RawRollout], RawRollout]:
    def change(raw: RawRollout) -> RawRollout:
        tokens = raw.segments[0].tokens.copy()
        tokens[token] = value
        return replace(raw, segments=(replace(raw.segments[0], tokens=tokens),))

    return change


def _lacks(name: str) -> Callable[[RawRollout], RawRollout]:
    return lambda raw: replace(raw, **{name: None})


def _same(batch: RolloutBatch, other: RolloutBatch) -> None:
    for name in RolloutBatch.__slots__:
        if name not in _SENT:
            mine, theirs = getattr(batch, name), getattr(other, name)
            if isinstance(mine, np.ndarray):
                assert mine.dtype == theirs.dtype, name
            np.testing.assert_array_equal(mine, theirs, err_msg=name)


_LENGTH, _TOKEN = BadRolloutReason.LENGTH, BadRolloutReason.TOKEN
_REWARD, _LOGPROB = BadRolloutReason.REWARD, BadRolloutReason.LOGPROB


@pytest.mark.parametrize(
    ("change", "reason", "token"),
    [
        (lambda _: _rollout(9, 12), _LENGTH, None),
        (_with_token(2, 100), _TOKEN, 2),
        (_with_token(0, -1), _TOKEN, 0),
        (_with_token(1, 90), _TOKEN, 1),
        *((_at(name, 2, _NAN), _LOGPROB, 2) for name in ("sampler_logprobs", "old_logprobs")),
        (_at("reference_logprobs", 0, -_INF), _LOGPROB, 0),
        (_at("sampler_logprobs", 1, -_INF), _LOGPROB, 1),
        (_at("old_logprobs", 2, 0.5), _LOGPROB, 2),
        (_lacks("sampler_logprobs"), _LOGPROB, None),
        (lambda raw: replace(raw, reward=_NAN), _REWARD, None),
        (lambda raw: replace(raw, reward=1e39), _REWARD, None),
        (_lacks("reward"), _REWARD, None),
        (_at("token_weights", 1, _INF), _REWARD, 1),
        (_lacks("token_weights"), _REWARD, None),
    ],
)
@pytest.mark.parametrize("places", [[(1, 1)], [(0, 1), (2, 0)]])
def test_a_bad_rollout_costs_itself_alone(
    change: Callable[[RawRollout], RawRollout],
    reason: BadRolloutReason,
    token: int | None,
    places: list[tuple[int, int]],
) -> None:
    """What is left is the batch of the others, and what is dropped is named by place and reason."""
    groups = _changed(_groups(), places, change)
    batch = validate_groups(groups, _ROUTED, drops_bad=True)
    _same(batch, validate_groups(_left(groups, places), _ROUTED))
    assert bad_rollouts(batch) == tuple(
        BadRollout(group=g, rollout=r, reason=reason, token=token) for g, r in places
    )
    assert [each.group_id for each in bad_offenders(batch)] == ["abc"[g] for g, _ in places]
    with pytest.raises(RatoonError) as caught:
        validate_groups(groups, _ROUTED)
    first, *_ = places
    assert caught.value.field.startswith(f"groups[{first[0]}].rollouts[{first[1]}]")
    assert batch_to_bytes(batch) == batch_to_bytes(validate_groups(groups, _ROUTED, drops_bad=True))
    read = batch_from_bytes(batch_to_bytes(batch))
    _same(read, batch)
    assert bad_rollouts(read) == bad_rollouts(batch)


def test_a_bad_prompt_costs_its_group() -> None:
    groups = _groups()
    groups[1] = replace(groups[1], prompt=np.array([7, 200]))
    batch = validate_groups(groups, _ROUTED, drops_bad=True)
    _same(batch, validate_groups([groups[0], groups[2]], _ROUTED))
    assert [(each.group, each.rollout, each.reason) for each in bad_rollouts(batch)] == [
        (1, r, _TOKEN) for r in range(3)
    ]


def test_what_is_left_keeps_its_place_in_the_request() -> None:
    """Group 0 goes whole and group 1 loses its first: names are as the caller has them."""
    groups = _changed(_groups(), [(0, 0), (0, 1), (1, 0)], _lacks("reward"))
    batch = validate_groups(groups, _ROUTED, drops_bad=True)
    assert batch.group_ids == ("b", "c")
    named = offenders(batch, np.arange(3))
    assert [(each.group, each.group_id, each.rollout) for each in named] == [
        (1, "b", 1),
        (1, "b", 2),
        (2, "c", 0),
    ]
    assert sent_field(batch, 1) == "groups[1].rollouts[2]"
    assert [sent_index(batch, sequence) for sequence in range(3)] == [3, 4, 5]
    offsets, values = as_sent(batch, np.arange(10, dtype=np.float32))
    np.testing.assert_array_equal(offsets, [0, 3, 7, 12, 15, 19, 22])
    np.testing.assert_array_equal(values, [*[_NAN] * 12, *range(10)])


def test_the_first_fault_is_the_reason_and_others_may_have_theirs() -> None:
    groups = _changed(_groups(), [(0, 0)], _with_token(2, 1000))
    groups = _changed(groups, [(0, 0), (1, 2)], lambda raw: replace(raw, reward=_INF))
    found = bad_rollouts(validate_groups(groups, _ROUTED, drops_bad=True))
    assert [each.reason for each in found] == [_TOKEN, _REWARD]


def test_nothing_bad_leaves_no_trace() -> None:
    kept = validate_groups(_groups(), _ROUTED, drops_bad=True)
    assert batch_to_bytes(kept) == batch_to_bytes(validate_groups(_groups(), _ROUTED))
    assert all(getattr(kept, name) is None for name in _SENT)


def test_a_batch_of_which_nothing_is_left_is_one() -> None:
    groups = _changed(_groups(), [(g, r) for g in range(3) for r in range(3)], _with_token(0, -5))
    batch = batch_from_bytes(batch_to_bytes(validate_groups(groups, _ROUTED, drops_bad=True)))
    assert (batch.num_groups, batch.num_sequences, len(batch.response_tokens)) == (0, 0, 0)
    assert len(bad_rollouts(batch)) == 6
    offsets, values = as_sent(batch, np.empty(0, np.float32))
    assert offsets[-1] == len(values) == 22
    assert np.isnan(values).all()


def test_a_warning_names_eight_at_most() -> None:
    many = group([1], [rollout([2], reward=_NAN) for _ in range(20)])
    batch = validate_groups(
        [many, group([1], [rollout([3], reward=1.0)], "x")], LIMITS, drops_bad=True
    )
    assert len(bad_rollouts(batch)) == 20
    assert [each.rollout for each in bad_offenders(batch)] == [*range(MAX_OFFENDERS)]


@pytest.mark.parametrize("name", ["sampler_logprobs", "old_logprobs", "reference_logprobs"])
@pytest.mark.parametrize("drops_bad", [True, False])
def test_log_probs_may_be_absent_where_nothing_is_trained(name: str, drops_bad: bool) -> None:
    """NaN at a masked token is 0 there, and a rollout that trains nothing may have none at all."""
    groups = _changed(_groups(), [(0, 1)], _at(name, 1, _NAN))
    untrained = {name: None, "loss_mask": np.zeros(3, np.bool_)}
    groups = _changed(groups, [(1, 1)], lambda raw: replace(raw, **untrained))
    batch = validate_groups(groups, _ROUTED, drops_bad=drops_bad)
    assert batch.bad_rollouts is None
    column = getattr(batch, name)
    assert np.isfinite(column).all()
    assert column[4] == 0
    assert not column[12:15].any()
    assert column[3] == getattr(groups[0].rollouts[1], name)[0]


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.0},
        {"old_logprobs": np.zeros(2, np.float32)},
        {"loss_mask": np.array([2, 1, 1])},
        {"version_spans": ((1, 0),)},
    ],
)
def test_faults_of_the_call_itself_are_refused_all_the_same(change: dict[str, Any]) -> None:
    groups = _changed(_groups(), [(0, 0)], lambda raw: replace(raw, **change))
    with pytest.raises(RatoonError, match=r"groups\[0\].rollouts\[0\]"):
        validate_groups(groups, _ROUTED, drops_bad=True)


def test_a_column_that_few_have_is_no_fault_of_the_others() -> None:
    groups = _changed(_groups(), [(0, 0), (0, 1), (1, 0), (1, 1)], _lacks("old_logprobs"))
    with pytest.raises(RatoonError, match="old_logprobs: got a value, expected none"):
        validate_groups(groups, _ROUTED, drops_bad=True)
