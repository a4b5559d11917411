"""The Triton kernel of a state's digest: `digest.host_sums` of one tensor, each word read once.

Imported where there is a GPU: triton comes with torch's CUDA wheels alone.
"""

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

_LANES = 1024
_WARPS = 4


def block_sums(words: Tensor, places: Tensor, blocks: Tensor) -> Tensor:
    """What each block of `words` adds to both sums, int64 [r, 2].

    `words`: integers [n], blocks of as many as there are `places`, int64 [2, w], and what is left;
    `blocks`: the multipliers of blocks, int64 [2, r].
    """
    num_blocks = blocks.shape[1]
    sums = torch.empty(num_blocks, 2, dtype=torch.int64, device=words.device)
    kernel: Any = _sum_blocks
    with torch.cuda.device_of(words):
        kernel[(num_blocks,)](
            words,
            places,
            blocks,
            sums,
            len(words),
            num_blocks,
            WIDTH=places.shape[1],
            LANES=_LANES,
            num_warps=_WARPS,
        )
    return sums


@triton.jit
def _sum_blocks(
    words, places, blocks, sums, num_words, num_blocks, WIDTH: tl.constexpr, LANES: tl.constexpr
):
    block = tl.program_id(0)
    start = block.to(tl.int64) * WIDTH
    one = tl.zeros([LANES], tl.int64)
    two = tl.zeros([LANES], tl.int64)
    for first in range(0, WIDTH, LANES):
        place = first + tl.arange(0, LANES)
        word = tl.load(words + start + place, mask=start + place < num_words, other=0).to(tl.int64)
        one += word * tl.load(places + place)
        two += word * tl.load(places + WIDTH + place)
    tl.store(sums + 2 * block, tl.sum(one) * tl.load(blocks + block))
    tl.store(sums + 2 * block + 1, tl.sum(two) * tl.load(blocks + num_blocks + block))
