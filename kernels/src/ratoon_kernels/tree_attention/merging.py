"""Joins results of attention by their log-sum-exps: of two sets of keys, of keys and a sink.

Every function is plain torch and writes new tensors.
"""

import torch
from torch import Tensor

from ratoon_kernels.errors import KernelArgumentError
from ratoon_kernels.precision import accumulation_dtype
from ratoon_kernels.tree_attention.operands import check_sink


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
    check_shape("out_b_QNH", out_b_QNH, tuple(out_a_QNH.shape))
    for name, lse_NQ in (("lse_a_NQ", lse_a_NQ), ("lse_b_NQ", lse_b_NQ)):
        check_shape(name, lse_NQ, (out_a_QNH.shape[1], out_a_QNH.shape[0]))
    lse_NQ = torch.logaddexp(lse_a_NQ, lse_b_NQ)
    # If both are -inf the weights are exp(-inf - 0) = 0, not exp(-inf + inf) = nan.
    base_NQ = lse_NQ.masked_fill(lse_NQ == -torch.inf, 0)
    weight_a_QN1 = (lse_a_NQ - base_NQ).exp().T[..., None]
    weight_b_QN1 = (lse_b_NQ - base_NQ).exp().T[..., None]
    return out_a_QNH * weight_a_QN1 + out_b_QNH * weight_b_QN1, lse_NQ


def with_sink(out_QNV: Tensor, lse_NQ: Tensor, sink_N: Tensor) -> tuple[Tensor, Tensor]:
    """Lets one more logit per head, which has no value, take its share of the softmax.

    A sink is no key: apply it once, to results over all keys. The backward of attention, given what
    this returns as its output and log-sum-exp, gives the gradients of q, k and v.

    Args:
        out_QNV: Output over all keys.
        lse_NQ: Its log-sum-exp.
        sink_N: The sinks' logits, not scaled.

    Returns:
        out_QNV in its dtype, and lse_NQ with the sink in it.

    Raises:
        KernelArgumentError: The sink is not one logit for each head.
    """
    check_sink(sink_N, out_QNV, "out_QNV")
    merged_NQ = torch.logaddexp(lse_NQ, sink_N.to(lse_NQ.dtype)[:, None])
    weight_QN1 = (lse_NQ - merged_NQ).exp().T[..., None]
    return (out_QNV * weight_QN1).to(out_QNV.dtype), merged_NQ


def sink_gradient(
    dout_QNV: Tensor,
    out_QNV: Tensor,
    lse_NQ: Tensor,
    sink_N: Tensor,
    *,
    dlse_NQ: Tensor | None = None,
) -> Tensor:
    """Gradient of the sinks, summed over the queries at hand.

    The share p = exp(sink - lse) has the value 0, so dsink = sum of p (dlse - dout . out).

    Args:
        dout_QNV: Gradient of what `with_sink` returned.
        out_QNV: The output that it returned.
        lse_NQ: The log-sum-exp that it returned.
        sink_N: The sinks' logits.
        dlse_NQ: Gradient of that log-sum-exp, or None where it is zero.

    Returns:
        dsink_N in the accumulation dtype: the caller adds up over ranges of queries.
    """
    dtype = accumulation_dtype(out_QNV.dtype)
    delta_QN = (dout_QNV.to(dtype) * out_QNV.to(dtype)).sum(dim=-1)
    if dlse_NQ is not None:
        delta_QN = delta_QN - dlse_NQ.T
    share_NQ = (sink_N.to(lse_NQ.dtype)[:, None] - lse_NQ).exp()
    return -(share_NQ * delta_QN.T).sum(dim=1)


def check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    """Checks a shape.

    Raises:
        KernelArgumentError: Naming the tensor.
    """
    if tuple(tensor.shape) != expected:
        raise KernelArgumentError(name, f"shape {tuple(tensor.shape)}, expected {expected}")
