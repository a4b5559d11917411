"""The Triton kernels that move rows between tokens and their experts.

A token is read once for all of its rows. Row by row, in the order of experts, the tokens of one
expert would come from memory again for each of the others: twice as many bytes.

Import it only where there is a GPU: triton comes only with torch's CUDA wheels.

T tokens, C rows of a token, S = T * C rows, D features.
"""

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

# Elements that one program handles at a time: 16 bytes of bfloat16 per thread.
_TILE = 2048
_WARPS = 8


def spread_rows(x_TD: Tensor, place_TC: Tensor) -> Tensor:
    """[S, D]: each token at all of its places."""
    y_SD = x_TD.new_empty((place_TC.numel(), x_TD.shape[1]))
    _launch(x_TD.contiguous(), place_TC, y_SD, gathers=False)
    return y_SD


def add_rows(x_SD: Tensor, place_TC: Tensor) -> Tensor:
    """[T, D]: the sum of each token's rows, one after the other in float32."""
    y_TD = x_SD.new_empty((place_TC.shape[0], x_SD.shape[1]))
    _launch(x_SD.contiguous(), place_TC, y_TD, gathers=True)
    return y_TD


def _launch(x: Tensor, place_TC: Tensor, y: Tensor, *, gathers: bool) -> None:
    num_tokens, count = place_TC.shape
    block = min(_TILE, triton.next_power_of_2(x.shape[1]))
    rows = _TILE // block
    kernel: Any = _move_rows
    with torch.cuda.device_of(x):
        kernel[(triton.cdiv(num_tokens, rows),)](
            x,
            place_TC.contiguous(),
            y,
            num_tokens,
            GATHERS=gathers,
            COUNT=count,
            FEATURES=x.shape[1],
            ROWS=rows,
            BLOCK=block,
            num_warps=_WARPS,
        )


@triton.jit
def _move_rows(
    x,
    places,
    y,
    num_tokens,
    GATHERS: tl.constexpr,
    COUNT: tl.constexpr,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_token = token < num_tokens
    for start in range(0, FEATURES, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_there = is_token[:, None] & (column < FEATURES)[None, :]
        of_token = token[:, None] * FEATURES + column[None, :]
        if GATHERS:
            value = tl.zeros([ROWS, BLOCK], tl.float32)
        else:
            value = tl.load(x + of_token, mask=is_there)
        for index in tl.static_range(COUNT):
            place = tl.load(places + token * COUNT + index, mask=is_token, other=0).to(tl.int64)
            of_row = place[:, None] * FEATURES + column[None, :]
            if GATHERS:
                value += tl.load(x + of_row, mask=is_there, other=0).to(tl.float32)
            else:
                tl.store(y + of_row, value, mask=is_there)
        if GATHERS:
            tl.store(y + of_token, value.to(y.dtype.element_ty), mask=is_there)
