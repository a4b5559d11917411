"""Tree attention as a torch custom op, and its partial form outside autograd.

No backend sees an argument that was not checked here, and the op that a graph or a checkpoint
records is one, `ratoon::tree_attention`, whatever the backend.

The partial form takes queries of one packed range against keys of another. Over any split of the
keys, merged outputs equal the whole form, and the gradients of the parts add up to it. Streaming
keeps a prefix's K and V and runs waves of siblings against them; context parallelism holds a range
of keys per rank. Both hold fp32 buffers for dK and dV, so that a sum over many waves is never
rounded to 16 bits.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ratoon_kernels.errors import KernelArgumentError
from ratoon_kernels.layout import TreeLayout
from ratoon_kernels.precision import accumulation_dtype
from ratoon_kernels.registry import (
    TREE_ATTENTION,
    TREE_ATTENTION_BACKENDS,
    TreeAttentionBackend,
    select_backend,
)
from ratoon_kernels.tiles import Span
from ratoon_kernels.tree_attention.operands import (
    Operands,
    Upstream,
    check_accumulator,
    check_inner_stride,
    check_like,
    check_operands,
    check_range,
    check_whole,
)


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
        TREE_ATTENTION,
        backend,
        q_TNH.device,
        q_TNH.dtype,
        q_TNH.shape[-1],
        deterministic=deterministic,
    )
    plan = TREE_ATTENTION_BACKENDS[name].plan(layout)
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
    return TREE_ATTENTION_BACKENDS[backend].forward(operands)


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
    return TREE_ATTENTION_BACKENDS[backend].backward(operands, upstream)


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


@torch.no_grad()
def tree_attention_partial_forward(
    q_QNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    layout: TreeLayout,
    scale: float,
    *,
    query_start: int,
    key_start: int,
    backend: str | None = None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of the packed queries [query_start, + Q) to the packed keys [key_start, + S).

    Not differentiable; see `tree_attention_partial_backward`.

    Args:
        q_QNH: Queries; dtypes and strides as of `tree_attention`.
        k_SKH: Keys.
        v_SKH: Values.
        layout: Layout of the whole forest.
        scale: Factor of q k^T before the softmax.
        query_start: Packed index of the first query.
        key_start: Packed index of the first key.
        backend: A backend's name, or None for the best one available.
        deterministic: Require the same bits on every call with the same inputs.

    Returns:
        out_QNH and lse_NQ over these keys alone, both fp32 (fp64 for fp64). A query that attends
        none of them has output 0 and log-sum-exp -inf, which `merge_partials` understands.

    Raises:
        KernelArgumentError: An argument is wrong; the message names it.
        BackendUnavailableError: The backend asked for cannot serve the call.
    """
    chosen, operands = _prepare(
        q_QNH, k_SKH, v_SKH, layout, scale, query_start, key_start, backend, deterministic
    )
    return chosen.partial_forward(operands)


