"""Inputs of a tree attention backend: checked tensors and the packed ranges that they cover.

Row i of `q_QNH` is the packed token `queries.start + i`, row j of `k_SKH` and `v_SKH` is
`keys.start + j`, while `end_T` always covers the whole forest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon_kernels.precision import accumulation_dtype
from ratoon_kernels.span import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """Queries of one packed range, keys and values of another, and the forest's mask.

    Attributes:
        q_QNH: Queries.
        k_SKH: Keys.
        v_SKH: Values.
        end_T: int32; one past the last query that attends each key of the forest.
        plan: The tensors that the backend's `plan` gave, or its `partial_plan` for a part.
        scale: Factor of q k^T before the softmax.
        queries: Packed range of the queries.
        keys: Packed range of the keys and values.
        is_deterministic: Same bits on every call are required, not only likely.
    """

    q_QNH: Tensor
    k_SKH: Tensor
    v_SKH: Tensor
    end_T: Tensor
    plan: Sequence[Tensor]
    scale: float
    queries: Span
    keys: Span
    is_deterministic: bool

    @property
    def accumulation_dtype(self) -> torch.dtype:
        """Dtype of sums and log-sum-exps."""
        return accumulation_dtype(self.q_QNH.dtype)

    def narrow(self, queries: Span, keys: Span) -> "Operands":
        """Returns the same forest with a part of the queries and of the keys."""
        key_rows = keys.rows_from(self.keys.start)
        return Operands(
            q_QNH=self.q_QNH[queries.rows_from(self.queries.start)],
            k_SKH=self.k_SKH[key_rows],
            v_SKH=self.v_SKH[key_rows],
            end_T=self.end_T,
            plan=self.plan,
            scale=self.scale,
            queries=queries,
            keys=keys,
            is_deterministic=self.is_deterministic,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """Inputs of a backward for its queries, besides the operands.

    Attributes:
        dout_QNH: Gradient of the output, in the dtype of q.
        dlse_NQ: Gradient of the log-sum-exp in the accumulation dtype, or None where it is zero.
        out_QNH: Output over *all* keys that the queries attend, in the dtype of q.
        lse_NQ: Log-sum-exp over all those keys, in the accumulation dtype.
    """

    dout_QNH: Tensor
    dlse_NQ: Tensor | None
    out_QNH: Tensor
    lse_NQ: Tensor

    def narrow(self, rows: slice) -> "Upstream":
        """Returns the part of some rows."""
        return Upstream(
            dout_QNH=self.dout_QNH[rows],
            dlse_NQ=None if self.dlse_NQ is None else self.dlse_NQ[:, rows],
            out_QNH=self.out_QNH[rows],
            lse_NQ=self.lse_NQ[:, rows],
        )
