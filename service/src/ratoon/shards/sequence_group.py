"""The ranks that run one micro-batch together (Ulysses sequence parallelism, arXiv 2309.14509).

Each has a share of the tokens, a run of them; in attention it has a share of the heads over all
tokens, which takes an exchange before and one after. In shapes a lower-case letter is the share of
this rank: t of T tokens, n of N query heads, k key heads.

A rank without a token runs one for nothing, as models do not run none: it sends nothing of it, and
gets zeros.

Nothing is added on the way. Where several ranks attend copies of one key head, the rank that has
the token adds their gradients in the order of ranks.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor

from ratoon_kernels import Span
from ratoon_kernels.precision import accumulation_dtype


class Link(Protocol):
    """The way to the other ranks of the group, which do the same at the same time."""

    def exchange(
        self, sends: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Tensor]]
    ) -> None:
        """Send `sends[i]` to rank i of the group, and fill `receives[i]` with what it sends.

        All are contiguous; those of this rank itself are left alone.
        """
        ...

    def any(self, is_so: bool) -> bool:
        """Whether it is so on any rank."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceGroup:
    """`index`: this rank's place among `size`; `link` None: it is alone, and nothing is copied."""

    index: int
    size: int
    link: Link | None

    def share(self, span: Span, index: int | None = None) -> Span:
        """Tokens of `span` that a rank has, by default this one; they differ by one at most."""
        place = self.index if index is None else index
        first, last = (len(span) * i // self.size for i in (place, place + 1))
        return Span(span.start + first, span.start + last)

    def most_of(self, num_tokens: int) -> int:
        """Tokens of the largest share."""
        return -(-num_tokens // self.size)

    def any(self, is_so: bool) -> bool:
        """Whether it is so on any rank."""
        return is_so if self.link is None else self.link.any(is_so)

    def add_up(self, x: Tensor) -> Tensor:
        """The sum over all ranks, which has the same bits on each."""
        if self.link is None:
            return x
        parts = [x if i == self.index else torch.empty_like(x) for i in range(self.size)]
        self.link.exchange([[x]] * self.size, [[part] for part in parts])
        return reduce(operator.add, parts)

    def to_heads(
        self, num_tokens: int, queries: Sequence[Tensor], keys: Sequence[Tensor] = ()
    ) -> tuple[list[Tensor], list[Tensor]]:
        """[t, N, ...] each, and [t, K, ...] -> [T, n, ...] and [T, k, ...], of `num_tokens`."""
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
        """The way back; of the copies of a key head, [T, k, H], the sum, in [t, K, H]."""
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
    """The key head of each of a rank's, each for as many of its query heads.

    One is there twice where the rank's query heads do not fall into whole groups of equal size.
    """
    own, of_key = num_heads // size, num_heads // num_kv_heads
    together = math.gcd(own, of_key)
    return [head // of_key for head in range(index * own, (index + 1) * own, together)]


def _own_queries(num_heads: int, index: int, size: int) -> slice:
    own = num_heads // size
    return slice(index * own, (index + 1) * own)


def _take(x: Tensor, heads: list[int]) -> Tensor:
    """These heads of [t, K, H]; by slices, as an index would be copied to the device."""
    if heads == [*range(heads[0], heads[-1] + 1)]:
        return x[:, heads[0] : heads[-1] + 1].contiguous()
    return torch.stack([x[:, head] for head in heads], dim=1)
