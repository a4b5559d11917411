"""Inputs of a tree attention backend: checked tensors and the packed ranges that they cover.

Row i of `q_QNH` is the packed token `queries.start + i`, row j of `k_SKH` and `v_SKH` is
`keys.start + j`, while `end_T` always covers the whole forest. Values, and so outputs, may have
another head size than queries and keys. The checks read shapes, strides and
dtypes only, so that torch.compile traces them as guards.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon_kernels.errors import KernelArgumentError
from ratoon_kernels.layout import TreeLayout
from ratoon_kernels.precision import ACCUMULATION_DTYPES, accumulation_dtype
from ratoon_kernels.tiles import Span

_NUM_DIMS = 3


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
        window: Tokens of its path that a query sees, itself the last of them; None: all.
        queries: Packed range of the queries.
        keys: Packed range of the keys and values.
        is_deterministic: Same bits on every call are required, not only likely.
        sink_N: Logits that join the softmax's denominator, in the whole form of a backend that
            applies them itself (`registry.applies_sinks`); None elsewhere, and without sinks.
    """

    q_QNH: Tensor
    k_SKH: Tensor
    v_SKH: Tensor
    end_T: Tensor
    plan: Sequence[Tensor]
    scale: float
    window: int | None
    queries: Span
    keys: Span
    is_deterministic: bool
    sink_N: Tensor | None = None

    @property
    def accumulation_dtype(self) -> torch.dtype:
        """Dtype of sums and log-sum-exps."""
        return accumulation_dtype(self.q_QNH.dtype)

    @property
    def out_shape(self) -> tuple[int, int, int]:
        """Queries, query heads and head size of the values."""
        num_queries, num_heads, _ = self.q_QNH.shape
        return num_queries, num_heads, self.v_SKH.shape[-1]

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
            window=self.window,
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
        dsink_N: Where the operands have sinks: what their gradient is written to, in the
            accumulation dtype. Output and log-sum-exp have the sinks in them then.
    """

    dout_QNH: Tensor
    dlse_NQ: Tensor | None
    out_QNH: Tensor
    lse_NQ: Tensor
    dsink_N: Tensor | None = None

    def narrow(self, rows: slice) -> "Upstream":
        """Returns the part of some rows."""
        return Upstream(
            dout_QNH=self.dout_QNH[rows],
            dlse_NQ=None if self.dlse_NQ is None else self.dlse_NQ[:, rows],
            out_QNH=self.out_QNH[rows],
            lse_NQ=self.lse_NQ[:, rows],
        )


def check_operands(
    tensors: dict[str, Tensor], layout: TreeLayout, scale: float, window: int | None
) -> None:
    """Checks all that holds of the whole form and of the partial one.

    Args:
        tensors: Queries, keys and values in this order, by the caller's parameter names.
        layout: Layout of the forest.
        scale: Factor of q k^T before the softmax.
        window: Tokens of its path that a query sees, or None.

    Raises:
        KernelArgumentError: On ranks, shapes, dtypes, devices, strides, head ratio, scale or
            window.
    """
    (q_name, q), (k_name, k), (v_name, v) = tensors.items()
    for name, tensor in tensors.items():
        if tensor.ndim != _NUM_DIMS or 0 in tensor.shape[1:]:
            expected = "tokens, heads and head_dim, of which only tokens may be 0"
            raise KernelArgumentError(name, f"shape {tuple(tensor.shape)}, expected {expected}")
        if tensor.dtype not in ACCUMULATION_DTYPES:
            expected = ", ".join(str(dtype) for dtype in ACCUMULATION_DTYPES)
            raise KernelArgumentError(name, f"dtype {tensor.dtype}, expected one of {expected}")
        check_like(name, tensor, q_name, dtype=q.dtype, device=q.device)
        check_inner_stride(name, tensor)
    if v.shape[:2] != k.shape[:2]:
        got = f"shape {tuple(v.shape)}, expected {tuple(k.shape[:2])} as {k_name} in front"
        raise KernelArgumentError(v_name, got)
    if k.shape[2] != q.shape[2]:
        got = f"head_dim {k.shape[2]}, expected {q.shape[2]} as {q_name}"
        raise KernelArgumentError(k_name, got)
    if q.shape[1] % k.shape[1] != 0:
        got = f"{k.shape[1]} kv heads, which do not divide the {q.shape[1]} heads of {q_name}"
        raise KernelArgumentError(k_name, got)
    if layout.end_T.device != q.device:
        got = f"on {layout.end_T.device}, expected {q.device} as {q_name}"
        raise KernelArgumentError("layout", got)
    if not math.isfinite(scale):
        raise KernelArgumentError("scale", f"{scale}, expected a finite number")
    if window is not None and window < 1:
        raise KernelArgumentError("window", f"{window}, expected at least 1 token, or None")


def check_sink(sink_N: Tensor, q: Tensor, q_name: str) -> None:
    """Checks that a sink is one floating-point logit for each query head.

    Raises:
        KernelArgumentError: Naming `sink_N`.
    """
    if sink_N.shape != (q.shape[1],):
        got = f"shape {tuple(sink_N.shape)}, expected ({q.shape[1]},): the heads of {q_name}"
        raise KernelArgumentError("sink_N", got)
    if sink_N.dtype not in ACCUMULATION_DTYPES:
        expected = ", ".join(str(dtype) for dtype in ACCUMULATION_DTYPES)
        raise KernelArgumentError("sink_N", f"dtype {sink_N.dtype}, expected one of {expected}")
    if sink_N.device != q.device:
        raise KernelArgumentError("sink_N", f"on {sink_N.device}, expected {q.device} as {q_name}")


def check_whole(q_TNH: Tensor, k_TKH: Tensor, layout: TreeLayout) -> None:
    """Checks that queries and keys are all tokens of the layout.

    Raises:
        KernelArgumentError: Naming `layout` where q has another length, `k_TKH` where k has.
    """
    num_tokens = layout.end_T.shape[0]
    if q_TNH.shape[0] != num_tokens:
        got = f"of {num_tokens} tokens, expected {q_TNH.shape[0]} as q_TNH"
        raise KernelArgumentError("layout", got)
    if k_TKH.shape[0] != q_TNH.shape[0]:
        got = f"{k_TKH.shape[0]} tokens, expected {q_TNH.shape[0]} as q_TNH"
        raise KernelArgumentError("k_TKH", got)


def check_range(name: str, start: int, num_rows: int, layout: TreeLayout) -> None:
    """Checks that a packed range lies in the forest.

    Raises:
        KernelArgumentError: Naming the argument that gives the start of the range.
    """
    if not 0 <= start <= start + num_rows <= layout.end_T.shape[0]:
        got = f"{start} with {num_rows} rows, expected a range within [0, {layout.end_T.shape[0]})"
        raise KernelArgumentError(name, got)


def check_accumulator(name: str, buffer: Tensor, like: Tensor) -> None:
    """Checks a buffer that gradients are added to: the shape of `like`, accumulation dtype.

    Raises:
        KernelArgumentError: Naming the buffer.
    """
    if buffer.shape != like.shape:
        got = f"shape {tuple(buffer.shape)}, expected {tuple(like.shape)}"
        raise KernelArgumentError(name, got)
    check_like(name, buffer, "k_SKH", dtype=accumulation_dtype(like.dtype), device=like.device)
    check_inner_stride(name, buffer)


def check_like(
    name: str, tensor: Tensor, model: str, *, dtype: torch.dtype, device: torch.device
) -> None:
    """Checks dtype and device against what another argument, `model`, asks for.

    Raises:
        KernelArgumentError: Naming the tensor.
    """
    if tensor.dtype != dtype:
        raise KernelArgumentError(name, f"dtype {tensor.dtype}, expected {dtype} by {model}")
    if tensor.device != device:
        raise KernelArgumentError(name, f"on {tensor.device}, expected {device} as {model}")


def check_inner_stride(name: str, tensor: Tensor) -> None:
    """Checks that the innermost dimension is dense.

    Raises:
        KernelArgumentError: Naming the tensor.
    """
    if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        raise KernelArgumentError(name, f"innermost stride {tensor.stride(-1)}, expected 1")
