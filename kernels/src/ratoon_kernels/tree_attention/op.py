"""Tree attention as a torch custom op: argument checks, dispatch, fake and autograd.

No backend sees an argument that was not checked here, and the op that a graph or a checkpoint
records is one, `ratoon::tree_attention`, whatever the backend.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ratoon_kernels.layout import TreeLayout
from ratoon_kernels.precision import accumulation_dtype
from ratoon_kernels.registry import select_backend
from ratoon_kernels.span import Span
from ratoon_kernels.tree_attention.backends import BACKENDS, OP
from ratoon_kernels.tree_attention.checks import check_operands, check_whole
from ratoon_kernels.tree_attention.operands import Operands, Upstream


def tree_attention(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    layout: TreeLayout,
    scale: float,
    *,
    backend: str | None = None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """Causal softmax attention of each token to its own path in a packed forest.

    Token q attends token k if and only if `k <= q < layout.end_T[k]`. Query head n reads kv head
    n // (N / K). Differentiable in q, k and v, through the output and the log-sum-exp.

    Args:
        q_TNH: Queries of T packed tokens; bf16, fp16, fp32 or fp64, innermost stride 1.
        k_TKH: Keys, same dtype and device; K divides N.
        v_TKH: Values, as the keys.
        layout: Layout of the forest, on the same device.
        scale: Factor of q k^T before the softmax, usually head_dim ** -0.5.
        backend: A backend's name, or None for the best one available.
        deterministic: Require the same bits on every call with the same inputs.

    Returns:
        out_TNH in the dtype of q, and lse_NT in fp32 (fp64 for fp64): the natural log of the sum
        of exp(scale * q k^T) over the attended keys.

    Raises:
        KernelArgumentError: An argument is wrong; the message names it.
        BackendUnavailableError: The backend asked for cannot serve the call.
    """
    check_operands({"q_TNH": q_TNH, "k_TKH": k_TKH, "v_TKH": v_TKH}, layout, scale)
    check_whole(q_TNH, k_TKH, layout)
    name = select_backend(
        OP, backend, q_TNH.device, q_TNH.dtype, q_TNH.shape[-1], deterministic=deterministic
    )
    plan = BACKENDS[name].plan(layout)
    return _forward(q_TNH, k_TKH, v_TKH, layout.end_T, plan, scale, name, deterministic)


@torch.library.custom_op("ratoon::tree_attention", mutates_args=())
def _forward(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    end_T: Tensor,
    plan: Sequence[Tensor],
    scale: float,
    backend: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    operands = _whole(q_TNH, k_TKH, v_TKH, end_T, plan, scale, deterministic)
    return BACKENDS[backend].forward(operands)


@_forward.register_fake
def _(q_TNH: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, _ = q_TNH.shape
    lse_NT = q_TNH.new_empty((num_heads, num_tokens), dtype=accumulation_dtype(q_TNH.dtype))
    return q_TNH.new_empty(q_TNH.shape), lse_NT


@torch.library.custom_op("ratoon::tree_attention_backward", mutates_args=())
def _backward(
    dout_TNH: Tensor,
    dlse_NT: Tensor | None,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    out_TNH: Tensor,
    lse_NT: Tensor,
    end_T: Tensor,
    plan: Sequence[Tensor],
    scale: float,
    backend: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    operands = _whole(q_TNH, k_TKH, v_TKH, end_T, plan, scale, deterministic)
    # Autograd gives expanded gradients (of a sum, say), which kernels do not read.
    dout_TNH = dout_TNH if dout_TNH.stride(-1) == 1 else dout_TNH.contiguous()
    upstream = Upstream(dout_QNH=dout_TNH, dlse_NQ=dlse_NT, out_QNH=out_TNH, lse_NQ=lse_NT)
    return BACKENDS[backend].backward(operands, upstream)


@_backward.register_fake
def _(
    _dout_TNH: Tensor,
    _dlse_NT: Tensor | None,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    *_others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return q_TNH.new_empty(q_TNH.shape), k_TKH.new_empty(k_TKH.shape), v_TKH.new_empty(v_TKH.shape)


def _whole(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    end_T: Tensor,
    plan: Sequence[Tensor],
    scale: float,
    is_deterministic: bool,
) -> Operands:
    tokens = Span(0, q_TNH.shape[0])
    return Operands(
        q_QNH=q_TNH,
        k_SKH=k_TKH,
        v_SKH=v_TKH,
        end_T=end_T,
        plan=plan,
        scale=scale,
        queries=tokens,
        keys=tokens,
        is_deterministic=is_deterministic,
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_TNH, k_TKH, v_TKH, end_T, plan, scale, backend, deterministic = inputs
    ctx.save_for_backward(q_TNH, k_TKH, v_TKH, *output, end_T, *plan)
    ctx.settings = (scale, backend, deterministic)
    # An output that nothing reads then has the gradient None, not zeros to be computed with.
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout_TNH: Tensor | None, dlse_NT: Tensor | None) -> tuple[Any, ...]:
    q_TNH, k_TKH, v_TKH, out_TNH, lse_NT, end_T, *plan = ctx.saved_tensors
    dout_TNH = torch.zeros_like(q_TNH) if dout_TNH is None else dout_TNH
    grads = _backward(
        dout_TNH, dlse_NT, q_TNH, k_TKH, v_TKH, out_TNH, lse_NT, end_T, plan, *ctx.settings
    )
    return *grads, None, [None] * len(plan), None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)
