"""Sampling masks: what is taken of them, what is refused, and what they split in a forest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ratoon.errors import ErrorCode, RatoonError
from ratoon.rollout.bad import bad_rollouts
from ratoon.rollout.forest import build_forest, pack
from ratoon.rollout.prefixes import sort_sequences
from ratoon.rollout.raw import RawRollout, RawSamplingMask
from ratoon.rollout.sampling_masks import is_unmasked, outside_masks
from ratoon.rollout.serial import batch_from_bytes, batch_to_bytes
from ratoon.rollout.validate import validate_groups
from ratoon_proto.types import BadRolloutReason
from tests.builders import group, limits, rollout

LIMITS = limits(vocab_size=100)


def _mask(
    rows: Sequence[Sequence[int]],
    *,
    untrain_outside: bool = False,
    lengths: Sequence[int] | None = None,
) -> RawSamplingMask:
    return RawSamplingMask(
        token_ids=np.array([token for row in rows for token in row], np.int32),
        lengths=np.array([len(row) for row in rows] if lengths is None else lengths),
        untrain_outside=untrain_outside,
    )


def _masked(
    response: Any, rows: Sequence[Sequence[int]], *, untrain_outside: bool = False, **changes: Any
) -> RawRollout:
    return rollout(response, sampling_mask=_mask(rows, untrain_outside=untrain_outside), **changes)


def test_masks_are_kept_as_sets_of_trained_tokens() -> None:
    members = [
        _masked([2, 3], [[7, 2], [3]]),
        rollout([4]),
        _masked([([5], False), ([6, 8], True)], [[1], [9, 6, 0], [8, 99]]),
        _masked([2, 3], [[2, 5], [3, 4]], loss_mask=np.array([False, True])),
    ]
    batch = validate_groups([group([1], members)], LIMITS)
    assert batch.sampling_mask is not None
    assert batch.mask_offsets is not None
    assert batch.outside_mask is None
    kept = np.split(batch.sampling_mask, batch.mask_offsets[1:-1])
    expected = [[2, 7], [3], [], [], [0, 6, 9], [8, 99], [], [3, 4]]
    assert [ids.tolist() for ids in kept] == expected
    assert batch.sampling_mask.dtype == np.int32


@pytest.mark.parametrize(
    "members",
    [
        [rollout([2])],
        [_masked([2], [[2, 3]], loss_mask=np.array([False])), rollout([3])],
        [_masked([], []), rollout([3])],
    ],
)
def test_a_batch_without_masks_of_trained_tokens_has_none(members: list[RawRollout]) -> None:
    batch = validate_groups([group([1], members)], LIMITS)
    assert (batch.sampling_mask, batch.mask_offsets, batch.outside_mask) == (None, None, None)
    plain = [replace(member, sampling_mask=None) for member in members]
    assert batch_to_bytes(batch) == batch_to_bytes(validate_groups([group([1], plain)], LIMITS))


@pytest.mark.parametrize(
    ("mask", "field", "got", "expected"),
    [
        (_mask([[2], [3]]), ".lengths", "2 values", "3 values"),
        (_mask([[2], [3], [5], [6]]), ".lengths", "4 values", "3 values"),
        (_mask([[2], [3], [4, 100]]), "[2]", "100", "token ids in [0, 100)"),
        (_mask([[2], [-1, 3], [4]]), "[1]", "-1", "token ids in [0, 100)"),
        (_mask([[2], [3], [4, 7, 4]]), "[2]", "4 twice", "each id once"),
        (_mask([[2], [9, 9, 3], [4]]), "[1]", "9 twice", "each id once"),
        (_mask([[5, 6], [3], [4]]), "[0]", "2 ids without it", "ids with 2, which was sampled"),
        (_mask([[2], [], [4]]), "[1]", "no ids", "ids with 3, which was sampled"),
        (
            _mask([[2], [3], [4]], lengths=[1, 3, -1]),
            ".lengths[2]",
            "-1",
            "an integer in [0, 100]",
        ),
        (
            _mask([[2], [3], [4]], lengths=[1, 2**62, 2**62]),
            ".lengths[1]",
            str(2**62),
            "an integer in [0, 100]",
        ),
        (
            _mask([[2], [3], [4]], lengths=[1, 1, 2]),
            ".token_ids",
            "3 ids",
            "4, the sum of lengths",
        ),
        (
            _mask([[2], [3], [4]], lengths=[1, 1, 0]),
            ".token_ids",
            "3 ids",
            "2, the sum of lengths",
        ),
    ],
)
def test_masks_that_no_sampler_could_have_are_refused(
    mask: RawSamplingMask, field: str, got: str, expected: str
) -> None:
    bad = rollout([2, 3, 4], sampling_mask=mask)
    with pytest.raises(RatoonError) as caught:
        validate_groups([group([1], [_masked([2], [[2, 3]]), bad])], LIMITS)
    assert caught.value.code == ErrorCode.INVALID_ARGUMENT
    assert caught.value.field == f"groups[0].rollouts[1].sampling_mask{field}"
    assert caught.value.got == got
    assert caught.value.expected == expected


def test_more_kept_tokens_than_a_batch_may_have_are_refused() -> None:
    validate_groups([group([1], [_masked([2], [[2, 7]])])], replace(LIMITS, max_tokens=2))
    more = [group([1], [_masked([2], [[2, 7, 8]])])]
    with pytest.raises(RatoonError, match="3 tokens in sampling masks, expected at most") as caught:
        validate_groups(more, replace(LIMITS, max_tokens=2))
    assert caught.value.code == ErrorCode.BODY_TOO_LARGE


def test_tokens_outside_of_their_mask_are_not_trained_where_asked() -> None:
    rows = [[2, 9], [8], [4]]
    members = [
        _masked([2, 3, 4], rows, untrain_outside=True),
        _masked([([3], False), ([4], True)], [[9], [4]], untrain_outside=True),
        _masked([5, 6], [[7], [8]], untrain_outside=True),
    ]
    batch = validate_groups([group([1], members)], LIMITS)
    assert batch.loss_mask.tolist() == [True, False, True, False, True, False, False]
    assert batch.outside_mask is not None
    assert batch.outside_mask.tolist() == [False, True, False, False, False, True, True]
    assert batch.mask_offsets is not None
    assert np.diff(batch.mask_offsets).tolist() == [2, 0, 1, 0, 1, 0, 0]
    num_S, first_S = outside_masks(batch)
    assert num_S.tolist() == [1, 0, 2]
    assert first_S.tolist() == [1, -1, 0]
    refused = replace(members[0], sampling_mask=_mask(rows))
    with pytest.raises(RatoonError, match=r"rollouts\[1\]\.sampling_mask\[1\]: got 1 ids"):
        validate_groups([group([1], [rollout([2]), refused])], LIMITS)
    # Where there are no ids, nothing says that the token is outside.
    empty = _masked([2, 3], [[2], []], untrain_outside=True)
    with pytest.raises(RatoonError, match=r"sampling_mask\[1\]: got no ids"):
        validate_groups([group([1], [empty])], LIMITS)


def test_rollouts_with_bad_masks_are_dropped_where_asked() -> None:
    good = [_masked([2, 3], [[2, 7], [3]]), _masked([6], [[7]], untrain_outside=True)]
    bad = [
        _masked([2, 3], [[2, 100], [3]]),
        _masked([2, 3], [[2], [3, 3]]),
        _masked([2, 3], [[4], [3]]),
        _masked([2, 300], [[2], [3]]),
    ]
    members = [bad[0], good[0], bad[1], bad[2], good[1], bad[3]]
    batch = validate_groups([group([1], members)], LIMITS, drops_bad=True)
    alone = validate_groups([group([1], good)], LIMITS)
    assert batch.sampling_mask is not None
    for name in ("sampling_mask", "mask_offsets", "outside_mask", "loss_mask"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(alone, name))
    masks, token = BadRolloutReason.SAMPLING_MASK, BadRolloutReason.TOKEN
    found = [(each.rollout, each.reason, each.token) for each in bad_rollouts(batch)]
    assert found == [(0, masks, 0), (2, masks, 1), (3, masks, 0), (5, token, 1)]
    only = validate_groups([group([1], [*bad, rollout([2])])], LIMITS, drops_bad=True)
    assert (only.sampling_mask, only.mask_offsets, only.outside_mask) == (None, None, None)


def test_a_rollout_that_was_cut_says_what_was_kept_or_is_unmasked() -> None:
    members = [
        _masked([2, 3], [[2, 7], [3]], top_p=0.9),
        rollout([2, 3], top_k=5),
        rollout([2, 3]),
        rollout([], top_p=0.5),
        _masked([([5], False), ([6], True)], [[], [6]], top_k=2),
    ]
    batch = validate_groups([group([1], members)], LIMITS)
    assert is_unmasked(batch).tolist() == [False, True, False, False, False]
    plain = validate_groups([group([1], [rollout([2], top_p=0.5), rollout([3])])], LIMITS)
    assert is_unmasked(plain).tolist() == [True, False]


def test_masks_come_back_whole_or_are_refused() -> None:
    members = [_masked([2, 3], [[2, 7], [5]], untrain_outside=True), rollout([4])]
    batch = validate_groups([group([1], members)], LIMITS)
    data = batch_to_bytes(batch)
    back = batch_from_bytes(data)
    for name in ("sampling_mask", "mask_offsets", "outside_mask"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(back, name))
    assert batch.sampling_mask is not None
    others: list[dict[str, Any]] = [
        {"sampling_mask": None},
        {"mask_offsets": None},
        {"sampling_mask": batch.sampling_mask[:1]},
        {"mask_offsets": np.array([0, 2, 1, 2])},
        {"outside_mask": np.zeros(2, np.bool_)},
    ]
    for changes in others:
        with pytest.raises(RatoonError) as caught:
            batch_from_bytes(batch_to_bytes(replace(batch, **changes)))
        assert caught.value.code == ErrorCode.MALFORMED_BODY
    changed = replace(batch, sampling_mask=batch.sampling_mask + 1)
    assert batch_to_bytes(changed) != data


def test_a_packed_token_is_a_target_for_each_of_its_masks() -> None:
    """And a row predicts all tokens of one mask."""
    rows: list[tuple[list[int], list[list[int]] | None]] = [
        ([2, 3], [[2, 4], [3]]),
        ([2, 3], [[2, 4], [3, 9]]),
        ([4, 3], [[2, 4], [3]]),
        ([2, 3], None),
        ([2, 3], [[2, 5], [3]]),
        ([2, 3], [[2, 4], [3]]),
    ]
    members = [rollout(r) if mask is None else _masked(r, mask) for r, mask in rows]
    batch = validate_groups([group([1], members)], LIMITS)
    forest = build_forest(batch, sort_sequences(batch), None)
    packed = pack(batch, forest, batch.loss_mask)
    assert forest.num_tokens == 5
    assert packed.kept is not None
    kept = np.split(packed.kept.tokens, packed.kept.offsets[1:-1])
    row_of_term = packed.target_row[packed.term_target]
    for term, (row, target) in enumerate(zip(row_of_term, packed.term_target, strict=True)):
        tokens, mask = rows[packed.term_sequence[term]]
        assert packed.target_token[target] == tokens[term % 2]
        assert kept[row].tolist() == (mask[term % 2] if mask else [])
    # The prompt's token predicts under three masks; under one of them two targets.
    assert packed.row_index[row_of_term[::2]].tolist() == [0] * 6
    assert len({*row_of_term[::2].tolist()}) == 3
    assert len({*packed.term_target[::2].tolist()}) == 4
    assert packed.term_target[0] == packed.term_target[10]
    assert (np.diff(packed.row_index) >= 0).all()
    assert len(packed.row_temperature) == len(packed.row_index)


def test_masks_that_agree_change_nothing_of_what_is_packed() -> None:
    responses = ([2, 3], [2, 4])
    kept: Sequence[Sequence[Sequence[int]]] = ([[2, 4], [3, 4]], [[4, 2], [4, 3]])
    members = [_masked(*each) for each in zip(responses, kept, strict=True)]
    batch = validate_groups([group([1], members)], LIMITS)
    plain = replace(batch, sampling_mask=None, mask_offsets=None)
    forest = build_forest(batch, sort_sequences(batch), None)
    one, two = (pack(each, forest, batch.loss_mask) for each in (batch, plain))
    for name in ("row_index", "target_token", "target_row", "term_target", "term_token"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    assert one.kept is not None
    assert two.kept is None
