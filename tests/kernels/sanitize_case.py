"""A small case of everything that the tree attention kernels do, for compute-sanitizer.

    compute-sanitizer --tool memcheck python3 -m tests.kernels.sanitize_case

In: the backend's name and the device. Out: exit status 0 where all values are those of the dense
oracle. Invariant: every kernel of the backend runs, forward, backward, deterministic and partial,
on a forest whose length is no multiple of a tile. Tensors are made on the CPU, so that few launches
are not the backend's.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ratoon_kernels import (
    TreeLayout,
    merge_partials,
    tree_attention,
    tree_attention_partial_backward,
    tree_attention_partial_forward,
)
from ratoon_kernels.jit import KernelSpec
from ratoon_kernels.tree_attention import cuda_launch
from ratoon_kernels.tree_attention.cuda_specs import kernel_spec
from tests.kernels.forests import (
    Problem,
    Results,
    assert_close,
    dense_oracle,
    forest_from,
    random_problem,
    run,
)

# Racecheck orders what the threads that arrive at a barrier have done, but not their warps.
ARRIVALS_PER_WARP = ("ARRIVALS_PER_WARP", 32)
FOREST = forest_from([-1, 0, 1, 1, 0, -1, 5, 5], [40, 3, 21, 150, 17, 66, 1, 2])
TOLERANCE = 1e-2
# Head size of queries and keys, and of values.
HEAD_DIMS = ((128, 128), (64, 64), (256, 256), (192, 128))


def check_backend(backend: str, device: str, head_dim: int, value_dim: int) -> None:
    """Raises AssertionError where a value is wrong."""
    problem = random_problem(
        FOREST.num_tokens,
        heads=4,
        kv_heads=2,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=torch.bfloat16,
        seed=0,
    )
    expected = dense_oracle(FOREST.mask(), problem, with_dlse=False)
    layout = FOREST.layout(device)
    moved = Problem(
        q_TNH=problem.q_TNH.to(device),
        k_TKH=problem.k_TKH.to(device),
        v_TKH=problem.v_TKH.to(device),
        dout_TNH=problem.dout_TNH.to(device),
        dlse_NT=problem.dlse_NT.to(device),
        scale=problem.scale,
    )
    for deterministic in (False, True):
        got = _whole(backend, layout, moved, deterministic=deterministic)
        assert_close(_on_cpu(got), expected, TOLERANCE, f"whole, {deterministic=}")
        got = _partial(backend, layout, moved, deterministic=deterministic)
        assert_close(_on_cpu(got), expected, TOLERANCE, f"partial, {deterministic=}")


def _whole(backend: str, layout: TreeLayout, problem: Problem, *, deterministic: bool) -> Results:
    def attention(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> tuple[Tensor, Tensor]:
        return tree_attention(
            *(q_TNH, k_TKH, v_TKH, layout, problem.scale),
            backend=backend,
            deterministic=deterministic,
        )

    return run(attention, problem, with_dlse=False)


def _partial(backend: str, layout: TreeLayout, problem: Problem, *, deterministic: bool) -> Results:
    """All queries against two ranges of keys, cut inside a tile."""
    q, k, v, scale = problem.q_TNH, problem.k_TKH, problem.v_TKH, problem.scale
    how = {"query_start": 0, "backend": backend, "deterministic": deterministic}
    dk_acc, dv_acc = (torch.zeros(x.shape, device=x.device) for x in (k, v))
    half = FOREST.num_tokens // 2 + 5
    ranges = ((0, half), (half, FOREST.num_tokens))
    first, second = (
        tree_attention_partial_forward(
            q, k[start:stop], v[start:stop], layout, scale, key_start=start, **how
        )
        for start, stop in ranges
    )
    out, lse = merge_partials(*first, *second)
    dq = torch.zeros(q.shape, device=q.device)
    for start, stop in ranges:
        dq += tree_attention_partial_backward(
            *(problem.dout_TNH, q, k[start:stop], v[start:stop], out.to(q.dtype), lse),
            layout,
            scale,
            key_start=start,
            dk_acc_SKH=dk_acc[start:stop],
            dv_acc_SKH=dv_acc[start:stop],
            **how,
        )
    return {"out": out, "lse": lse, "dq": dq, "dk": dk_acc, "dv": dv_acc}


def _on_cpu(results: Results) -> Results:
    return {name: value.cpu() for name, value in results.items()}


def _kernel_spec(*call: Any, **variant: Any) -> KernelSpec:
    spec = kernel_spec(*call, **variant)
    return replace(spec, defines=tuple(sorted((*spec.defines, ARRIVALS_PER_WARP))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    with mock.patch.object(cuda_launch, "kernel_spec", _kernel_spec):
        for head_dim, value_dim in HEAD_DIMS:
            check_backend(args.backend, args.device, head_dim, value_dim)
    print("sanitize case: all values right")


if __name__ == "__main__":
    main()
