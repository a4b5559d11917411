"""The Triton kernel that chooses the experts of each token.

Import it only where there is a GPU: triton comes only with torch's CUDA wheels.

T tokens, E experts, C experts of a token.
"""

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

_TILE = 1024


def choose_experts(probs_TE: Tensor, top_k: int) -> Tensor:
    """expert_TC, int64: the first ones of a stable sort by falling probability, which is
    float32."""
    num_tokens, num_experts = probs_TE.shape
    expert_TC = probs_TE.new_empty((num_tokens, top_k), dtype=torch.int64)
    block = triton.next_power_of_2(num_experts)
    rows = max(1, _TILE // block)
    kernel: Any = _choose_experts
    with torch.cuda.device_of(probs_TE):
        kernel[(triton.cdiv(num_tokens, rows),)](
            probs_TE.contiguous(),
            expert_TC,
            num_tokens,
            EXPERTS=num_experts,
            TOP_K=top_k,
            ROWS=rows,
            BLOCK=block,
            num_warps=4,
        )
    return expert_TC


@triton.jit
def _choose_experts(
    probs,
    experts,
    num_tokens,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_token = token < num_tokens
    expert = tl.arange(0, BLOCK)
    is_there = is_token[:, None] & (expert < EXPERTS)[None, :]
    left = tl.load(probs + token[:, None] * EXPERTS + expert[None, :], mask=is_there, other=-2.0)
    # NaN sorts first, as in torch.
    left = tl.where(left == left, left, float("inf"))
    for index in range(TOP_K):
        _, chosen = tl.max(left, axis=1, return_indices=True)
        tl.store(experts + token * TOP_K + index, chosen.to(tl.int64), mask=is_token)
        left = tl.where(expert[None, :] == chosen[:, None], -1.0, left)
