"""What a device did in a step: its kernels in the order of their start, and what each is part of.

Enters names and times as a profiler has them, leaves milliseconds by kind and the time in which
something ran. Invariant: a kernel is of one kind; time in which several ran is busy once.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What a kernel is part of, as it stands in a table."""

    ATTENTION_FORWARD = "attention, forward"
    ATTENTION_BACKWARD = "attention, backward"
    PRODUCTS = "products of weights"
    HEAD = "LM head"
    COMPILED = "compiled elementwise"
    EAGER = "other kernels of torch"
    COPIES = "copies and fills"
    OPTIMIZER = "optimizer"


# By the first that a kernel's name matches; products of the head are told by what is around them.
_NAMES = (
    (Kind.ATTENTION_FORWARD, r"tree_attention_forward"),
    (Kind.ATTENTION_BACKWARD, r"tree_attention_backward"),
    (Kind.HEAD, r"_reduce_rows|_differentiate_logits"),
    (Kind.COPIES, r"^Mem(cpy|set)"),
    (Kind.PRODUCTS, r"nvjet|[Gg]emm|gemv|cutlass|splitKreduce"),
    (Kind.COMPILED, r"^triton_"),
)
_PATTERNS = tuple((kind, re.compile(pattern)) for kind, pattern in _NAMES)
_HEAD_BACKWARD = "_differentiate_logits"
# Products that follow the head's gradients of logits: with its weight, with hidden states.
_PRODUCTS_AFTER = 2
# Adds up the parts of the product before it.
_END_OF_PRODUCT = "splitKreduce"
_MAX_NAME = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel, copy or fill; microseconds of the profiler's clock."""

    name: str
    start_us: float
    stop_us: float

    @property
    def milliseconds(self) -> float:
        return (self.stop_us - self.start_us) / 1e3


def kinds_of(names: Sequence[str], *, has_optimizer: bool) -> list[Kind]:
    """The kind of each kernel of a step, given in the order in which they ran.

    The head's logits are the product right before each of its own kernels. With an optimizer, all
    that comes behind the last product and attention is its.
    """
    kinds = [_kind(name) for name in names]
    last, still_to_come = -1, 0
    for i, name in enumerate(names):
        if kinds[i] is Kind.HEAD:
            if last >= 0:
                kinds[last] = Kind.HEAD
            still_to_come = _PRODUCTS_AFTER if _HEAD_BACKWARD in name else 0
        elif kinds[i] is Kind.PRODUCTS and _END_OF_PRODUCT not in name:
            last = i
            if still_to_come:
                kinds[i] = Kind.HEAD
                still_to_come -= 1
    product = Kind.PRODUCTS
    for i, name in enumerate(names):
        if _END_OF_PRODUCT in name:
            kinds[i] = product
        elif _kind(name) is Kind.PRODUCTS:
            product = kinds[i]
    if has_optimizer:
        step = (Kind.PRODUCTS, Kind.HEAD, Kind.ATTENTION_FORWARD, Kind.ATTENTION_BACKWARD)
        stop = max((i + 1 for i, kind in enumerate(kinds) if kind in step), default=0)
        kinds[stop:] = [Kind.OPTIMIZER] * (len(kinds) - stop)
    return kinds


def busy_us(kernels: Sequence[Kernel]) -> float:
    """Microseconds in which at least one of them ran."""
    busy, end = 0.0, float("-inf")
    for kernel in in_order(kernels):
        busy += max(0.0, kernel.stop_us - max(kernel.start_us, end))
        end = max(end, kernel.stop_us)
    return busy


def longest_gap_us(kernels: Sequence[Kernel]) -> float:
    """Between the end of all that has begun and the next start."""
    longest, end = 0.0, float("inf")
    for kernel in in_order(kernels):
        longest = max(longest, kernel.start_us - end)
        end = kernel.stop_us if end == float("inf") else max(end, kernel.stop_us)
    return longest


def milliseconds_by_kind(
    steps: Sequence[Sequence[Kernel]], *, has_optimizer: bool
) -> dict[str, float]:
    """Means over the steps; of all kinds, those that did not run too."""
    found = dict.fromkeys(map(str, Kind), 0.0)
    for kernel, kind in _with_kinds(steps, has_optimizer=has_optimizer):
        found[str(kind)] += kernel.milliseconds / len(steps)
    return found


def longest_kernels(
    steps: Sequence[Sequence[Kernel]], count: int, *, has_optimizer: bool
) -> list[dict[str, object]]:
    """Those that take most of a step, by name and kind: calls and milliseconds of a step."""
    found: dict[tuple[str, Kind], list[float]] = defaultdict(list)
    for kernel, kind in _with_kinds(steps, has_optimizer=has_optimizer):
        found[kernel.name[:_MAX_NAME], kind].append(kernel.milliseconds)
    order = sorted(found, key=lambda key: -sum(found[key]))[:count]
    return [
        {
            "name": name,
            "kind": str(kind),
            "calls": len(found[name, kind]) / len(steps),
            "ms": sum(found[name, kind]) / len(steps),
        }
        for name, kind in order
    ]


def in_order(kernels: Sequence[Kernel]) -> list[Kernel]:
    """By their start."""
    return sorted(kernels, key=lambda kernel: kernel.start_us)


def _with_kinds(
    steps: Sequence[Sequence[Kernel]], *, has_optimizer: bool
) -> Iterator[tuple[Kernel, Kind]]:
    for step in steps:
        order = in_order(step)
        kinds = kinds_of([kernel.name for kernel in order], has_optimizer=has_optimizer)
        yield from zip(order, kinds, strict=True)


def _kind(name: str) -> Kind:
    found = (kind for kind, pattern in _PATTERNS if pattern.search(name))
    return next(found, Kind.EAGER)
