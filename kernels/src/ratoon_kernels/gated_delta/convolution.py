"""The causal convolution before the gated delta rule, with SiLU, as a torch custom op.

Taps that reach beyond a node's first token read the last rows of its path, which may be those of
its grandparent. The op that a graph or a checkpoint records is `ratoon::causal_convolution`,
whatever the backend; the partial form is outside autograd.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ratoon_kernels.gated_delta.operands import (
    ConvolutionGradients,
    ConvolutionOperands,
    Handover,
    check_convolution,
)
from ratoon_kernels.layout import TreeLayout
from ratoon_kernels.registry import (
    CAUSAL_CONVOLUTION,
    CAUSAL_CONVOLUTION_BACKENDS,
    select_backend,
)


def causal_convolution(
    x_TC: Tensor,
    weight_CW: Tensor,
    layout: TreeLayout,
    *,
    backend: str | None = None,
    deterministic: bool = False,
) -> Tensor:
    """SiLU of each channel's sum over the last W rows of each token's path.

    With x_-i the row i tokens before a token on its path, zeros before a root:

        out = silu(sum_i weight_{W-1-i} x_-i)

    Differentiable in both tensors.

    Args:
        x_TC: Rows of T packed tokens; bf16, fp16, fp32 or fp64, innermost stride 1.
        weight_CW: Taps of each channel, the token's own last; same dtype and device.
        layout: Layout of the forest, on the same device.
        backend: A backend's name, or None for the best one available.
        deterministic: Require the same bits on every call with the same inputs.

    Returns:
        out_TC in the dtype of x; sums are fp32 (fp64 for fp64).

    Raises:
        KernelArgumentError: An argument is wrong; the message names it.
        BackendUnavailableError: The backend asked for cannot serve the call.
    """
    check_convolution(ConvolutionOperands(x_TC=x_TC, weight_CW=weight_CW, plan=()), layout)
    name = _select(x_TC, weight_CW, backend, deterministic)
    return _forward(x_TC, weight_CW, CAUSAL_CONVOLUTION_BACKENDS[name].plan(layout), name)


@torch.library.custom_op("ratoon::causal_convolution", mutates_args=())
def _forward(x_TC: Tensor, weight_CW: Tensor, plan: Sequence[Tensor], backend: str) -> Tensor:
    operands = ConvolutionOperands(x_TC=x_TC, weight_CW=weight_CW, plan=plan)
    return CAUSAL_CONVOLUTION_BACKENDS[backend].forward(operands)[0]


@_forward.register_fake
def _(x_TC: Tensor, *_others: Any) -> Tensor:
    return x_TC.new_empty(x_TC.shape)


@torch.library.custom_op("ratoon::causal_convolution_backward", mutates_args=())
def _backward(
    dout_TC: Tensor, x_TC: Tensor, weight_CW: Tensor, plan: Sequence[Tensor], backend: str
) -> tuple[Tensor, Tensor]:
    operands = ConvolutionOperands(x_TC=x_TC, weight_CW=weight_CW, plan=plan)
    # Autograd gives expanded gradients (of a sum, say), which kernels do not read.
    dout_TC = dout_TC if dout_TC.stride(-1) == 1 else dout_TC.contiguous()
    grads = CAUSAL_CONVOLUTION_BACKENDS[backend].backward(operands, dout_TC, None)
    return grads.dx_TC, grads.dweight_CW.to(weight_CW.dtype, copy=True)


@_backward.register_fake
def _(_dout_TC: Tensor, x_TC: Tensor, weight_CW: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    return x_TC.new_empty(x_TC.shape), weight_CW.new_empty(weight_CW.shape)


def _select(x_TC: Tensor, weight_CW: Tensor, backend: str | None, deterministic: bool) -> str:
    return select_backend(
        CAUSAL_CONVOLUTION,
        backend,
        x_TC.device,
        x_TC.dtype,
        weight_CW.shape[1],
        deterministic=deterministic,
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    x_TC, weight_CW, plan, ctx.backend = inputs
    ctx.save_for_backward(x_TC, weight_CW, *plan)


def _differentiate(ctx: Any, dout_TC: Tensor) -> tuple[Any, ...]:
    x_TC, weight_CW, *plan = ctx.saved_tensors
    grads = _backward(dout_TC, x_TC, weight_CW, plan, ctx.backend)
    return *grads, [None] * len(plan), None


_forward.register_autograd(_differentiate, setup_context=_setup_context)


@torch.no_grad()
def causal_convolution_partial_forward(
    x_TC: Tensor,
    weight_CW: Tensor,
    layout: TreeLayout,
    *,
    handover: Handover,
    first_SRC: Tensor,
    backend: str | None = None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """The convolution over a part of a forest, some of whose roots continue other parts.

    Not differentiable; see `causal_convolution_partial_backward`.

    Args:
        x_TC: Rows; dtypes and strides as of `causal_convolution`.
        weight_CW: Taps of each channel.
        layout: Layout of these tokens alone: nodes whose parents are elsewhere are roots.
        handover: Which roots continue given rows, and which nodes' last rows are returned.
        first_SRC: The R = W - 1 rows before each such root on its path, oldest first, zeros where
            there are none, in the dtype of x.
        backend: A backend's name, or None for the best one available.
        deterministic: Require the same bits on every call with the same inputs.

    Returns:
        out_TC in the dtype of x, and last_ERC, the path's last R rows at each handed node's end.

    Raises:
        KernelArgumentError: An argument is wrong; the message names it.
        BackendUnavailableError: The backend asked for cannot serve the call.
    """
    name, operands = _prepare(
        x_TC, weight_CW, layout, handover, first_SRC, backend, deterministic=deterministic
    )
    return CAUSAL_CONVOLUTION_BACKENDS[name].forward(operands)


@torch.no_grad()
def causal_convolution_partial_backward(
    dout_TC: Tensor,
    dlast_ERC: Tensor,
    x_TC: Tensor,
    weight_CW: Tensor,
    layout: TreeLayout,
    *,
    handover: Handover,
    first_SRC: Tensor,
    backend: str | None = None,
    deterministic: bool = False,
) -> ConvolutionGradients:
    """Gradients of what `causal_convolution_partial_forward` did, also of the given rows.

    Args:
        dout_TC: Gradient of the output, in the dtype of x.
        dlast_ERC: Gradient of the handed rows, fp32 (fp64 for fp64).
        x_TC: Rows, as in the forward; and so are the others.
        weight_CW: Taps of each channel.
        layout: Layout of these tokens alone.
        handover: As in the forward.
        first_SRC: As in the forward.
        backend: A backend's name, or None for the best one available.
        deterministic: Require the same bits on every call with the same inputs.

    Raises:
        KernelArgumentError: An argument is wrong; the message names it.
        BackendUnavailableError: The backend asked for cannot serve the call.
    """
    name, operands = _prepare(
        x_TC, weight_CW, layout, handover, first_SRC, backend, deterministic=deterministic
    )
    dout_TC = dout_TC if dout_TC.stride(-1) == 1 else dout_TC.contiguous()
    return CAUSAL_CONVOLUTION_BACKENDS[name].backward(operands, dout_TC, dlast_ERC)


def _prepare(
    x_TC: Tensor,
    weight_CW: Tensor,
    layout: TreeLayout,
    handover: Handover,
    first_SRC: Tensor,
    backend: str | None,
    *,
    deterministic: bool,
) -> tuple[str, ConvolutionOperands]:
    operands = ConvolutionOperands(
        x_TC=x_TC, weight_CW=weight_CW, plan=(), handover=handover, first_SRC=first_SRC
    )
    check_convolution(operands, layout)
    name = _select(x_TC, weight_CW, backend, deterministic)
    return name, replace(operands, plan=CAUSAL_CONVOLUTION_BACKENDS[name].plan(layout))
