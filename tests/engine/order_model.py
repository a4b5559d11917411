"""What a policy's calls must come to: a sequential oracle that runs them in seq order, one by one.

Enter calls in any order of arrival, leaves the state of each and the weights. Invariant: a call is
decided by the calls with lower seqs alone, never by when it arrived or by what crashed meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ratoon.engine.commands import Command
from ratoon.errors import ErrorCode
from tests.engine.harness import (
    DISCARD,
    RATE,
    forward_backward,
    import_weights,
    optim_step,
    update,
)

KINDS = (
    "update",
    "forward_backward",
    "forward_backward",
    "optim_step",
    "loose_step",
    "discard",
    "import",
)


@dataclass(slots=True)
class Call:
    """One operation. `number` names its batch; `end` "": not ended, else done, cancelled or a code.

    `is_held`: it stays at the worker until it is let go or cancelled.
    """

    seq: int
    kind: str
    number: float
    breaks: bool
    is_held: bool
    operation_id: str = ""
    end: str = ""

    @property
    def command(self) -> Command:
        match self.kind:
            case "update":
                return update(self.number)
            case "forward_backward":
                return forward_backward(self.number)
            case "optim_step":
                return optim_step()
            case "loose_step":
                return optim_step(allow_empty=True, discard_on_poison=True)
            case "import":
                return import_weights(self.number)
            case _:
                return DISCARD

    @property
    def has_batch(self) -> bool:
        return self.kind in ("update", "forward_backward")


@dataclass
class OrderModel:
    """The calls that arrived, and the policy after those whose turn has come."""

    calls: dict[int, Call] = field(default_factory=dict[int, Call])
    turn: int = 1
    weights: list[tuple[list[float], float]] = field(
        default_factory=list[tuple[list[float], float]]
    )
    window: list[float] = field(default_factory=list[float])
    is_poisoned: bool = False

    @property
    def missing_seq(self) -> int:
        """The lowest seq that never arrived."""
        return next(seq for seq in range(1, len(self.calls) + 2) if seq not in self.calls)

    @property
    def running(self) -> Call | None:
        """The call that is held at the worker."""
        call = self.calls.get(self.turn)
        return call if call is not None and not call.end else None

    @property
    def behind_a_gap(self) -> list[Call]:
        """The open calls that a missing seq keeps from running."""
        missing = self.missing_seq
        return [call for call in self.calls.values() if call.seq > missing and not call.end]

    def free_seq(self, ahead: int) -> int:
        """The seq that has not arrived and has `ahead` such seqs below it."""
        free = (seq for seq in range(1, len(self.calls) + ahead + 2) if seq not in self.calls)
        return list(free)[ahead]

    def advance(self) -> None:
        """Run every call whose turn comes, up to a missing or a held one."""
        while (call := self.calls.get(self.turn)) is not None:
            if not call.end:
                if call.has_batch and call.is_held and self._may_run(call):
                    return
                call.end = self._run(call)
            self.turn += 1

    def _may_run(self, call: Call) -> bool:
        needs_closed = call.kind in ("update", "import")
        return not (needs_closed and (self.window or self.is_poisoned))

    def _run(self, call: Call) -> str:
        match call.kind:
            case "update" | "import" if not self._may_run(call):
                return str(ErrorCode.WINDOW_OPEN)
            case "import" if call.breaks:
                return str(ErrorCode.INVALID_ARGUMENT)
            case "import":
                self.weights.append(([call.number], 0.0))
            case "update" if not call.breaks:
                self.weights.append(([call.number], RATE))
            case "forward_backward" if not call.breaks:
                self.window.append(call.number)
            case "forward_backward":
                self.is_poisoned = True
                return str(ErrorCode.INTERNAL)
            case "optim_step" if self.is_poisoned:
                return str(ErrorCode.WINDOW_POISONED)
            case "optim_step" if not self.window:
                return str(ErrorCode.WINDOW_EMPTY)
            case "loose_step" if self.is_poisoned:
                self.window, self.is_poisoned = [], False
                return str(ErrorCode.WINDOW_POISONED)
            case "optim_step" | "loose_step":
                self.weights.append((self.window, RATE))
                self.window = []
            case "discard":
                self.window, self.is_poisoned = [], False
            case _:
                return str(ErrorCode.INTERNAL)
        return "done"
