"""Turns and keys of the pure sequencer, against a sequential oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ratoon.engine.commands import REQUEST_ID, NoKey, RequestKey, SeqKey
from ratoon.engine.policy.queue import Sequencer, Turn, check_reuse
from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.types import Sequencing
from tests.engine.harness import life_record
from tests.engine.refusals import raises


class SequencerMachine(RuleBasedStateMachine):
    """Arrivals in any order, cancels, turns at any time; the oracle is a plain dict of seqs."""

    @initialize(turn=st.integers(1, 3))
    def begin(self, turn: int) -> None:
        self.sequencer = Sequencer(turn=turn)
        self.turn = turn
        self.accepted: dict[int, str] = {}
        self.cancelled: set[int] = set()
        self.executed: list[int] = []

    @rule(ahead=st.integers(0, 6))
    def arrive(self, ahead: int) -> None:
        seq = self.turn + ahead
        if seq not in self.accepted:
            expected = self.first_free({*self.accepted, seq})
            assert self.sequencer.next_free_after(seq) == expected
            self.sequencer.accept(seq, f"op{seq}")
            self.accepted[seq] = f"op{seq}"

    @precondition(lambda self: self.accepted)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.accepted)))
        if seq >= self.turn and seq not in self.cancelled:
            self.sequencer.consume(seq)
            self.cancelled.add(seq)

    @rule()
    def take_turn(self) -> None:
        turn = self.sequencer.peek()
        if turn is None:
            assert self.turn not in self.accepted
            return
        assert turn == Turn(
            seq=self.turn,
            operation_id=self.accepted[self.turn],
            is_consumed=self.turn in self.cancelled,
        )
        if not turn.is_consumed:
            self.executed.append(turn.seq)
        self.sequencer.advance()
        self.turn += 1

    @invariant()
    def agrees(self) -> None:
        free = self.first_free(set(self.accepted))
        assert self.sequencer.turn == self.turn
        assert self.sequencer.next_free == free
        ahead = [seq for seq in self.accepted if seq >= self.turn]
        assert self.sequencer.highest == max(ahead, default=0)
        for seq in self.accepted:
            if seq >= self.turn:
                assert self.sequencer.blocked_by(seq) == (free if free < seq else 0)
        assert self.executed == sorted(set(self.executed))
        assert self.cancelled.isdisjoint(self.executed)

    def first_free(self, accepted: set[int]) -> int:
        seq = self.turn
        while seq in accepted:
            seq += 1
        return seq


TestSequencerMachine = SequencerMachine.TestCase
TestSequencerMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize(
    ("key", "sequencing", "field", "expected"),
    [
        (SeqKey(seq=1), Sequencing.SERVER, "key.seq", "a request_id: sequencing is server"),
        (SeqKey(seq=0), Sequencing.CLIENT, "key.seq", "at least 1"),
        (
            RequestKey(request_id="a"),
            Sequencing.CLIENT,
            "key.request_id",
            "a seq: sequencing is client",
        ),
        (
            RequestKey(request_id=""),
            Sequencing.SERVER,
            "key.request_id",
            f"text of the form {REQUEST_ID.pattern}",
        ),
        (NoKey(), Sequencing.CLIENT, "key.seq", "a seq: the policy's sequencing is client"),
        (
            NoKey(),
            Sequencing.SERVER,
            "key.request_id",
            "a request_id: the policy's sequencing is server",
        ),
    ],
)
def test_a_key_that_the_sequencing_does_not_take_is_refused(
    key: SeqKey | RequestKey | NoKey, sequencing: Sequencing, field: str, expected: str
) -> None:
    with pytest.raises(RatoonError) as caught:
        key.check(sequencing)
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_ARGUMENT, field)
    assert caught.value.expected == expected


def test_only_the_same_payload_may_reuse_a_key() -> None:
    known = replace(life_record("p", "p.1"), payload_hash="aa")
    check_reuse(SeqKey(seq=4), "aa", known)
    with raises(ErrorCode.KEY_REUSED) as caught:
        check_reuse(SeqKey(seq=4), "bb", known)
    assert (caught.value.field, caught.value.got) == ("key.seq", "4")
