"""Ranks that run one micro-batch together (Ulysses sequence parallelism, arXiv 2309.14509).

Each rank has a run of the tokens. In attention it has a share of the heads over all tokens, which
takes an exchange before and one after. In shapes a lower-case letter is this rank's share: t of T
tokens, n of N query heads, k key heads.

A rank without tokens runs a dummy token, because models do not run with none: it sends nothing of
it, and receives zeros.

No exchange adds. If several ranks attend copies of one key head, the rank that has the token adds
their gradients in rank order.

Each exchange is agreed on first, on the host: so nothing waits on a device for a rank that has
failed, and all of them stop at the same place, from where another pass can begin.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor

from ratoon.errors import ErrorCode, RatoonError
from ratoon.shards.copies import Copies, Copy
from ratoon_kernels import Span
from ratoon_kernels.precision import accumulation_dtype

# For what one rank does between two exchanges and the others have done: a compilation, at most.
_STEP_S = 600.0


class Link(Protocol):
    """Connection to the other ranks of the group, which call it at the same time."""

    def exchange(
        self, sends: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Tensor]]
    ) -> None:
        """Send `sends[i]` to rank i of the group, and fill `receives[i]` with what rank i sends.

        All tensors are contiguous; this rank's own entries are ignored.
        """
        ...

    def any(self, is_so: bool) -> bool:
        """Whether `is_so` holds on any rank."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceGroup:
    """`index`: this rank's place among `size`. `link` None: the rank runs by itself, and nothing is
    copied."""

    index: int
    size: int
    link: Link | None

    def share(self, span: Span, index: int | None = None) -> Span:
        """Tokens of `span` that a rank has, by default this one; shares differ by at most one."""
        place = self.index if index is None else index
        first, last = (len(span) * i // self.size for i in (place, place + 1))
        return Span(span.start + first, span.start + last)

    def most_of(self, num_tokens: int) -> int:
        """Tokens of the largest share."""
        return -(-num_tokens // self.size)

    def own_heads(self, num_heads: int) -> slice:
        """Query heads that this rank has in attention."""
        return _own_queries(num_heads, self.index, self.size)

    def any(self, is_so: bool) -> bool:
        """Whether `is_so` holds on any rank."""
        return is_so if self.link is None else self.link.any(is_so)

    def add_up(self, x: Tensor) -> Tensor:
        """Returns the sum over all ranks, with the same bits on each."""
        if self.link is None:
            return x
        parts = [x if i == self.index else torch.empty_like(x) for i in range(self.size)]
        self.link.exchange([[x]] * self.size, [[part] for part in parts])
        return reduce(operator.add, parts)

    def to_heads(
        self, num_tokens: int, queries: Sequence[Tensor], keys: Sequence[Tensor] = ()
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Exchanges tokens for heads, of `num_tokens`: [t, N, ...] and [t, K, ...] -> [T, n, ...]
        and [T, k, ...]."""
        if self.link is None:
            return [*queries], [*keys]
        num_heads = queries[0].shape[1]
        bounds = [self.share(Span(0, num_tokens), i) for i in range(self.size)]
        own = slice(len(bounds[self.index]))
        sends = [
            [x[own, _own_queries(num_heads, i, self.size)].contiguous() for x in queries]
            + [_take(x[own], own_keys(num_heads, x.shape[1], i, self.size)) for x in keys]
            for i in range(self.size)
        ]
        wholes = [x.new_empty((num_tokens, *x.shape[1:])) for x in sends[self.index]]
        receives = [[whole[part.start : part.stop] for whole in wholes] for part in bounds]
        self.link.exchange(sends, receives)
        for place, part in zip(receives[self.index], sends[self.index], strict=True):
            place.copy_(part)
        return wholes[: len(queries)], wholes[len(queries) :]

    def to_tokens(
        self, num_kv_heads: int, queries: Sequence[Tensor], key_sums: Sequence[Tensor] = ()
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Exchanges heads for tokens; copies of a key head, [T, k, H], are summed into [t, K,
        H]."""
        if self.link is None:
            return [*queries], [*key_sums]
        bounds = [self.share(Span(0, len(queries[0])), i) for i in range(self.size)]
        sends = [
            [x[own.start : own.stop].contiguous() for x in (*queries, *key_sums)] for own in bounds
        ]
        receives = [[torch.empty_like(x) for x in sends[self.index]] for _ in bounds]
        self.link.exchange(sends, receives)
        receives[self.index] = sends[self.index]
        of_tensor = list(zip(*receives, strict=True))
        joined = [torch.cat(parts, dim=1) for parts in of_tensor[: len(queries)]]
        num_heads = joined[0].shape[1]
        sums = [
            self._add_copies(parts, num_heads, num_kv_heads) for parts in of_tensor[len(queries) :]
        ]
        if not len(bounds[self.index]):
            joined, sums = (
                [x.new_zeros((1, *x.shape[1:])) for x in each] for each in (joined, sums)
            )
        return joined, sums

    def _add_copies(self, parts: Sequence[Tensor], num_heads: int, num_kv_heads: int) -> Tensor:
        like = parts[0]
        if like.shape[1] * self.size == num_kv_heads:
            return torch.cat([*parts], dim=1)
        shape = (len(like), num_kv_heads, *like.shape[2:])
        sums = like.new_zeros(shape, dtype=accumulation_dtype(like.dtype))
        for index, part in enumerate(parts):
            for place, head in enumerate(own_keys(num_heads, num_kv_heads, index, self.size)):
                sums[:, head] += part[:, place]
        return sums.to(like.dtype)


ALONE = SequenceGroup(index=0, size=1, link=None)


def own_keys(num_heads: int, num_kv_heads: int, index: int, size: int) -> list[int]:
    """Key heads of a rank, each for an equal number of its query heads.

    A key head appears twice if the rank's query heads do not fall into whole groups of equal size.
    """
    own, of_key = num_heads // size, num_heads // num_kv_heads
    together = math.gcd(own, of_key)
    return [head // of_key for head in range(index * own, (index + 1) * own, together)]


def _own_queries(num_heads: int, index: int, size: int) -> slice:
    own = num_heads // size
    return slice(index * own, (index + 1) * own)


def _take(x: Tensor, heads: list[int]) -> Tensor:
    """Takes these heads of [t, K, H] by slices, because an index would be copied to the device."""
    if heads == [*range(heads[0], heads[-1] + 1)]:
        return x[:, heads[0] : heads[-1] + 1].contiguous()
    return torch.stack([x[:, head] for head in heads], dim=1)


class _Word(IntEnum):
    GO_ON = 0
    YES = 1
    FAILED = 2


class SequenceLink:
    """`Link` of one pass.

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
        """Tell all ranks `word`; returns the word of each."""
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
                # An empty tensor has no counterpart to wait for.
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
