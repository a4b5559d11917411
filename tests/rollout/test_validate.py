"""`validate_groups`: every fault is named by field and index; what passes is what was sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ratoon.errors import ErrorCode, RatoonError
from ratoon.rollout.raw import RawGroup, RawRollout, SamplerLogprobsKind
from ratoon.rollout.routes import RouteSizes
from ratoon.rollout.validate import BatchLimits, validate_groups
from tests.builders import group, limits, random_groups, rollout

LIMITS = limits(vocab_size=100, max_sequence_tokens=20)

_F32 = np.float32
_PER_TOKEN = (
    "sampler_logprobs",
    "old_logprobs",
    "reference_logprobs",
    "advantages",
    "token_weights",
)


def _refused(
    groups: Sequence[RawGroup],
    code: ErrorCode = ErrorCode.INVALID_ARGUMENT,
    with_limits: BatchLimits = LIMITS,
) -> RatoonError:
    with pytest.raises(RatoonError) as caught:
        validate_groups(groups, with_limits)
    assert caught.value.code == code
    assert caught.value.message.startswith(caught.value.field + ":")
    return caught.value


def _two_groups(**changes: Any) -> list[RawGroup]:
    """Two groups of two rollouts of 3 tokens; `changes` are made to the last rollout."""
    full: dict[str, Any] = {
        "sampler_logprobs": np.full(3, -1.0, _F32),
        "old_logprobs": np.full(3, -2.0, _F32),
        "reference_logprobs": np.full(3, -3.0, _F32),
        "token_weights": np.full(3, 0.5, _F32),
        "advantages": np.full(3, 1.5, _F32),
    }
    plain = rollout([1, 2, 3], **full)
    return [
        group([7, 8], [plain, plain], "a"),
        group([7, 9], [plain, replace(plain, **changes)], "b"),
    ]


def test_what_passes_is_what_was_sent() -> None:
    rng = np.random.default_rng(11)
    groups = random_groups(rng, num_groups=8, outcome="advantages", policy_version=3)
    batch = validate_groups(groups, limits(vocab_size=64))
    s = 0
    for g, sent in enumerate(groups):
        assert batch.group_ids[g] == sent.group_id
        assert batch.group_offsets[g] == s
        for raw in sent.rollouts:
            start, stop = batch.response_offsets[s : s + 2]
            response = [token for segment in raw.segments for token in segment.tokens.tolist()]
            trained = [segment.trained for segment in raw.segments for _ in segment.tokens]
            assert batch.sequence_tokens(s).tolist() == [*sent.prompt.tolist(), *response]
            mask = trained if raw.loss_mask is None else raw.loss_mask.tolist()
            assert batch.loss_mask[start:stop].tolist() == mask
            for name in _PER_TOKEN[:4]:
                column = getattr(batch, name)
                np.testing.assert_array_equal(column[start:stop], getattr(raw, name))
            assert batch.temperature[s] == _F32(raw.temperature)
            assert batch.policy_version[s] == 3
            s += 1
    assert s == batch.num_sequences
    assert batch.rewards is None
    assert batch.token_weights is None


def test_what_was_left_out_is_off() -> None:
    batch = validate_groups([group([1], [rollout([2])])], LIMITS)
    assert batch.policy_version.tolist() == [-1]
    assert batch.top_p.tolist() == [1.0]
    assert batch.top_k.tolist() == [0]
    assert batch.truncated.tolist() == [False]
    for name in (*_PER_TOKEN, "rewards"):
        assert getattr(batch, name) is None


def test_sampling_settings_are_recorded() -> None:
    members = [
        rollout([2], temperature=0.5, top_p=0.9, top_k=40, policy_version=7, truncated=True),
        rollout([2]),
    ]
    batch = validate_groups([group([1], members)], LIMITS)
    assert batch.temperature.tolist() == [0.5, 1.0]
    assert batch.top_p.tolist() == [_F32(0.9), 1.0]
    assert batch.top_k.tolist() == [40, 0]
    assert batch.policy_version.tolist() == [7, -1]
    assert batch.truncated.tolist() == [True, False]


@pytest.mark.parametrize(
    ("groups", "field"),
    [
        ([], "groups"),
        ([group([1], [rollout([2])], "")], "groups[0].group_id"),
        ([group([1], [rollout([2])], "\ud800")], "groups[0].group_id"),
        (
            [group([1], [rollout([2])], "a"), group([2], [rollout([2])], "a")],
            "groups[1].group_id",
        ),
        ([group([1], [rollout([2])], "a"), group([1], [], "b")], "groups[1].rollouts"),
        ([group([1], [rollout([]), rollout([])])], "groups"),
        ([group([1], [rollout([2], loss_mask=np.zeros(1, np.bool_))])], "groups"),
        ([group([1], [rollout([([2], False)])])], "groups"),
        ([group([], [rollout([2, 3])])], "groups[0].rollouts[0].loss_mask[0]"),
        (
            [group([], [rollout([]), rollout([([], True), ([2], True)])])],
            "groups[0].rollouts[1].loss_mask[0]",
        ),
        ([group([1] * 10, [rollout([2] * 10), rollout([2] * 11)])], "groups[0].rollouts[1]"),
        ([group([1] * 21, [rollout([])])], "groups[0].rollouts[0]"),
    ],
)
def test_a_fault_of_form_is_named(groups: list[RawGroup], field: str) -> None:
    assert _refused(groups).field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": 1e-60}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"policy_version": -1}, "policy_version"),
        ({"policy_version": 2**63}, "policy_version"),
        ({"reward": 1.0}, "advantages"),
        ({"reward": 1.0, "advantages": None}, "advantages"),
        (
            {"temperature": 0.5, "sampler_logprobs_kind": SamplerLogprobsKind.UNSPECIFIED},
            "sampler_logprobs_kind",
        ),
        ({"loss_mask": np.ones(2, np.bool_)}, "loss_mask"),
        ({"loss_mask": np.ones((3, 1), np.bool_)}, "loss_mask"),
        ({"loss_mask": np.ones(3, _F32)}, "loss_mask"),
        ({"loss_mask": np.array([1, 0, 2])}, "loss_mask[2]"),
    ],
)
def test_a_fault_of_one_rollout_is_named(changes: dict[str, Any], field: str) -> None:
    assert _refused(_two_groups(**changes)).field == f"groups[1].rollouts[1].{field}"


@pytest.mark.parametrize("name", _PER_TOKEN)
@pytest.mark.parametrize(
    ("value", "where"),
    [
        (None, ""),
        (np.full(2, -1.0, _F32), ""),
        (np.full(4, -1.0, _F32), ""),
        (np.empty(0, _F32), ""),
        (np.full((1, 3), -1.0, _F32), ""),
        (np.full(3, -1.0, np.float16), ""),
        (np.full(3, -1), ""),
        (np.array([-1, np.nan, -1], _F32), "[1]"),
        (np.array([-1, -1, -np.inf], _F32), "[2]"),
        (np.array([-1e300, -1, -1]), "[0]"),
    ],
)
def test_a_fault_of_a_column_is_named(name: str, value: Any, where: str) -> None:
    error = _refused(_two_groups(**{name: value}))
    assert error.field == f"groups[1].rollouts[1].{name}{where}"


@pytest.mark.parametrize("name", _PER_TOKEN)
def test_a_column_that_only_one_rollout_has_is_named(name: str) -> None:
    others: dict[str, Any] = dict.fromkeys(_PER_TOKEN)
    groups = _two_groups(**others | {name: np.full(3, -1.0, _F32)})
    bare = replace(groups[0].rollouts[0], **others)
    groups[0] = replace(groups[0], rollouts=(bare, bare))
    groups[1] = replace(groups[1], rollouts=(bare, groups[1].rollouts[1]))
    error = _refused(groups)
    assert error.field == f"groups[1].rollouts[1].{name}"
    assert error.expected == "none, as in groups[0].rollouts[0]"


def test_lengths_are_told_as_in_the_documentation() -> None:
    error = _refused(_two_groups(old_logprobs=np.full(2, -1.0, _F32)))
    assert error.message == "groups[1].rollouts[1].old_logprobs: 2 values for 3 response tokens"


@pytest.mark.parametrize("name", _PER_TOKEN[:3])
def test_a_log_probability_above_zero_is_named(name: str) -> None:
    over = np.array([-1.0, -1.0, 0.01], _F32)
    assert _refused(_two_groups(**{name: over})).field == f"groups[1].rollouts[1].{name}[2]"
    untrained = np.array([True, True, False])
    validate_groups(_two_groups(**{name: over}, loss_mask=untrained), LIMITS)
    validate_groups(_two_groups(**{name: np.array([0, 5e-4, -1], _F32)}), LIMITS)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_not_finite_is_named(reward: float) -> None:
    groups = [group([1], [rollout([2], reward=0.0), rollout([3], reward=reward)])]
    assert _refused(groups).field == "groups[0].rollouts[1].reward"


def test_rewards_are_for_all_or_none() -> None:
    with_reward, without = rollout([2], reward=0.0), rollout([3])
    error = _refused([group([1], [with_reward, with_reward, without])])
    assert (error.field, error.got) == ("groups[0].rollouts[2].reward", "none")
    error = _refused([group([1], [without, with_reward])])
    assert (error.field, error.got) == ("groups[0].rollouts[0].reward", "none")
    error = _refused([group([1], [without, with_reward, without])])
    assert (error.field, error.got) == ("groups[0].rollouts[1].reward", "a value")


def test_rewards_and_advantages_do_not_mix_across_a_batch() -> None:
    rewarded, ready = rollout([2], reward=0.0), rollout([3], advantages=np.ones(1, _F32))
    assert _refused([group([1], [rewarded, ready])]).field == "groups[0].rollouts[1].advantages"
    assert _refused([group([1], [ready, rewarded])]).field == "groups[0].rollouts[1].advantages"
    # A rollout without tokens has no advantages to give, and no reward either.
    empty = rollout([], reward=1.0)
    assert _refused([group([1], [ready, empty])]).field == "groups[0].rollouts[1].reward"


@pytest.mark.parametrize("token", [-1, 100, 2**31, 2**40, -(2**40)])
def test_a_token_outside_of_the_vocabulary_is_named(token: int) -> None:
    bad = np.array([5, token])
    fine = rollout([5, 6])
    prompt = replace(group([1], [fine], "b"), prompt=bad)
    assert _refused([group([1], [fine], "a"), prompt]).field == "groups[1].prompt[1]"
    response = _with_tokens([(bad, True)])
    assert _refused([group([1], [fine, response])]).field == "groups[0].rollouts[1].response[1]"
    turns = _with_tokens([(np.array([1, 2]), True), (np.array([], np.int64), True), (bad, False)])
    error = _refused([group([1], [fine, turns])])
    assert error.field == "groups[0].rollouts[1].segments[2].tokens[1]"
    assert error.got == str(token)


def test_a_token_that_stands_for_an_image_is_named_with_its_field() -> None:
    """A rollout with images would be trained as if they were one embedding."""
    text = limits(vocab_size=100, media_tokens={"image_token_id": 50, "video_token_id": 51})
    fine = rollout([5, 6])
    validate_groups([group([1], [fine])], text)
    for bad, field, name in (
        (group([1, 50], [fine]), "groups[0].prompt[1]", "image_token_id"),
        (group([1], [fine, rollout([5, 51])]), "groups[0].rollouts[1].response[1]", "video_token"),
    ):
        with pytest.raises(RatoonError) as caught:
            validate_groups([bad], text)
        assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_ARGUMENT, field)
        assert name in caught.value.got


def test_a_token_beyond_int64_is_named() -> None:
    huge = _with_tokens([(np.array([3, 2**64 - 1], np.uint64), True)])
    error = _refused([group([1], [rollout([5]), huge])])
    assert error.field == "groups[0].rollouts[1].response[1]"


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint32, np.int64, np.uint64])
def test_every_integer_dtype_is_read(dtype: type[np.integer]) -> None:
    members = [_with_tokens([(np.array([5, 6], dtype), True)]), rollout([7])]
    batch = validate_groups([group([1], members)], LIMITS)
    assert batch.response_tokens.tolist() == [5, 6, 7]
    assert batch.response_tokens.dtype == np.int32


def _with_tokens(segments: Sequence[tuple[np.ndarray, bool]]) -> RawRollout:
    """A rollout whose tokens keep their dtype."""
    raw = rollout([([0], trained) for _, trained in segments])
    return replace(
        raw,
        segments=tuple(
            replace(segment, tokens=tokens)
            for segment, (tokens, _) in zip(raw.segments, segments, strict=True)
        ),
    )


@pytest.mark.parametrize(
    "tokens", [np.zeros((1, 2), np.int32), np.zeros(2, _F32), np.zeros((), np.int32)]
)
def test_tokens_of_another_form_are_named(tokens: np.ndarray) -> None:
    fine = rollout([5])
    bad_prompt = replace(group([1], [fine]), prompt=tokens)
    assert _refused([bad_prompt]).field == "groups[0].prompt"
    turns = _with_tokens([(np.array([1]), False), (tokens, True)])
    error = _refused([group([1], [fine, turns])])
    assert error.field == "groups[0].rollouts[1].segments[1].tokens"


def test_a_mask_that_trains_context_is_named() -> None:
    turns = [([1], True), ([2, 3], False), ([4], True)]
    good = rollout(turns, loss_mask=np.array([1, 0, 0, 0]))
    bad = rollout(turns, loss_mask=np.array([1, 0, 1, 1]))
    error = _refused([group([9], [good, bad])])
    assert error.field == "groups[0].rollouts[1].loss_mask[2]"
    assert "groups[0].rollouts[1].segments[1].tokens is context" in error.expected
    batch = validate_groups([group([9], [good])], LIMITS)
    assert batch.loss_mask.tolist() == [True, False, False, False]


@pytest.mark.parametrize(
    ("change", "got"),
    [
        ({"max_groups": 1}, "2 groups"),
        ({"max_sequences": 3}, "4 rollouts"),
        ({"max_tokens": 15}, "16 tokens"),
    ],
)
def test_a_batch_over_a_limit_is_too_large(change: dict[str, int], got: str) -> None:
    groups = _two_groups()
    error = _refused(groups, ErrorCode.BODY_TOO_LARGE, replace(LIMITS, **change))
    assert (error.field, error.got) == ("groups", got)
    enough = {name: value + 1 for name, value in change.items()}
    assert validate_groups(groups, replace(LIMITS, **enough)).num_sequences == 4


def test_a_batch_at_its_sequence_length_passes() -> None:
    batch = validate_groups([group([1] * 10, [rollout([2] * 10)])], LIMITS)
    assert len(batch.sequence_tokens(0)) == LIMITS.max_sequence_tokens


def test_a_sequence_that_is_too_long_for_a_window_says_so() -> None:
    groups = [group([1] * 10, [rollout([2] * 11)])]
    for window, is_why in ((20, True), (0, False), (30, False)):
        limits = replace(LIMITS, sliding_window=window)
        error = _refused(groups, ErrorCode.INVALID_ARGUMENT, limits)
        assert error.field == "groups[0].rollouts[0]"
        assert " which the model takes" in error.message
        assert ("sliding window" in error.message) == is_why


def test_a_rollout_without_tokens_may_leave_columns_out() -> None:
    batch = validate_groups(
        [
            group(
                [1],
                [
                    rollout([], reward=0.0),
                    rollout([2], reward=1.0, old_logprobs=np.array([-0.5], _F32)),
                    rollout([], reward=2.0, old_logprobs=np.empty(0, _F32)),
                ],
            )
        ],
        LIMITS,
    )
    assert batch.old_logprobs is not None
    assert batch.old_logprobs.tolist() == [-0.5]
    assert batch.response_offsets.tolist() == [0, 0, 1, 1]


def test_an_empty_sequence_trains_no_token_of_the_next_one() -> None:
    batch = validate_groups(
        [
            group([], [rollout([])], "a"),
            group([1], [rollout([2])], "b"),
            group([], [rollout([])], "c"),
        ],
        LIMITS,
    )
    assert batch.loss_mask.tolist() == [True]


def test_raw_log_probs_are_raw_only_where_the_temperature_says_so() -> None:
    """Before or after a division by 1 is the same."""
    logprobs = np.array([-1.0], _F32)
    kinds = [
        (SamplerLogprobsKind.RAW, 0.5),
        (SamplerLogprobsKind.RAW, 1.0),
        (SamplerLogprobsKind.PROCESSED, 0.5),
        (SamplerLogprobsKind.UNSPECIFIED, 1.0),
    ]
    members = [
        rollout([2], sampler_logprobs=logprobs, sampler_logprobs_kind=kind, temperature=t)
        for kind, t in kinds
    ]
    batch = validate_groups([group([1], members)], LIMITS)
    assert batch.sampler_is_raw.tolist() == [True, False, False, False]


@pytest.mark.parametrize("column", [2, 3])
def test_nothing_is_changed_in_what_was_sent(column: int) -> None:
    groups = _two_groups()
    before = getattr(groups[0].rollouts[0], _PER_TOKEN[column]).copy()
    batch = validate_groups(groups, LIMITS)
    getattr(batch, _PER_TOKEN[column])[:] = 9
    np.testing.assert_array_equal(getattr(groups[0].rollouts[0], _PER_TOKEN[column]), before)


ROUTED = replace(LIMITS, routes=RouteSizes(layers=2, num_experts=4, experts_per_token=2))
_ROUTES = np.array([[[3, 0], [1, 2]], [[0, 1], [2, 3]], [[1, 0], [3, 2]]], np.uint8)


def test_routes_are_kept_as_sets_of_the_tokens_that_have_some() -> None:
    members = [
        rollout([2, 3, 4], routed_experts=_ROUTES),
        rollout([2]),
        rollout([2, 3], routed_experts=_ROUTES[:2].astype(np.uint16), routed_experts_start=1),
    ]
    batch = validate_groups([group([1], members)], ROUTED)
    assert batch.routed_experts is not None
    assert batch.route_first is not None
    assert batch.route_offsets is not None
    assert batch.routed_experts.dtype == np.uint8
    ascending = np.sort(_ROUTES, axis=2)
    np.testing.assert_array_equal(batch.routed_experts, np.concatenate([ascending, ascending[:2]]))
    assert batch.route_first.tolist() == [0, 0, 1]
    assert batch.route_offsets.tolist() == [0, 3, 3, 5]
    assert validate_groups([group([1], [rollout([2])])], ROUTED).routed_experts is None


def _routes_with(place: tuple[int, ...], value: int) -> NDArray[np.uint8]:
    routes = _ROUTES.copy()
    routes[place] = value
    return routes


@pytest.mark.parametrize(
    ("routes", "start", "field", "got", "expected"),
    [
        (_ROUTES, 2, "_start", "2 + 3 rows = 5", "at most 4"),
        (_ROUTES, -1, "_start", "-1 + 3 rows = 2", "at most 4"),
        (None, 1, "_start", "1", "0: there is no routed_experts"),
        (_ROUTES[:, :1], 0, ".shape", "[3, 1, 2]", "2 layers with experts"),
        (_ROUTES[:, :, :1], 0, ".shape", "[3, 2, 1]", "2 experts per token"),
        (_ROUTES[0], 0, ".shape", "[2, 2]", "[tokens,"),
        (_ROUTES.astype(np.int32), 0, ".dtype", "int32", "uint8 or uint16"),
        (_routes_with((2, 1, 0), 4), 0, "[2][1][0]", "4", "[0, 4)"),
        (_routes_with((1, 0, 0), 1), 0, "[1][0]", "[1, 1]", "each expert once"),
    ],
)
def test_routes_that_no_router_could_take_are_refused(
    routes: NDArray[Any] | None, start: int, field: str, got: str, expected: str
) -> None:
    bad = rollout([2, 3, 4], routed_experts=routes, routed_experts_start=start)
    with pytest.raises(RatoonError) as caught:
        validate_groups([group([1], [rollout([2]), bad])], ROUTED)
    assert caught.value.code == ErrorCode.INVALID_ARGUMENT
    assert caught.value.field == f"groups[0].rollouts[1].routed_experts{field}"
    assert caught.value.got == got
    assert expected in (caught.value.expected or "")


def test_a_dense_policy_takes_no_routes() -> None:
    with pytest.raises(RatoonError, match="the policy has no experts"):
        validate_groups([group([1], [rollout([2], routed_experts=_ROUTES[:1])])], LIMITS)
