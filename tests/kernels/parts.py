"""Tree attention in parts: merged outputs and added-up gradients.

In: cuts of the queries and of the keys. Out: results to be compared with those of the whole.
Invariant: the buffers for dK and dV do not begin with zeros; what they held is taken off again.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from ratoon_kernels import (
    TreeLayout,
    merge_partials,
    sink_gradient,
    tree_attention_partial_backward,
    tree_attention_partial_forward,
    with_sink,
)
from tests.kernels.forests import Problem, Results

Cuts = list[tuple[int, int]]


def random_cuts(rng: np.random.Generator, num_tokens: int) -> Cuts:
    """Ranges that cover [0, num_tokens), some of them empty."""
    inner = rng.integers(0, num_tokens + 1, int(rng.integers(0, 5)))
    return list(itertools.pairwise([0, *sorted(inner.tolist()), num_tokens]))


def run_in_parts(
    layout: TreeLayout,
    problem: Problem,
    query_cuts: Cuts,
    key_cuts: Cuts,
    *,
    window: int | None = None,
    sink_N: torch.Tensor | None = None,
    backend: str | None = None,
    deterministic: bool = False,
    memory: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Results:
    """Output, log-sum-exp and gradients of the output, that of the sinks too, in fp32 at least.

    Each call runs inside of a new `memory`."""
    q, k, v, scale = problem.q_TNH, problem.k_TKH, problem.v_TKH, problem.scale
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    generator = torch.Generator(q.device).manual_seed(0)
    before = [
        torch.randn(x.shape, generator=generator, device=q.device, dtype=dtype) for x in (k, v)
    ]
    dk_acc, dv_acc = (x.clone() for x in before)
    dsink_N = torch.zeros(q.shape[1], device=q.device, dtype=dtype)
    outs, lses, dqs = [], [], []
    how = {"window": window, "backend": backend, "deterministic": deterministic}
    for q0, q1 in query_cuts:
        with memory():
            parts = [
                tree_attention_partial_forward(
                    *(q[q0:q1], k[k0:k1], v[k0:k1], layout, scale),
                    query_start=q0,
                    key_start=k0,
                    **how,
                )
                for k0, k1 in key_cuts
            ]
        assert all(part.dtype == dtype for both in parts for part in both)
        out, lse = functools.reduce(lambda one, other: merge_partials(*one, *other), parts)
        if sink_N is not None:
            out, lse = with_sink(out, lse, sink_N)
            dsink_N += sink_gradient(problem.dout_TNH[q0:q1], out, lse, sink_N)
        dq = torch.zeros_like(q[q0:q1], dtype=dtype)
        for k0, k1 in key_cuts:
            with memory():
                dq += tree_attention_partial_backward(
                    *(problem.dout_TNH[q0:q1], q[q0:q1], k[k0:k1], v[k0:k1]),
                    *(out.to(q.dtype), lse, layout, scale),
                    query_start=q0,
                    key_start=k0,
                    dk_acc_SKH=dk_acc[k0:k1],
                    dv_acc_SKH=dv_acc[k0:k1],
                    **how,
                )
        outs.append(out)
        lses.append(lse)
        dqs.append(dq)
    return {
        "out": torch.cat(outs),
        "lse": torch.cat(lses, dim=1),
        "dq": torch.cat(dqs),
        "dk": dk_acc - before[0],
        "dv": dv_acc - before[1],
    } | ({} if sink_N is None else {"dsink": dsink_N})
