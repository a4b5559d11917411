"""The open window: what is in it, what it lets through, in what words it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratoon.engine.policy.queue import Window
from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.types import OperationKind
from tests.engine.harness import life_record
from tests.engine.refusals import raises

_GRADIENTS = life_record("p", "p.gradients", OperationKind.FORWARD_BACKWARD)
# (seq, outcome) of ForwardBackwards in a row; a cancelled one is not recorded at all.
events = st.lists(st.sampled_from(["applied", "failed", "cancelled"]), max_size=6)


def window_of(outcomes: list[str]) -> Window:
    window = Window()
    for seq, outcome in enumerate(outcomes, start=1):
        if outcome == "applied":
            window = window.with_applied(replace(_GRADIENTS, seq=seq))
        elif outcome == "failed":
            window = window.with_failed(seq)
    return window


@given(events)
def test_a_step_on_the_whole_window_needs_one_applied_and_none_failed(outcomes: list[str]) -> None:
    applied = tuple(i for i, outcome in enumerate(outcomes, start=1) if outcome == "applied")
    window = window_of(outcomes)
    if "failed" in outcomes:
        with raises(ErrorCode.WINDOW_POISONED) as caught:
            window.select(())
        assert caught.value.details["failed_seq"] == str(outcomes.index("failed") + 1)
    elif not applied:
        with raises(ErrorCode.WINDOW_EMPTY):
            window.select(())
    else:
        assert window.select(()) == applied


@given(events, st.sets(st.integers(1, 6), min_size=1))
def test_a_step_on_listed_operations_needs_each_of_them_applied(
    outcomes: list[str], listed: set[int]
) -> None:
    states = dict(enumerate(outcomes, start=1))
    window = window_of(outcomes)
    include = tuple(sorted(listed, reverse=True))
    if all(states.get(seq) == "applied" for seq in listed):
        assert window.select(include) == tuple(sorted(listed))
        return
    first_bad = next(seq for seq in include if states.get(seq) != "applied")
    with pytest.raises(RatoonError) as caught:
        window.select(include)
    poisoned = states.get(first_bad) == "failed"
    expected = ErrorCode.WINDOW_POISONED if poisoned else ErrorCode.INVALID_ARGUMENT
    assert caught.value.code is expected


@given(events)
def test_an_update_needs_a_window_without_entries(outcomes: list[str]) -> None:
    window = window_of(outcomes)
    if set(outcomes) <= {"cancelled"}:
        window.check_closed()
        return
    with raises(ErrorCode.WINDOW_OPEN):
        window.check_closed()


def test_a_listed_seq_twice_is_refused() -> None:
    with pytest.raises(RatoonError) as caught:
        window_of(["applied"]).select((1, 1))
    assert caught.value.field == "include_seqs"


def test_the_records_of_what_was_applied_are_kept() -> None:
    window = window_of(["applied", "failed", "cancelled", "applied"])
    assert {seq: record.seq for seq, record in window.records.items()} == {1: 1, 4: 4}
    assert (window.applied, window.failed) == ((1, 4), (2,))


def test_replay_begins_at_the_first_entry_or_after_the_checkpoint() -> None:
    assert window_of(["cancelled", "failed", "applied"]).replay_from(9) == 2
    assert Window().replay_from(9) == 10
