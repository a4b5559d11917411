"""The flash backend of tree attention: flash-attn-4 (CuTe DSL), block-sparse with our mask.

What it does not serve is an error with its reason; results are those of 16-bit kernels, also where
the partial form widens them to fp32.
"""

import functools
import importlib.metadata
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from ratoon_kernels.layout import TreeLayout
from ratoon_kernels.tiles import Span
from ratoon_kernels.tree_attention.block_plan import BlockGrid, BlockPlan, block_plan, plan_tensors
from ratoon_kernels.tree_attention.operands import Operands, Upstream

VERSION: Final = "4.0.0b36"
_PACKAGE: Final = "flash-attn-4"
_KEY_TILE: Final = 128
# Query tiles of the forward and the backward, by major compute capability and head_dim: the least
# that flash-attn-4 takes without a smaller tile of its own. On sm_100 its forward takes two tiles
# of 128 queries at a time. Backward of head_dim 128 on sm_90: 64 is its tile for causal masks, and
# what it walks listed tiles of 128 with. On an H200 the backwards of t1-28-4k, paper, forest16 and
# short took 80.7 ms together, with lists of 128 queries 81.1, and with 80, its tile for other
# masks, 92.0.
_QUERY_TILES: Final = MappingProxyType(
    {(9, 64): (192, 128), (9, 128): (128, 64), (10, 64): (256, 128), (10, 128): (256, 128)}
)
_DTYPES: Final = (torch.bfloat16, torch.float16)


def unavailable_reason() -> str | None:
    """Returns why this machine cannot run it: no CUDA GPU, or not the package it needs."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA GPU"
    installed = _installed_version()
    if installed != VERSION:
        found = "is not installed" if installed is None else f"has version {installed}"
        return f"the package {_PACKAGE} {found}: pip install ratoon-kernels[flash] ({VERSION})"
    return None


def unsupported_reason(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    is_deterministic: bool,
    value_dim: int | None = None,
    window: int | None = None,
) -> str | None:
    """Returns why it does not serve such a call, or None."""
    if device.type != "cuda":
        return f"it runs on CUDA GPUs only, not on {device.type}"
    if dtype not in _DTYPES:
        return f"no support for dtype {dtype}, only for bfloat16 and float16"
    if is_deterministic:
        # The forward is, but a call that learns it in the backward has lost the forward.
        return "its block-sparse backward adds up dQ in no fixed order"
    if value_dim not in (None, head_dim):
        return f"values of head size {value_dim} beside {head_dim}, it has one size for both"
    if window is not None:
        return "its masks know no depths, so no windows"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, head_dim) in _QUERY_TILES:
        return None
    if major not in {major for major, _ in _QUERY_TILES}:
        return f"no support for sm_{major}{minor}, only for sm_90 and sm_100"
    return f"no support for head_dim {head_dim}, only for 64 and 128"


def plan(layout: TreeLayout, _window: int | None = None) -> list[Tensor]:
    """Returns what it reads of a layout beside `end_T`: the host node table.

    Raises:
        BackendUnavailableError: The forest has more than `MAX_TOKENS` tokens.
    """
    return plan_tensors("flash", layout, layout.num_tokens)


def partial_plan(
    layout: TreeLayout, queries: Span, keys: Span, _window: int | None = None
) -> list[Tensor]:
    """Returns the same; the limit is that of the ranges at hand."""
    return plan_tensors("flash", layout, len(queries), len(keys))


def forward(operands: Operands) -> tuple[Tensor, Tensor]:
    """Returns out_TNH (dtype of q) and lse_NT (fp32) of the whole forest."""
    q_QNH = operands.q_QNH
    if not (len(operands.queries) and len(operands.keys)):
        num_queries, num_heads, _ = q_QNH.shape
        lse_NQ = q_QNH.new_full((num_heads, num_queries), -torch.inf, dtype=torch.float32)
        return q_QNH.new_zeros(q_QNH.shape), lse_NQ
    from ratoon_kernels.tree_attention import flash_kernels

    made, grid = _plan(operands)
    return flash_kernels.run_forward(operands, made, grid)


def backward(operands: Operands, upstream: Upstream) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq_TNH, dk_TKH and dv_TKH of the whole forest, in the dtype of q."""
    if not (len(operands.queries) and len(operands.keys)):
        q, k, v = (x.new_zeros(x.shape) for x in (operands.q_QNH, operands.k_SKH, operands.v_SKH))
        return q, k, v
    from ratoon_kernels.tree_attention import flash_kernels

    made, grid = _plan(operands)
    return flash_kernels.run_backward(operands, upstream, made, grid)


def partial_forward(operands: Operands) -> tuple[Tensor, Tensor]:
    """Returns out_QNH and lse_NQ over the keys at hand, in fp32; out has the rounding of q's dtype.

    A query that attends none of them has output 0 and log-sum-exp -inf.
    """
    out_QNH, lse_NQ = forward(operands)
    return out_QNH.float(), lse_NQ


def partial_backward(
    operands: Operands, upstream: Upstream, dk_acc_SKH: Tensor, dv_acc_SKH: Tensor
) -> Tensor:
    """Adds to the two buffers; returns dq_QNH in fp32. Each call's share is rounded once."""
    dq_QNH, dk_SKH, dv_SKH = backward(operands, upstream)
    dk_acc_SKH += dk_SKH
    dv_acc_SKH += dv_SKH
    return dq_QNH.float()


@functools.cache
def _installed_version() -> str | None:
    try:
        return importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def _plan(operands: Operands) -> tuple[BlockPlan, BlockGrid]:
    major, _ = torch.cuda.get_device_capability(operands.q_QNH.device)
    query_tile, backward_query_tile = _QUERY_TILES[major, operands.q_QNH.shape[-1]]
    grid = BlockGrid(
        key_tile=_KEY_TILE,
        query_tile=query_tile,
        backward_query_tile=backward_query_tile,
        padded_queries=len(operands.queries),
        padded_keys=-(-len(operands.keys) // _KEY_TILE) * _KEY_TILE,
        is_full_width=False,
    )
    return block_plan(operands, grid), grid
