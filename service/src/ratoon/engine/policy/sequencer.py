"""Which seqs of a policy are accepted and whose turn it is. Pure: no clock, no I/O.

Turns come in seq order, whatever the order of arrival. The turn grows by one at a time, and only
past accepted seqs, so the order of execution depends on the seqs alone.

A seq is unknown (a gap), then waiting or consumed (ended ahead of its turn), then past.
"""

from __future__ import annotations

from dataclasses import dataclass

from ratoon.engine.types import NoKey, OperationKey, RequestKey, SeqKey
from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon_proto.types import Sequencing


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The operation that a key already names."""

    operation_id: str
    payload_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The seq to run, or to skip, next."""

    seq: int
    operation_id: str
    is_consumed: bool


def check_key(key: OperationKey, sequencing: Sequencing) -> None:
    """Raises INVALID_ARGUMENT for a key of the other kind of sequencing."""
    match key, sequencing:
        case SeqKey(seq=seq), Sequencing.CLIENT:
            if seq < 1:
                raise invalid("key.seq", seq, "at least 1")
        case RequestKey(request_id=request_id), Sequencing.SERVER:
            if not request_id:
                raise invalid("key.request_id", "nothing", "the caller's own id")
        case NoKey(), _:
            raise invalid("key", "none", f"one of {sequencing} sequencing")
        case SeqKey(seq=seq), _:
            raise invalid("key.seq", seq, "a request_id: this policy has server sequencing")
        case RequestKey(request_id=request_id), _:
            raise invalid("key.request_id", request_id, "a seq: this policy has client sequencing")


def check_reuse(key: OperationKey, payload_hash: str, known: Known) -> None:
    """Raises KEY_REUSED unless a retry has the same payload."""
    if known.payload_hash == payload_hash:
        return
    field, got = ("key", "none")
    match key:
        case SeqKey(seq=seq):
            field, got = "key.seq", str(seq)
        case RequestKey(request_id=request_id):
            field, got = "key.request_id", request_id
        case NoKey():
            pass
    raise RatoonError(
        ErrorCode.KEY_REUSED,
        f"{field}: {got} was used for another payload",
        field=field,
        got=got,
        expected="a new key, or the payload it was first used with",
        details={"operation_id": known.operation_id},
    )


class Sequencer:
    """The accepted seqs of one policy from `turn` on."""

    def __init__(self, *, turn: int) -> None:
        assert turn >= 1
        self._turn = turn
        self._free = turn
        self._waiting: dict[int, str] = {}
        self._consumed: set[int] = set()

    @property
    def turn(self) -> int:
        """The seq that runs next; all lower ones are past."""
        return self._turn

    @property
    def next_free(self) -> int:
        """The lowest seq never accepted."""
        return self._free

    @property
    def highest(self) -> int:
        """The highest seq that is accepted and not past; 0: none."""
        return max(self._waiting, default=0)

    def accept(self, seq: int, operation_id: str) -> None:
        """Accept a seq, which may be far ahead, for an operation."""
        assert seq >= self._turn, f"seq {seq} is past"
        assert seq not in self._waiting, f"seq {seq} is taken"
        self._waiting[seq] = operation_id
        while self._free in self._waiting:
            self._free += 1

    def next_free_after(self, seq: int) -> int:
        """What `next_free` will be once `seq` is accepted."""
        free = self._free
        while free in self._waiting or free == seq:
            free += 1
        return free

    def consume(self, seq: int) -> None:
        """Mark an accepted operation as ended ahead of its turn, which is then skipped."""
        assert seq in self._waiting
        self._consumed.add(seq)

    def blocked_by(self, seq: int) -> int:
        """The missing seq that `seq` waits for; 0: none."""
        return self._free if self._turn <= self._free < seq else 0

    def peek(self) -> Turn | None:
        """Whose turn it is; None while that seq has not arrived."""
        if self._turn not in self._waiting:
            return None
        return Turn(
            seq=self._turn,
            operation_id=self._waiting[self._turn],
            is_consumed=self._turn in self._consumed,
        )

    def advance(self) -> None:
        """End the current turn."""
        del self._waiting[self._turn]
        self._consumed.discard(self._turn)
        self._turn += 1
