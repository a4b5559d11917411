"""The open gradient accumulation window of a policy, and which operation may touch it. Pure.

An entry is a ForwardBackward that was applied or that failed; a cancelled one leaves no trace. The
record of an applied one is kept, because the worker may have to compute its gradients again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ratoon.engine.journal.records import OperationRecord
from ratoon.errors import ErrorCode, RatoonError, invalid


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowEntry:
    """One ForwardBackward of the window. `record` None: it failed."""

    seq: int
    record: OperationRecord | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Entries in seq order; none: closed."""

    entries: tuple[WindowEntry, ...] = ()

    @property
    def applied(self) -> tuple[int, ...]:
        return tuple(entry.seq for entry in self.entries if entry.record is not None)

    @property
    def failed(self) -> tuple[int, ...]:
        return tuple(entry.seq for entry in self.entries if entry.record is None)

    @property
    def records(self) -> dict[int, OperationRecord]:
        """The applied ForwardBackwards by seq."""
        return {entry.seq: entry.record for entry in self.entries if entry.record is not None}

    @property
    def is_open(self) -> bool:
        return bool(self.entries)

    def replay_from(self, seq: int) -> int:
        """The first seq to replay from a checkpoint taken at `seq`."""
        return self.entries[0].seq if self.entries else seq + 1

    def with_applied(self, record: OperationRecord) -> Window:
        return self._with(WindowEntry(seq=record.seq, record=record))

    def with_failed(self, seq: int) -> Window:
        return self._with(WindowEntry(seq=seq, record=None))

    def check_closed(self) -> None:
        """Raises WINDOW_OPEN: an Update brings its own gradients, an import other weights."""
        if self.is_open:
            raise RatoonError(
                ErrorCode.WINDOW_OPEN,
                f"ForwardBackwards {_names(self.entries)} are not stepped or discarded",
                details={"window_seqs": _names(self.entries)},
            )

    def select(self, include_seqs: tuple[int, ...]) -> tuple[int, ...]:
        """The ForwardBackwards that an OptimStep steps on; `include_seqs` empty: all.

        Raises WINDOW_POISONED naming what failed, WINDOW_EMPTY, or INVALID_ARGUMENT.
        """
        if not include_seqs:
            if self.failed:
                raise self._poisoned(self.failed[0])
            if not self.applied:
                raise RatoonError(
                    ErrorCode.WINDOW_EMPTY, "no ForwardBackward since the last step or discard"
                )
            return self.applied
        if len(set(include_seqs)) != len(include_seqs):
            raise invalid("include_seqs", list(include_seqs), "each seq once")
        for index, seq in enumerate(include_seqs):
            if seq in self.failed:
                raise self._poisoned(seq)
            if seq not in self.applied:
                raise invalid(
                    f"include_seqs[{index}]", seq, f"one of the window's {list(self.applied)}"
                )
        return tuple(sorted(include_seqs))

    def _with(self, entry: WindowEntry) -> Window:
        assert all(earlier.seq < entry.seq for earlier in self.entries)
        return replace(self, entries=(*self.entries, entry))

    def _poisoned(self, seq: int) -> RatoonError:
        return RatoonError(
            ErrorCode.WINDOW_POISONED,
            f"ForwardBackward {seq} failed: discard the window, or list the seqs to include",
            details={"failed_seq": str(seq), "window_seqs": _names(self.entries)},
        )


def _names(entries: tuple[WindowEntry, ...]) -> str:
    return ",".join(str(entry.seq) for entry in entries)