@torch.no_grad()
def tree_attention_partial_backward(
    dout_QNH: Tensor,
    q_QNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    out_QNH: Tensor,
    lse_NQ: Tensor,
    layout: TreeLayout,
    scale: float,
    *,
    query_start: int,
    key_start: int,
    dk_acc_SKH: Tensor,
    dv_acc_SKH: Tensor,
    backend: str | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Gradients of what `tree_attention_partial_forward` did, given the merged results.

    Args:
        dout_QNH: Gradient of the merged output, in the dtype of q.
        q_QNH: Queries, as in the forward.
        k_SKH: Keys, as in the forward.
        v_SKH: Values, as in the forward.
        out_QNH: The output merged over *all* keys of these queries, in the dtype of q.
        lse_NQ: The log-sum-exp merged over all keys, fp32 (fp64 for fp64).
        layout: Layout of the whole forest.
        scale: Factor of q k^T before the softmax.
        query_start: Packed index of the first query.
        key_start: Packed index of the first key.
        dk_acc_SKH: fp32 (fp64 for fp64) buffer that these queries' share of dK is added to.
        dv_acc_SKH: Accumulator of dV, likewise.
        backend: A backend's name, or None for the best one available.
        deterministic: Require the same bits on every call with the same inputs.

    Returns:
        dq_QNH, these keys' share, fp32 (fp64 for fp64): the caller adds up over key ranges.

    Raises:
        KernelArgumentError: An argument is wrong; the message names it.
        BackendUnavailableError: The backend asked for cannot serve the call.
    """
    chosen, operands = _prepare(
        q_QNH, k_SKH, v_SKH, layout, scale, query_start, key_start, backend, deterministic
    )
    for name, tensor in (("dout_QNH", dout_QNH), ("out_QNH", out_QNH)):
        _check_shape(name, tensor, tuple(q_QNH.shape))
        check_like(name, tensor, "q_QNH", dtype=q_QNH.dtype, device=q_QNH.device)
        check_inner_stride(name, tensor)
    _check_shape("lse_NQ", lse_NQ, (q_QNH.shape[1], q_QNH.shape[0]))
    lse_dtype = accumulation_dtype(q_QNH.dtype)
    check_like("lse_NQ", lse_NQ, "q_QNH", dtype=lse_dtype, device=q_QNH.device)
    check_accumulator("dk_acc_SKH", dk_acc_SKH, k_SKH)
    check_accumulator("dv_acc_SKH", dv_acc_SKH, v_SKH)
    upstream = Upstream(dout_QNH=dout_QNH, dlse_NQ=None, out_QNH=out_QNH, lse_NQ=lse_NQ)
    return chosen.partial_backward(operands, upstream, dk_acc_SKH, dv_acc_SKH)


def merge_partials(
    out_a_QNH: Tensor, lse_a_NQ: Tensor, out_b_QNH: Tensor, lse_b_NQ: Tensor
) -> tuple[Tensor, Tensor]:
    """Merges attention of the same queries over two disjoint sets of keys.

    out = sum of exp(lse_i - lse) * out_i with lse = log(sum of exp(lse_i)); plain torch, so it is
    differentiable. Merge in fp32 and cast once at the end.

    Args:
        out_a_QNH: Output over the first keys.
        lse_a_NQ: Its log-sum-exp; -inf where a query attended nothing.
        out_b_QNH: Output over the second keys.
        lse_b_NQ: Its log-sum-exp.

    Returns:
        out_QNH and lse_NQ over both sets.

    Raises:
        KernelArgumentError: The shapes differ, or a log-sum-exp is not [heads, queries].
    """
    _check_shape("out_b_QNH", out_b_QNH, tuple(out_a_QNH.shape))
    for name, lse_NQ in (("lse_a_NQ", lse_a_NQ), ("lse_b_NQ", lse_b_NQ)):
        _check_shape(name, lse_NQ, (out_a_QNH.shape[1], out_a_QNH.shape[0]))
    lse_NQ = torch.logaddexp(lse_a_NQ, lse_b_NQ)
    # If both are -inf the weights are exp(-inf - 0) = 0, not exp(-inf + inf) = nan.
    base_NQ = lse_NQ.masked_fill(lse_NQ == -torch.inf, 0)
    weight_a_QN1 = (lse_a_NQ - base_NQ).exp().T[..., None]
    weight_b_QN1 = (lse_b_NQ - base_NQ).exp().T[..., None]
    return out_a_QNH * weight_a_QN1 + out_b_QNH * weight_b_QN1, lse_NQ


def _prepare(
    q_QNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    layout: TreeLayout,
    scale: float,
    query_start: int,
    key_start: int,
    backend: str | None,
    deterministic: bool,
) -> tuple[TreeAttentionBackend, Operands]:
    check_operands({"q_QNH": q_QNH, "k_SKH": k_SKH, "v_SKH": v_SKH}, layout, scale)
    check_range("query_start", query_start, q_QNH.shape[0], layout)
    check_range("key_start", key_start, k_SKH.shape[0], layout)
    name = select_backend(
        TREE_ATTENTION,
        backend,
        q_QNH.device,
        q_QNH.dtype,
        q_QNH.shape[-1],
        deterministic=deterministic,
    )
    chosen = TREE_ATTENTION_BACKENDS[name]
    queries = Span(query_start, query_start + q_QNH.shape[0])
    keys = Span(key_start, key_start + k_SKH.shape[0])
    operands = Operands(
        q_QNH=q_QNH,
        k_SKH=k_SKH,
        v_SKH=v_SKH,
        end_T=layout.end_T,
        plan=chosen.partial_plan(layout, queries, keys),
        scale=scale,
        queries=queries,
        keys=keys,
        is_deterministic=deterministic,
    )
    return chosen, operands


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise KernelArgumentError(name, f"shape {tuple(tensor.shape)}, expected {expected}")
