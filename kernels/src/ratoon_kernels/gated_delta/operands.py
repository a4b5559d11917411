"""Inputs of a gated delta backend, and what a forest takes from and hands to other forwards.

The tokens at hand are a whole packed forest. In a part of a larger forest, some roots continue
nodes of other parts: they begin from given states and rows, not from zeros.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon_kernels.errors import KernelArgumentError
from ratoon_kernels.layout import TreeLayout
from ratoon_kernels.precision import ACCUMULATION_DTYPES, accumulation_dtype
from ratoon_kernels.tree_attention.operands import check_inner_stride, check_like

_NUM_DIMS = 3
_NODE_PARENT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """Nodes of a part of a forest that continue other parts, or that other parts continue.

    Attributes:
        first_M: int64 on the CPU; row of the first states from which each node begins; -1: it
            begins from its parent's end, or from zeros if it is a root.
        handed_E: int64 on the CPU, ascending; nodes whose ends are returned.
    """

    first_M: Tensor
    handed_E: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """Checked inputs of the recurrence.

    Attributes:
        q_TKD: Queries before their normalisation.
        k_TKD: Keys, likewise.
        v_TNV: Values.
        g_TN: Logarithms of decays, at most 0, in the accumulation dtype.
        beta_TN: Strengths of the updates, in the dtype of q.
        plan: The tensors that the backend's `plan` gave.
        scale: Factor of the normalised queries.
        is_deterministic: Same bits on every call are required, not only likely.
        handover: None: all nodes begin here, and none is handed on.
        first_SNDV: First states in the accumulation dtype; None without a handover.
    """

    q_TKD: Tensor
    k_TKD: Tensor
    v_TNV: Tensor
    g_TN: Tensor
    beta_TN: Tensor
    plan: Sequence[Tensor]
    scale: float
    is_deterministic: bool
    handover: Handover | None = None
    first_SNDV: Tensor | None = None

    @property
    def accumulation_dtype(self) -> torch.dtype:
        """Dtype of sums and states."""
        return accumulation_dtype(self.q_TKD.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """Gradients of the inputs, each in its input's dtype; `dfirst_SNDV` None without first
    states."""

    dq_TKD: Tensor
    dk_TKD: Tensor
    dv_TNV: Tensor
    dg_TN: Tensor
    dbeta_TN: Tensor
    dfirst_SNDV: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionOperands:
    """Checked inputs of the convolution.

    Attributes:
        x_TC: Rows, one a token.
        weight_CW: Taps of each channel, the last of which multiplies the token's own row.
        plan: The tensors that the backend's `plan` gave.
        handover: None: all nodes begin here, and none is handed on.
        first_SRC: The R = W - 1 rows before the nodes that continue others, zeros before a root's
            first; in the dtype of x; None without a handover.
    """

    x_TC: Tensor
    weight_CW: Tensor
    plan: Sequence[Tensor]
    handover: Handover | None = None
    first_SRC: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionGradients:
    """Gradients of the inputs, each in its input's dtype, but of `first_SRC` and of the weight in
    the accumulation dtype."""

    dx_TC: Tensor
    dweight_CW: Tensor
    dfirst_SRC: Tensor | None = None


def check_rule(operands: Operands, layout: TreeLayout) -> None:
    """Checks inputs of the recurrence.

    Raises:
        KernelArgumentError: On shapes, dtypes, devices, strides, head ratio or scale.
    """
    q = operands.q_TKD
    if q.ndim != _NUM_DIMS or 0 in q.shape[1:] or operands.v_TNV.ndim != _NUM_DIMS:
        got = f"shape {tuple(q.shape)}, expected tokens, heads and head size"
        raise KernelArgumentError("q_TKD", got)
    _check_dtype("q_TKD", q)
    num_tokens, num_heads, value_dim = operands.v_TNV.shape
    shapes = {
        "k_TKD": (operands.k_TKD, tuple(q.shape), q.dtype),
        "v_TNV": (operands.v_TNV, (q.shape[0], num_heads, value_dim), q.dtype),
        "g_TN": (operands.g_TN, (q.shape[0], num_heads), operands.accumulation_dtype),
        "beta_TN": (operands.beta_TN, (q.shape[0], num_heads), q.dtype),
    }
    for name, (tensor, shape, dtype) in shapes.items():
        _check_shape(name, tensor, shape)
        check_like(name, tensor, "q_TKD", dtype=dtype, device=q.device)
        check_inner_stride(name, tensor)
    check_inner_stride("q_TKD", q)
    if num_heads == 0 or value_dim == 0 or num_heads % q.shape[1]:
        got = f"{num_heads} heads of {value_dim}, expected a multiple of the {q.shape[1]} of q_TKD"
        raise KernelArgumentError("v_TNV", got)
    _check_layout(layout, num_tokens, q, "q_TKD")
    if not math.isfinite(operands.scale):
        raise KernelArgumentError("scale", f"{operands.scale}, expected a finite number")
    if operands.handover is not None:
        shape = (num_heads, q.shape[2], value_dim)
        _check_handover(operands.handover, layout, operands.first_SNDV, "first_SNDV", shape)
        assert operands.first_SNDV is not None
        wide = operands.accumulation_dtype
        check_like("first_SNDV", operands.first_SNDV, "q_TKD", dtype=wide, device=q.device)


def check_convolution(operands: ConvolutionOperands, layout: TreeLayout) -> None:
    """Checks inputs of the convolution.

    Raises:
        KernelArgumentError: On shapes, dtypes, devices or strides.
    """
    x, weight = operands.x_TC, operands.weight_CW
    if x.ndim != 2 or x.shape[1] == 0:
        got = f"shape {tuple(x.shape)}, expected tokens and channels"
        raise KernelArgumentError("x_TC", got)
    _check_dtype("x_TC", x)
    check_inner_stride("x_TC", x)
    if weight.ndim != 2 or weight.shape[0] != x.shape[1] or weight.shape[1] == 0:
        got = f"shape {tuple(weight.shape)}, expected the {x.shape[1]} channels of x_TC, and taps"
        raise KernelArgumentError("weight_CW", got)
    check_like("weight_CW", weight, "x_TC", dtype=x.dtype, device=x.device)
    _check_layout(layout, x.shape[0], x, "x_TC")
    if operands.handover is not None:
        shape = (weight.shape[1] - 1, x.shape[1])
        _check_handover(operands.handover, layout, operands.first_SRC, "first_SRC", shape)
        assert operands.first_SRC is not None
        check_like("first_SRC", operands.first_SRC, "x_TC", dtype=x.dtype, device=x.device)


def _check_dtype(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in ACCUMULATION_DTYPES:
        expected = ", ".join(str(dtype) for dtype in ACCUMULATION_DTYPES)
        raise KernelArgumentError(name, f"dtype {tensor.dtype}, expected one of {expected}")


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise KernelArgumentError(name, f"shape {tuple(tensor.shape)}, expected {expected}")


def _check_layout(layout: TreeLayout, num_tokens: int, like: Tensor, name: str) -> None:
    if layout.end_T.shape[0] != num_tokens:
        got = f"of {layout.end_T.shape[0]} tokens, expected {num_tokens} as {name}"
        raise KernelArgumentError("layout", got)
    if layout.end_T.device != like.device:
        got = f"on {layout.end_T.device}, expected {like.device} as {name}"
        raise KernelArgumentError("layout", got)


def _check_handover(
    handover: Handover, layout: TreeLayout, first: Tensor | None, name: str, shape: tuple[int, ...]
) -> None:
    """Checks that only roots begin from given states, each of which there is, and that ends are
    those of nodes."""
    num_nodes = layout.node_table_M4.shape[0]
    _check_shape("handover.first_M", handover.first_M, (num_nodes,))
    if first is None or tuple(first.shape[1:]) != shape:
        got = "nothing" if first is None else f"shape {tuple(first.shape)}"
        raise KernelArgumentError(name, f"{got}, expected any number of {shape}")
    rows, handed = handover.first_M, handover.handed_E
    begins = rows >= 0
    if bool((begins & (layout.node_table_M4[:, _NODE_PARENT] >= 0)).any()):
        raise KernelArgumentError("handover.first_M", "a row for a node whose parent is here")
    if num_nodes and not -1 <= int(rows.min()) <= int(rows.max()) < first.shape[0]:
        expected = f"rows of {name}, of which there are {first.shape[0]}, or -1"
        raise KernelArgumentError("handover.first_M", f"{rows.tolist()}, expected {expected}")
    is_ascending = bool((handed[1:] > handed[:-1]).all())
    if len(handed) and not (is_ascending and 0 <= int(handed[0]) <= int(handed[-1]) < num_nodes):
        expected = f"ascending nodes, of which there are {num_nodes}"
        raise KernelArgumentError("handover.handed_E", f"{handed.tolist()}, expected {expected}")
