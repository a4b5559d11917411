"""The cuda backend's deterministic mode: the same bits on every call, and the same values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ratoon_kernels import tree_attention
from tests.kernels.cuda_attention import (
    BACKEND,
    DEVICE,
    KINDS,
    LONG_PROMPT,
    WIDE,
    Sizes,
    assert_equals_reference,
    assert_no_worse_than_torch,
    assert_same_bits,
    make_problem,
    rounding_of,
    run_cuda,
    run_cuda_in_parts,
)
from tests.kernels.forests import (
    NAMED,
    Forest,
    assert_close,
    binary,
    chain,
    random_forest,
    star,
)

pytestmark = pytest.mark.gpu

NUM_REPEATS = 5
# Many blocks add to the same rows of dQ; key tiles that are cut; a tile that many siblings share.
FORESTS: dict[str, Forest] = {
    "long prompt": LONG_PROMPT,
    "wide": WIDE,
    "star": star(260, 5, 70),
    "short leaves": star(900, 131, 3),
    "binary": binary(4, 47),
    "deep": random_forest(np.random.default_rng(3), max_nodes=40, max_length=300),
}


@pytest.mark.parametrize(("dtype", "sizes"), KINDS)
@pytest.mark.parametrize("name", FORESTS)
def test_the_same_inputs_give_the_same_bits(name: str, dtype: torch.dtype, sizes: Sizes) -> None:
    forest = FORESTS[name]
    problem = make_problem(forest.num_tokens, dtype, sizes, heads=(8, 2))
    layout = forest.layout(DEVICE)
    first = run_cuda(layout, problem, deterministic=True)
    for _ in range(NUM_REPEATS):
        assert_same_bits(run_cuda(layout, problem, deterministic=True), first, name)
    # A layout of its own is in other memory, and its work lists are made anew.
    assert_same_bits(run_cuda(forest.layout(DEVICE), problem, deterministic=True), first, name)


@pytest.mark.parametrize("name", FORESTS)
def test_the_default_differs_in_the_order_of_sums_alone(name: str) -> None:
    forest = FORESTS[name]
    layout = forest.layout(DEVICE)
    for index, (dtype, sizes) in enumerate(KINDS):
        problem = make_problem(forest.num_tokens, dtype, sizes, heads=(4, 2), seed=index)
        expected = run_cuda(layout, problem, deterministic=True)
        got = run_cuda(layout, problem)
        for result in ("out", "lse"):
            assert torch.equal(got[result], expected[result]), result
        assert_close(got, expected, rounding_of(dtype), name)
        again = run_cuda(layout, problem)
        for result in ("out", "lse"):
            assert torch.equal(again[result], got[result]), result


@pytest.mark.parametrize(("dtype", "sizes"), KINDS)
def test_its_values_are_no_worse_than_torch(dtype: torch.dtype, sizes: Sizes) -> None:
    forests = {**NAMED, "chain across tiles": chain(9, 143), "star": star(517, 7, 111)}
    for index, (name, forest) in enumerate(forests.items()):
        if forest.num_tokens:
            heads = ((4, 2), (5, 1), (4, 4))[index % 3]
            problem = make_problem(forest.num_tokens, dtype, sizes, heads=heads, seed=index)
            assert_no_worse_than_torch(forest, problem, name, deterministic=True)
    problem = make_problem(WIDE.num_tokens, dtype, sizes, heads=(8, 2))
    assert_equals_reference(WIDE, problem, "wide", deterministic=True)


@pytest.mark.parametrize(("dtype", "sizes"), KINDS)
def test_parts_give_the_same_bits(dtype: torch.dtype, sizes: Sizes) -> None:
    problem = make_problem(LONG_PROMPT.num_tokens, dtype, sizes)
    layout = LONG_PROMPT.layout(DEVICE)
    cuts = [(0, 5059), (5059, LONG_PROMPT.num_tokens)]
    first = run_cuda_in_parts(layout, problem, cuts, cuts, deterministic=True)
    for _ in range(NUM_REPEATS):
        again = run_cuda_in_parts(layout, problem, cuts, cuts, deterministic=True)
        assert_same_bits(again, first)
    default = run_cuda_in_parts(layout, problem, cuts, cuts)
    for result in ("out", "lse"):
        assert torch.equal(default[result], first[result]), result
    assert_close(default, first, rounding_of(dtype))


def test_work_on_another_stream_does_not_change_the_bits() -> None:
    """Which block takes which item then changes from call to call."""
    problem = make_problem(LONG_PROMPT.num_tokens, torch.bfloat16, 128, heads=(8, 2))
    layout = LONG_PROMPT.layout(DEVICE)
    alone = run_cuda(layout, problem, deterministic=True)
    stream, product = torch.cuda.Stream(), torch.ones((4096, 4096), device=DEVICE)
    torch.cuda.synchronize()
    for _ in range(NUM_REPEATS):
        with torch.cuda.stream(stream):
            for _ in range(10):
                product = product @ product / 4096
        assert_same_bits(run_cuda(layout, problem, deterministic=True), alone)
    stream.synchronize()
    assert (product == 1).all()


def test_a_deterministic_call_without_a_backend_repeats_its_bits() -> None:
    forest = FORESTS["star"]
    problem = make_problem(forest.num_tokens, torch.bfloat16, 128)
    layout = forest.layout(DEVICE)
    q, k, v = (x.requires_grad_() for x in (problem.q_TNH, problem.k_TKH, problem.v_TKH))
    results: list[tuple[Tensor, ...]] = []
    for backend in (BACKEND, None):
        out, _ = tree_attention(
            q, k, v, layout, problem.scale, backend=backend, deterministic=True
        )  # fmt: skip
        results.append((out, *torch.autograd.grad(out, (q, k, v), problem.dout_TNH)))
    for named, chosen in zip(*results, strict=True):
        assert torch.equal(named, chosen)
