"""Where a sequence or token is in the request, for messages: `groups[3].rollouts[17]`."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ratoon.errors import ErrorCode, RatoonError

MAX_FLOAT32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFields:
    """Names sequences s (0 .. S - 1) and response tokens j (0 .. J - 1) of a request."""

    # int64 [G + 1], int64 [S + 1].
    group_offsets: NDArray[np.int64]
    response_offsets: NDArray[np.int64]

    def sequence(self, s: int) -> str:
        return sequence_field(self.group_offsets, s)

    def token(self, j: int, column: str) -> str:
        """Response token j in a per-token column: `groups[0].rollouts[1].old_logprobs[5]`."""
        s = bisect_right(self.response_offsets, j) - 1
        return f"{self.sequence(s)}.{column}[{j - int(self.response_offsets[s])}]"

    def check_count(self, s: int, column: str, num_values: int) -> None:
        """Raise `RatoonError` unless sequence s has `num_values` response tokens."""
        num_tokens = int(self.response_offsets[s + 1] - self.response_offsets[s])
        if num_values != num_tokens:
            path = f"{self.sequence(s)}.{column}"
            raise RatoonError(
                ErrorCode.INVALID_ARGUMENT,
                f"{path}: {num_values} values for {num_tokens} response tokens",
                field=path,
                got=f"{num_values} values",
                expected=f"{num_tokens} values",
            )


def sequence_field(group_offsets: NDArray[np.int64], s: int) -> str:
    """Path of sequence s, those of group g being [group_offsets[g], group_offsets[g + 1])."""
    group = bisect_right(group_offsets, s) - 1
    return f"groups[{group}].rollouts[{s - int(group_offsets[group])}]"


def first_true(is_bad: NDArray[np.bool_]) -> int | None:
    """Index of the first true value, None where there is none."""
    if not len(is_bad):
        return None
    index = int(is_bad.argmax())
    return index if is_bad[index] else None
