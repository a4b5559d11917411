"""torch's FlashAttention-2 as another backend of tree attention, for replicated rollouts.

It takes forests of single-node trees. As it goes through the same op, compiled layers and kept
activations are those of the other backends. It is never chosen unless named.
"""

from __future__ import annotations

import sys
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ratoon_kernels import TreeLayout, registry
from ratoon_kernels.tree_attention import op
from ratoon_kernels.tree_attention.operands import Operands, Upstream

FA2 = "fa2"
_DTYPES = (torch.bfloat16, torch.float16)
_flash_forward = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward


def unavailable_reason() -> str | None:
    """Why this machine cannot run it, or None."""
    return None if torch.cuda.is_available() else "torch finds no CUDA GPU"


def unsupported_reason(
    device: torch.device,
    dtype: torch.dtype,
    _head_dim: int,
    is_deterministic: bool,
    value_dim: int | None = None,
    _window: int | None = None,
) -> str | None:
    """Why it does not support such a call, or None."""
    is_served = device.type == "cuda" and dtype in _DTYPES and not is_deterministic
    is_served &= value_dim is None
    return None if is_served else "for 16-bit tensors of one size on CUDA GPUs, not deterministic"


def plan(layout: TreeLayout, _window: int | None = None) -> list[Tensor]:
    """The host node table, in which each node is a sequence."""
    return [layout.node_table_M4]


def forward(operands: Operands) -> tuple[Tensor, Tensor]:
    """Returns out_TNH and lse_NT, contiguous: FlashAttention-2 gives the strides of q."""
    q, k, v = operands.q_QNH, operands.k_SKH, operands.v_SKH
    out, lse, *_ = _flash_forward(
        *(q, k, v, *_sequences(operands), 0.0, True, False),
        scale=operands.scale,
        **_window_sizes(operands.window),
    )
    return out.contiguous(), lse.contiguous()


def backward(operands: Operands, upstream: Upstream) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq_TNH, dk_TKH and dv_TKH, contiguous."""
    q, k, v = operands.q_QNH, operands.k_SKH, operands.v_SKH
    # RNG state, unread without dropout.
    unread = torch.zeros(2, dtype=torch.uint64, device=q.device)
    dq, dk, dv = _flash_backward(
        *(upstream.dout_QNH, q, k, v, upstream.out_QNH, upstream.lse_NQ),
        *(*_sequences(operands), 0.0, True, unread, unread),
        scale=operands.scale,
        **_window_sizes(operands.window),
    )
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


def _window_sizes(window: int | None) -> dict[str, int]:
    """Tokens before and behind a query; the query itself is not counted."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def install() -> None:
    """Registers the name `fa2` with the op and its registry; idempotent."""
    add_backend(FA2, sys.modules[__name__])


def add_backend(name: str, backend: Any) -> None:
    """Registers a backend of tree attention under a new name; a known one stays."""
    of_op: Any = op
    of_registry: Any = registry
    before = of_op.TREE_ATTENTION_BACKENDS
    if name in before:
        return
    known: Any = {**before, name: backend}
    held: Any = {**of_registry._BACKENDS, registry.TREE_ATTENTION: MappingProxyType(known)}
    of_op.TREE_ATTENTION_BACKENDS = MappingProxyType(known)
    of_registry._BACKENDS = MappingProxyType(held)


def sequence_bounds(node_table_M4: Tensor) -> tuple[Tensor, int]:
    """Offsets, int32 [M + 1] on the CPU, and the longest sequence, of single-node trees.

    Raises:
        ValueError: A node has a parent, so attention is not causal within one sequence.
    """
    if bool((node_table_M4[:, 3] >= 0).any()):
        raise ValueError("replicated attention got a forest with shared prefixes")
    stop_M = node_table_M4[:, 1]
    longest = int((stop_M - node_table_M4[:, 0]).max())
    return torch.nn.functional.pad(stop_M, (1, 0)).to(torch.int32), longest


def _sequences(operands: Operands) -> tuple[Tensor, Tensor, int, int]:
    offsets, longest = sequence_bounds(operands.plan[0])
    on_device = offsets.to(operands.q_QNH.device, non_blocking=True)
    return on_device, on_device, longest, longest
