"""The gated delta rule as a torch custom op, and its partial form outside autograd.

No backend sees an argument that was not checked here, and the op that a graph or a checkpoint
records is one, `ratoon::gated_delta_rule`, whatever the backend. It keeps nothing but its inputs
and output: the backward computes the states of chunks again.

The partial form runs a part of a larger forest. Its roots may begin from states that other parts
handed on, and ends of its nodes are handed on to others. Over any such split the results, and the
gradients added up, equal those of the whole.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ratoon_kernels.gated_delta.operands import Gradients, Handover, Operands, check_rule
from ratoon_kernels.layout import TreeLayout
from ratoon_kernels.precision import accumulation_dtype
from ratoon_kernels.registry import GATED_DELTA, GATED_DELTA_BACKENDS, select_backend
from ratoon_kernels.tree_attention.operands import check_like


def gated_delta_rule(
    q_TKD: Tensor,
    k_TKD: Tensor,
    v_TNV: Tensor,
    g_TN: Tensor,
    beta_TN: Tensor,
    layout: TreeLayout,
    scale: float,
    *,
    backend: str | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Linear attention of each token to its own path in a packed forest, by the gated delta rule.

    Yang et al., 2024, arXiv:2412.06464. Along a path, from a state S [D, V] of zeros, for head n of
    values and head n // (N / K) of queries and keys, both normalised to length 1:

        S_t = exp(g_t) S_t-1 + k_t (beta_t (v_t - exp(g_t) S_t-1^T k_t))^T,    o_t = scale S_t^T q_t

    Differentiable in all five tensors.

    Args:
        q_TKD: Queries of T packed tokens; bf16, fp16, fp32 or fp64, innermost stride 1.
        k_TKD: Keys, same dtype and device.
        v_TNV: Values, likewise; K divides N.
        g_TN: Logarithms of decays, at most 0; fp32 (fp64 for fp64).
        beta_TN: Strengths of the updates, in the dtype of q.
        layout: Layout of the forest, on the same device.
        scale: Factor of the normalised queries, usually D ** -0.5.
        backend: A backend's name, or None for the best one available.
        deterministic: Require the same bits on every call with the same inputs.

    Returns:
        out_TNV in the dtype of q.

    Raises:
        KernelArgumentError: An argument is wrong; the message names it.
        BackendUnavailableError: The backend asked for cannot serve the call.
    """
    operands = Operands(
        q_TKD=q_TKD,
        k_TKD=k_TKD,
        v_TNV=v_TNV,
        g_TN=g_TN,
        beta_TN=beta_TN,
        plan=(),
        scale=scale,
        is_deterministic=deterministic,
    )
    check_rule(operands, layout)
    name = _select(q_TKD, v_TNV, backend, deterministic)
    plan = GATED_DELTA_BACKENDS[name].plan(layout)
    return _forward(q_TKD, k_TKD, v_TNV, g_TN, beta_TN, plan, scale, name, deterministic)


@torch.library.custom_op("ratoon::gated_delta_rule", mutates_args=())
def _forward(
    q_TKD: Tensor,
    k_TKD: Tensor,
    v_TNV: Tensor,
    g_TN: Tensor,
    beta_TN: Tensor,
    plan: Sequence[Tensor],
    scale: float,
    backend: str,
    deterministic: bool,
) -> Tensor:
    operands = _whole(q_TKD, k_TKD, v_TNV, g_TN, beta_TN, plan, scale, deterministic)
    return GATED_DELTA_BACKENDS[backend].forward(operands)[0]


@_forward.register_fake
def _(_q_TKD: Tensor, _k_TKD: Tensor, v_TNV: Tensor, *_others: Any) -> Tensor:
    return v_TNV.new_empty(v_TNV.shape)


