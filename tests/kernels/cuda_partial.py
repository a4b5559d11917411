"""Tree attention in parts on the cuda backend: merged outputs and added-up gradients.

In: cuts of the queries and of the keys. Out: results to be compared with those of the whole.
Invariant: the buffers for dK and dV do not begin with zeros; what they held is taken off again.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch

from ratoon_kernels import (
    TreeLayout,
    merge_partials,
    tree_attention_partial_backward,
    tree_attention_partial_forward,
)
from tests.kernels.cuda_attention import BACKEND, stale_memory
from tests.kernels.forests import Problem, Results

Cuts = list[tuple[int, int]]


def random_cuts(rng: np.random.Generator, num_tokens: int) -> Cuts:
    """Ranges that cover [0, num_tokens), some of them empty."""
    inner = rng.integers(0, num_tokens + 1, int(rng.integers(0, 4)))
    return list(itertools.pairwise([0, *sorted(inner.tolist()), num_tokens]))


def run_in_parts(
    layout: TreeLayout,
    problem: Problem,
    query_cuts: Cuts,
    key_cuts: Cuts,
    *,
    deterministic: bool = False,
) -> Results:
    """Output, log-sum-exp and gradients of the output, all fp32."""
    q, k, v, scale = problem.q_TNH, problem.k_TKH, problem.v_TKH, problem.scale
    generator = torch.Generator(q.device).manual_seed(0)
    before = torch.randn((2, *k.shape), generator=generator, device=q.device)
    dk_acc, dv_acc = before.clone().unbind()
    outs, lses, dqs = [], [], []
    how = {"backend": BACKEND, "deterministic": deterministic}
    for q0, q1 in query_cuts:
        with stale_memory():
            parts = [
                tree_attention_partial_forward(
                    *(q[q0:q1], k[k0:k1], v[k0:k1], layout, scale),
                    query_start=q0,
                    key_start=k0,
                    **how,
                )
                for k0, k1 in key_cuts
            ]
        assert all(part.dtype == torch.float32 for both in parts for part in both)
        out, lse = parts[0]
        for part in parts[1:]:
            out, lse = merge_partials(out, lse, *part)
        dq = torch.zeros_like(out)
        for k0, k1 in key_cuts:
            with stale_memory():
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
    }
