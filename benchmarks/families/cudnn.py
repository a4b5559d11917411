"""cuDNN's attention as another backend of tree attention, for replicated rollouts without sinks.

It takes forests of single-node trees, one sequence after the other; layers with a window go to
FlashAttention-2. In: operands of our op. Out: its results, without a log-sum-exp, which cuDNN does
not give. The graph of a forward waits for its backward, with copies of its operands: compiled
layers use an operand's memory again after the op's last read. Backwards come in reverse order, as
layers keep the op's results.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.families.recurrences import recording
from benchmarks.step import varlen
from ratoon_kernels import TreeLayout
from ratoon_kernels.tree_attention.operands import Operands, Upstream

CUDNN = "cudnn"


class CudnnAttention:
    """Owns the graphs of forwards whose backward has not come."""

    def __init__(self) -> None:
        self._graphs: list[tuple[Tensor, tuple[Tensor, Tensor, Tensor]]] = []
        self.unavailable_reason = varlen.unavailable_reason
        self.unsupported_reason = varlen.unsupported_reason

    def plan(self, layout: TreeLayout, window: int | None = None) -> list[Tensor]:
        """See `TreeAttentionBackend`."""
        return varlen.plan(layout, window)

    def forward(self, operands: Operands) -> tuple[Tensor, Tensor]:
        """See `TreeAttentionBackend`."""
        if operands.window is not None:
            return varlen.forward(operands)
        offsets, _ = varlen.sequence_bounds(operands.plan[0])
        given = (operands.q_QNH, operands.k_SKH, operands.v_SKH)
        with recording(), sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            q, k, v = (x.detach().clone().requires_grad_() for x in given)
            out_TNH = attend_each((q, k, v), offsets.tolist(), operands.scale)
        self._graphs.append((out_TNH, (q, k, v)))
        unknown_NT = torch.zeros(q.shape[1::-1], dtype=torch.float32, device=q.device)
        return out_TNH.detach(), unknown_NT

    def backward(self, operands: Operands, upstream: Upstream) -> tuple[Tensor, Tensor, Tensor]:
        """See `TreeAttentionBackend`."""
        if operands.window is not None:
            return varlen.backward(operands, upstream)
        out_TNH, given = self._graphs.pop()
        dq, dk, dv = torch.autograd.grad(out_TNH, given, upstream.dout_QNH)
        return dq.contiguous(), dk.contiguous(), dv.contiguous()


def attend_each(given: tuple[Tensor, Tensor, Tensor], offsets: list[int], scale: float) -> Tensor:
    """Causal attention [T, N, H] within each sequence, by torch's own function."""
    outs: list[Tensor] = []
    for start, stop in pairwise(offsets):
        q, k, v = (x[start:stop].transpose(0, 1)[None] for x in given)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=True
        )
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)
