"""A half-open range of packed tokens."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """The packed tokens [start, stop)."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def rows_from(self, origin: int) -> slice:
        """Returns these tokens as rows of a tensor whose row 0 is the packed token `origin`."""
        return slice(self.start - origin, self.stop - origin)
