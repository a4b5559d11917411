"""The way between the ranks that run one pass together, on torch.distributed.

Each exchange is agreed on first, on the host: so nothing waits on a device for a rank that has
failed, and all of them stop at the same place, from where another pass can begin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import IntEnum

import torch
from torch import Tensor

from ratoon.errors import ErrorCode, RatoonError
from ratoon.shards.copies import Copies, Copy
from ratoon.shards.sequence_group import ALONE, SequenceGroup

# For what one rank does between two exchanges and the others have done: a compilation, at most.
_STEP_S = 600.0


class _Word(IntEnum):
    GO_ON = 0
    YES = 1
    FAILED = 2


class SequenceLink:
    """`sequence_group.Link` of one pass.

    States: running; over, once a rank has said that it failed, or cannot be reached.
    """

    def __init__(self, ranks: Sequence[int], own: int, copies: Copies) -> None:
        self._ranks = ranks
        self._own = own
        self._copies = copies
        self._is_over = False

    def exchange(
        self, sends: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Tensor]]
    ) -> None:
        """See `Link.exchange`. Raises what `any` does."""
        self.any(False)
        self._copy(sends, receives)

    def any(self, is_so: bool) -> bool:
        """See `Link.any`. Raises CANCELLED where a rank has failed, `CopyFailedError`."""
        words = self._tell(_Word.YES if is_so else _Word.GO_ON)
        if _Word.FAILED in words:
            self._is_over = True
            raise RatoonError(ErrorCode.CANCELLED, "another rank of the same micro-batch failed")
        return _Word.YES in words

    def fail(self) -> None:
        """Have the others stop where they come next, unless they have already."""
        if not self._is_over:
            self._is_over = True
            with suppress(Exception):
                self._tell(_Word.FAILED)

    def _tell(self, word: _Word) -> list[int]:
        """What each rank says."""
        own = torch.tensor([word], dtype=torch.uint8)
        words = [own if rank == self._own else torch.empty_like(own) for rank in self._ranks]
        self._copy([[own]] * len(words), [[each] for each in words])
        return [int(each) for each in words]

    def _copy(
        self, sends: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Tensor]]
    ) -> None:
        to_peers, from_peers = (
            [
                Copy(tensor, rank)
                for rank, tensors in zip(self._ranks, each, strict=True)
                for tensor in tensors
                # What is empty has no counterpart to wait for.
                if rank != self._own and tensor.numel()
            ]
            for each in (sends, receives)
        )
        try:
            self._copies.exchange(to_peers, from_peers)
        except BaseException:
            self._is_over = True
            raise


class SequenceGroups:
    """The groups that this rank may be in, one for each of `sizes`, with connections of its own."""

    def __init__(self, copies: Copies, sizes: Sequence[int]) -> None:
        """All ranks do it at the same time."""
        self._copies = copies
        self._of_size = {
            size: copies.among(self._ranks(size), timedelta(seconds=_STEP_S))
            for size in sizes
            if size > 1
        }

    @contextmanager
    def joined(self, size: int) -> Iterator[SequenceGroup]:
        """The `size` neighbouring ranks that this one runs a pass with, which all do the same.

        What is raised inside ends the pass of the others too. Raises CANCELLED where they fail.
        """
        if size == 1:
            yield ALONE
            return
        ranks = self._ranks(size)
        link = SequenceLink(ranks, self._copies.rank, self._of_size[size])
        try:
            yield SequenceGroup(index=ranks.index(self._copies.rank), size=size, link=link)
            # Nobody leaves before all have come to the end.
            link.any(False)
        except BaseException:
            link.fail()
            raise

    def _ranks(self, size: int) -> range:
        first = self._copies.rank - self._copies.rank % size
        return range(first, first + size)
