"""The Triton kernel of a gradient sum: terms added one after the other, the sum read once.

torch's own reads and writes the sum for each term, and mixed dtypes one element at a time: 1.8 TB/s
of an H200's 4.8.

Imported where there is a GPU: triton comes with torch's CUDA wheels alone.
"""

from collections.abc import Sequence
from typing import Any

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

_BLOCK = 4096
_WARPS = 8


def add_each(total: Tensor, terms: Sequence[Tensor]) -> None:
    """`total` += each of the terms, in order, in the dtype of `total`; all contiguous, one size."""
    num_elements = total.numel()
    kernel: Any = _add_each
    kernel[(triton.cdiv(num_elements, _BLOCK),)](
        total, tuple(terms), num_elements, NUM=len(terms), BLOCK=_BLOCK, num_warps=_WARPS
    )


@triton.jit
def _add_each(total, terms, num_elements, NUM: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = index < num_elements
    value = tl.load(total + index, mask=is_there)
    for number in tl.static_range(NUM):
        value += tl.load(terms[number] + index, mask=is_there).to(value.dtype)
    tl.store(total + index, value, mask=is_there)