@torch.library.custom_op("ratoon::gated_delta_rule_backward", mutates_args=())
def _backward(
    dout_TNV: Tensor,
    q_TKD: Tensor,
    k_TKD: Tensor,
    v_TNV: Tensor,
    g_TN: Tensor,
    beta_TN: Tensor,
    plan: Sequence[Tensor],
    scale: float,
    backend: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    operands = _whole(q_TKD, k_TKD, v_TNV, g_TN, beta_TN, plan, scale, deterministic)
    # Autograd gives expanded gradients (of a sum, say), which kernels do not read.
    dout_TNV = dout_TNV if dout_TNV.stride(-1) == 1 else dout_TNV.contiguous()
    grads = GATED_DELTA_BACKENDS[backend].backward(operands, dout_TNV, None)
    return grads.dq_TKD, grads.dk_TKD, grads.dv_TNV, grads.dg_TN, grads.dbeta_TN


@_backward.register_fake
def _(
    _dout_TNV: Tensor,
    q_TKD: Tensor,
    k_TKD: Tensor,
    v_TNV: Tensor,
    g_TN: Tensor,
    beta_TN: Tensor,
    *_others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        q_TKD.new_empty(q_TKD.shape),
        k_TKD.new_empty(k_TKD.shape),
        v_TNV.new_empty(v_TNV.shape),
        g_TN.new_empty(g_TN.shape),
        beta_TN.new_empty(beta_TN.shape),
    )


def _whole(
    q_TKD: Tensor,
    k_TKD: Tensor,
    v_TNV: Tensor,
    g_TN: Tensor,
    beta_TN: Tensor,
    plan: Sequence[Tensor],
    scale: float,
    is_deterministic: bool,
) -> Operands:
    return Operands(
        q_TKD=q_TKD,
        k_TKD=k_TKD,
        v_TNV=v_TNV,
        g_TN=g_TN,
        beta_TN=beta_TN,
        plan=plan,
        scale=scale,
        is_deterministic=is_deterministic,
    )


def _select(q_TKD: Tensor, v_TNV: Tensor, backend: str | None, deterministic: bool) -> str:
    return select_backend(
        GATED_DELTA,
        backend,
        q_TKD.device,
        q_TKD.dtype,
        q_TKD.shape[-1],
        value_dim=v_TNV.shape[-1],
        deterministic=deterministic,
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    *tensors, plan, scale, backend, deterministic = inputs
    ctx.save_for_backward(*tensors, *plan)
    ctx.settings = (scale, backend, deterministic)


def _differentiate(ctx: Any, dout_TNV: Tensor) -> tuple[Any, ...]:
    q_TKD, k_TKD, v_TNV, g_TN, beta_TN, *plan = ctx.saved_tensors
    grads = _backward(dout_TNV, q_TKD, k_TKD, v_TNV, g_TN, beta_TN, plan, *ctx.settings)
    return *grads, [None] * len(plan), None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)


@torch.no_grad()
def gated_delta_partial_forward(
    q_TKD: Tensor,
    k_TKD: Tensor,
    v_TNV: Tensor,
    g_TN: Tensor,
    beta_TN: Tensor,
    layout: TreeLayout,
    scale: float,
    *,
    handover: Handover,
    first_SNDV: Tensor,
    backend: str | None = None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over a part of a forest, some of whose roots continue other parts.

    Not differentiable; see `gated_delta_partial_backward`.

    Args:
        q_TKD: Queries; dtypes and strides as of `gated_delta_rule`.
        k_TKD: Keys.
        v_TNV: Values.
        g_TN: Logarithms of decays.
        beta_TN: Strengths of the updates.
        layout: Layout of these tokens alone: nodes whose parents are elsewhere are roots.
        scale: Factor of the normalised queries.
        handover: Which roots begin from given states, and which nodes' ends are returned.
        first_SNDV: Those states, fp32 (fp64 for fp64).
        backend: A backend's name, or None for the best one available.
        deterministic: Require the same bits on every call with the same inputs.

    Returns:
        out_TNV in the dtype of q, and end_ENDV, the states at the handed nodes' ends, fp32 (fp64
        for fp64).

    Raises:
        KernelArgumentError: An argument is wrong; the message names it.
        BackendUnavailableError: The backend asked for cannot serve the call.
    """
    chosen, operands = _prepare(
        _whole(q_TKD, k_TKD, v_TNV, g_TN, beta_TN, (), scale, deterministic),
        layout,
        handover,
        first_SNDV,
        backend,
    )
    return GATED_DELTA_BACKENDS[chosen].forward(operands)


@torch.no_grad()
def gated_delta_partial_backward(
    dout_TNV: Tensor,
    dend_ENDV: Tensor,
    q_TKD: Tensor,
    k_TKD: Tensor,
    v_TNV: Tensor,
    g_TN: Tensor,
    beta_TN: Tensor,
    layout: TreeLayout,
    scale: float,
    *,
    handover: Handover,
    first_SNDV: Tensor,
    backend: str | None = None,
    deterministic: bool = False,
) -> Gradients:
    """Gradients of what `gated_delta_partial_forward` did, also of the first states.

    Args:
        dout_TNV: Gradient of the output, in the dtype of q.
        dend_ENDV: Gradient of the handed ends, fp32 (fp64 for fp64).
        q_TKD: Queries, as in the forward; and so are the others.
        k_TKD: Keys.
        v_TNV: Values.
        g_TN: Logarithms of decays.
        beta_TN: Strengths of the updates.
        layout: Layout of these tokens alone.
        scale: Factor of the normalised queries.
        handover: As in the forward.
        first_SNDV: As in the forward.
        backend: A backend's name, or None for the best one available.
        deterministic: Require the same bits on every call with the same inputs.

    Raises:
        KernelArgumentError: An argument is wrong; the message names it.
        BackendUnavailableError: The backend asked for cannot serve the call.
    """
    chosen, operands = _prepare(
        _whole(q_TKD, k_TKD, v_TNV, g_TN, beta_TN, (), scale, deterministic),
        layout,
        handover,
        first_SNDV,
        backend,
    )
    check_like("dout_TNV", dout_TNV, "q_TKD", dtype=q_TKD.dtype, device=q_TKD.device)
    wide = accumulation_dtype(q_TKD.dtype)
    check_like("dend_ENDV", dend_ENDV, "q_TKD", dtype=wide, device=q_TKD.device)
    dout_TNV = dout_TNV if dout_TNV.stride(-1) == 1 else dout_TNV.contiguous()
    return GATED_DELTA_BACKENDS[chosen].backward(operands, dout_TNV, dend_ENDV)


def _prepare(
    operands: Operands,
    layout: TreeLayout,
    handover: Handover,
    first_SNDV: Tensor,
    backend: str | None,
) -> tuple[str, Operands]:
    operands = replace(operands, handover=handover, first_SNDV=first_SNDV)
    check_rule(operands, layout)
    name = _select(operands.q_TKD, operands.v_TNV, backend, operands.is_deterministic)
    return name, replace(operands, plan=GATED_DELTA_BACKENDS[name].plan(layout))
