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

from ratoon_kernels.layout import TreeLayout
from ratoon_kernels.precision import accumulation_dtype
from ratoon_kernels.registry import (
    TREE_ATTENTION,
    TREE_ATTENTION_BACKENDS,
    TreeAttentionBackend,
    applies_sinks,
    select_backend,
)
from ratoon_kernels.tiles import Span
from ratoon_kernels.tree_attention.merging import check_shape, sink_gradient, with_sink
from ratoon_kernels.tree_attention.operands import (
    Operands,
    Upstream,
    check_accumulator,
    check_inner_stride,
    check_like,
    check_operands,
    check_range,
    check_sink,
    check_whole,
)


def tree_attention(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKV: Tensor,
    layout: TreeLayout,
    scale: float,
    *,
    window: int | None = None,
    sink_N: Tensor | None = None,
    backend: str | None = None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """Causal softmax attention of each token to its own path in a packed forest.

    Token q attends token k if and only if `k <= q < layout.end_T[k]`, and `layout.position_T` tells
    less than `window` between them where there is a window. Query head n reads kv head
    n // (N / K). Differentiable in q, k, v and the sinks, through the output and the log-sum-exp.

    Args:
        q_TNH: Queries of T packed tokens; bf16, fp16, fp32 or fp64, innermost stride 1.
        k_TKH: Keys, same dtype and device; K divides N.
        v_TKV: Values, as the keys, but their head size may be another one.
        layout: Layout of the forest, on the same device; a traced call wants one built for its
            window.
        scale: Factor of q k^T before the softmax, usually head_dim ** -0.5.
        window: Tokens of its path that a query sees, itself the last of them; None: all.
        sink_N: For each query head a logit that joins the softmax's denominator, not scaled.
        backend: A backend's name, or None for the best one available.
        deterministic: Require the same bits on every call with the same inputs.

    Returns:
        out_TNV in the dtype of q, and lse_NT in fp32 (fp64 for fp64): the natural log of the sum
        of exp(scale * q k^T) over the attended keys, and of exp(sink).

    Raises:
        KernelArgumentError: An argument is wrong; the message names it.
        BackendUnavailableError: The backend asked for cannot serve the call.
    """
    check_operands({"q_TNH": q_TNH, "k_TKH": k_TKH, "v_TKV": v_TKV}, layout, scale, window)
    check_whole(q_TNH, k_TKH, layout)
    if sink_N is not None:
        check_sink(sink_N, q_TNH, "q_TNH")
    name = select_backend(
        TREE_ATTENTION,
        backend,
        q_TNH.device,
        q_TNH.dtype,
        q_TNH.shape[-1],
        value_dim=v_TKV.shape[-1],
        window=window,
        deterministic=deterministic,
    )
    plan = TREE_ATTENTION_BACKENDS[name].plan(layout, window)
    return _forward(
        q_TNH, k_TKH, v_TKV, layout.end_T, plan, sink_N, scale, window, name, deterministic
    )


@torch.library.custom_op("ratoon::tree_attention", mutates_args=())
def _forward(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKV: Tensor,
    end_T: Tensor,
    plan: Sequence[Tensor],
    sink_N: Tensor | None,
    scale: float,
    window: int | None,
    backend: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    own_sink_N = sink_N if applies_sinks(backend) else None
    operands = _whole(q_TNH, k_TKH, v_TKV, end_T, plan, own_sink_N, scale, window, deterministic)
    out_TNV, lse_NT = TREE_ATTENTION_BACKENDS[backend].forward(operands)
    if sink_N is None or own_sink_N is not None:
        return out_TNV, lse_NT
    return with_sink(out_TNV, lse_NT, sink_N)


@_forward.register_fake
def _(q_TNH: Tensor, _k_TKH: Tensor, v_TKV: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, _ = q_TNH.shape
    lse_NT = q_TNH.new_empty((num_heads, num_tokens), dtype=accumulation_dtype(q_TNH.dtype))
    return q_TNH.new_empty((num_tokens, num_heads, v_TKV.shape[-1])), lse_NT


@torch.library.custom_op("ratoon::tree_attention_backward", mutates_args=())
def _backward(
    dout_TNV: Tensor,
    dlse_NT: Tensor | None,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKV: Tensor,
    out_TNV: Tensor,
    lse_NT: Tensor,
    end_T: Tensor,
    plan: Sequence[Tensor],
    sink_N: Tensor | None,
    scale: float,
    window: int | None,
    backend: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    own_sink_N = sink_N if applies_sinks(backend) else None
    operands = _whole(q_TNH, k_TKH, v_TKV, end_T, plan, own_sink_N, scale, window, deterministic)
    # Autograd gives expanded gradients (of a sum, say), which kernels do not read.
    dout_TNV = dout_TNV if dout_TNV.stride(-1) == 1 else dout_TNV.contiguous()
    # An op returns tensors, so without sinks their gradient is an empty one.
    dsink_N = lse_NT.new_empty(0 if sink_N is None else sink_N.shape[0])
    upstream = Upstream(
        dout_QNH=dout_TNV,
        dlse_NQ=dlse_NT,
        out_QNH=out_TNV,
        lse_NQ=lse_NT,
        dsink_N=None if own_sink_N is None else dsink_N,
    )
    # With a sink in output and log-sum-exp these are the gradients beside it; see `with_sink`.
    grads = TREE_ATTENTION_BACKENDS[backend].backward(operands, upstream)
    if sink_N is not None and own_sink_N is None:
        dsink_N = sink_gradient(dout_TNV, out_TNV, lse_NT, sink_N, dlse_NQ=dlse_NT)
    return *grads, dsink_N


@_backward.register_fake
def _(
    _dout_TNV: Tensor,
    _dlse_NT: Tensor | None,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKV: Tensor,
    _out_TNV: Tensor,
    lse_NT: Tensor,
    _end_T: Tensor,
    _plan: Sequence[Tensor],
    sink_N: Tensor | None,
    *_settings: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq_TNH, dk_TKH, dv_TKV = (x.new_empty(x.shape) for x in (q_TNH, k_TKH, v_TKV))
    return dq_TNH, dk_TKH, dv_TKV, lse_NT.new_empty(0 if sink_N is None else sink_N.shape[0])


def _whole(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKV: Tensor,
    end_T: Tensor,
    plan: Sequence[Tensor],
    sink_N: Tensor | None,
    scale: float,
    window: int | None,
    is_deterministic: bool,
) -> Operands:
    tokens = Span(0, q_TNH.shape[0])
    return Operands(
        q_QNH=q_TNH,
        k_SKH=k_TKH,
        v_SKH=v_TKV,
        end_T=end_T,
        plan=plan,
        scale=scale,
        window=window,
        queries=tokens,
        keys=tokens,
        is_deterministic=is_deterministic,
        sink_N=sink_N,
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_TNH, k_TKH, v_TKV, end_T, plan, sink_N, *settings = inputs
    ctx.save_for_backward(q_TNH, k_TKH, v_TKV, *output, end_T, sink_N, *plan)
    ctx.settings = settings
    # An output that nothing reads then has the gradient None, not zeros to be computed with.
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout_TNV: Tensor | None, dlse_NT: Tensor | None) -> tuple[Any, ...]:
    q_TNH, k_TKH, v_TKV, out_TNV, lse_NT, end_T, sink_N, *plan = ctx.saved_tensors
    dout_TNV = torch.zeros_like(out_TNV) if dout_TNV is None else dout_TNV
    *grads, dsink_N = _backward(
        dout_TNV, dlse_NT, q_TNH, k_TKH, v_TKV, out_TNV, lse_NT, end_T, plan, sink_N, *ctx.settings
    )
    dsink_N = None if sink_N is None else dsink_N.to(sink_N.dtype)
    return *grads, None, [None] * len(plan), dsink_N, *(None for _ in ctx.settings)


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
    window: int | None = None,
    backend: str | None = None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of the packed queries [query_start, + Q) to the packed keys [key_start, + S).

    Not differentiable; see `tree_attention_partial_backward`. Sinks are no keys: `with_sink` adds
    them to what is merged over all keys.

    Args:
        q_QNH: Queries; dtypes and strides as of `tree_attention`.
        k_SKH: Keys.
        v_SKH: Values, whose head size may be another one; so is the output's then.
        layout: Layout of the whole forest.
        scale: Factor of q k^T before the softmax.
        query_start: Packed index of the first query.
        key_start: Packed index of the first key.
        window: Tokens of its path that a query sees, itself the last of them; None: all.
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
        q_QNH, k_SKH, v_SKH, layout, scale, query_start, key_start, window, backend, deterministic
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
    window: int | None = None,
    backend: str | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Gradients of what `tree_attention_partial_forward` did, given the merged results.

    Args:
        dout_QNH: Gradient of the merged output, in the dtype of q; head size of the values.
        q_QNH: Queries, as in the forward.
        k_SKH: Keys, as in the forward.
        v_SKH: Values, as in the forward.
        out_QNH: The output merged over *all* keys of these queries, in the dtype of q.
        lse_NQ: The log-sum-exp merged over all keys, fp32 (fp64 for fp64). Both as `with_sink`
            returned them where there is a sink, whose own gradient is `sink_gradient`.
        layout: Layout of the whole forest.
        scale: Factor of q k^T before the softmax.
        query_start: Packed index of the first query.
        key_start: Packed index of the first key.
        window: Tokens of its path that a query sees, itself the last of them; None: all.
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
        q_QNH, k_SKH, v_SKH, layout, scale, query_start, key_start, window, backend, deterministic
    )
    for name, tensor in (("dout_QNH", dout_QNH), ("out_QNH", out_QNH)):
        check_shape(name, tensor, operands.out_shape)
        check_like(name, tensor, "q_QNH", dtype=q_QNH.dtype, device=q_QNH.device)
        check_inner_stride(name, tensor)
    check_shape("lse_NQ", lse_NQ, (q_QNH.shape[1], q_QNH.shape[0]))
    lse_dtype = accumulation_dtype(q_QNH.dtype)
    check_like("lse_NQ", lse_NQ, "q_QNH", dtype=lse_dtype, device=q_QNH.device)
    check_accumulator("dk_acc_SKH", dk_acc_SKH, k_SKH)
    check_accumulator("dv_acc_SKH", dv_acc_SKH, v_SKH)
    upstream = Upstream(dout_QNH=dout_QNH, dlse_NQ=None, out_QNH=out_QNH, lse_NQ=lse_NQ)
    return chosen.partial_backward(operands, upstream, dk_acc_SKH, dv_acc_SKH)


def _prepare(
    q_QNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    layout: TreeLayout,
    scale: float,
    query_start: int,
    key_start: int,
    window: int | None,
    backend: str | None,
    deterministic: bool,
) -> tuple[TreeAttentionBackend, Operands]:
    check_operands({"q_QNH": q_QNH, "k_SKH": k_SKH, "v_SKH": v_SKH}, layout, scale, window)
    check_range("query_start", query_start, q_QNH.shape[0], layout)
    check_range("key_start", key_start, k_SKH.shape[0], layout)
    name = select_backend(
        TREE_ATTENTION,
        backend,
        q_QNH.device,
        q_QNH.dtype,
        q_QNH.shape[-1],
        value_dim=v_SKH.shape[-1],
        window=window,
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
        plan=chosen.partial_plan(layout, queries, keys, window),
        scale=scale,
        window=window,
        queries=queries,
        keys=keys,
        is_deterministic=deterministic,
    )
    return chosen, operands
