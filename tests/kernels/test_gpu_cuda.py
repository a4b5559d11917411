"""The cuda backend's values: output, log-sum-exp and all gradients of forests of every shape."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ratoon_kernels import list_backends
from tests.kernels.cuda_attention import (
    DEVICE,
    HEADS,
    KINDS,
    LONG_PROMPT,
    LSE_TOLERANCE,
    WIDE,
    Sizes,
    assert_equals_reference,
    assert_no_worse_than_torch,
    assert_same_bits,
    attention_of,
    make_problem,
    num_split_tiles,
    rounding_of,
    run_cuda,
    run_reference,
    run_reference_of_rounded,
    stale_memory,
)
from tests.kernels.forests import (
    NAMED,
    Forest,
    Problem,
    Results,
    assert_close,
    binary,
    chain,
    comb,
    forest_from,
    random_forest,
    run,
    star,
)

pytestmark = pytest.mark.gpu

# On both sides of the tiles' 128 rows, of the backward's 80, and of their multiples.
LENGTHS = (1, 2, 63, 64, 65, 79, 80, 81, 127, 128, 129, 159, 160, 161, 255, 256, 257, 4097)
FORESTS: dict[str, Forest] = {
    **{name: forest for name, forest in NAMED.items() if forest.num_tokens},
    "chain of tiles": chain(5, 128),
    "chain across tiles": chain(9, 143),
    "star of tiles": star(256, 6, 128),
    "star across tiles": star(517, 7, 111),
    "short leaves": star(900, 131, 3),
    "comb across tiles": comb(6, 85),
    "binary across tiles": binary(4, 47),
    "two groups": forest_from([-1, 0, 0, 0, -1, 4, 5, 5], [300, 61, 200, 1, 270, 77, 255, 129]),
}
NUM_RANDOM = 1000
EVERY_KIND = pytest.mark.parametrize(("dtype", "sizes"), KINDS)


def _forest_of(num_tokens: int) -> Forest:
    """A prompt with two responses and another sequence, of so many tokens together."""
    lengths = [num_tokens // 3, num_tokens // 7, num_tokens // 4]
    return forest_from([-1, 0, 0, -1], [*lengths, num_tokens - sum(lengths)])


def test_memory_that_is_not_written_is_nan_also_in_the_backward() -> None:
    """What the tests below rely on."""
    seen: list[bool] = []

    def look(_gradient: Tensor) -> None:
        seen.append(bool(torch.empty(1000, device=DEVICE).isnan().all()))

    leaf = torch.ones(3, device=DEVICE, requires_grad=True)
    leaf.register_hook(look)
    with stale_memory():
        look(leaf)
        (leaf * 2).sum().backward()
    assert seen == [True, True]


@EVERY_KIND
def test_sequences_of_any_length_are_no_worse_than_torch(dtype: torch.dtype, sizes: Sizes) -> None:
    for num_tokens in LENGTHS:
        problem = make_problem(num_tokens, dtype, sizes, seed=num_tokens)
        assert_no_worse_than_torch(forest_from([-1], [num_tokens]), problem, str(num_tokens))


@EVERY_KIND
def test_forests_of_any_length_are_no_worse_than_torch(dtype: torch.dtype, sizes: Sizes) -> None:
    for num_tokens in LENGTHS:
        if num_tokens >= 7:
            problem = make_problem(num_tokens, dtype, sizes, seed=num_tokens)
            assert_no_worse_than_torch(_forest_of(num_tokens), problem, str(num_tokens))


@EVERY_KIND
def test_forests_of_any_shape_are_no_worse_than_torch(dtype: torch.dtype, sizes: Sizes) -> None:
    for index, (name, forest) in enumerate(FORESTS.items()):
        problem = make_problem(forest.num_tokens, dtype, sizes, heads=(4, 1), seed=index)
        assert_no_worse_than_torch(forest, problem, name)


@EVERY_KIND
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: f"{heads[0]}:{heads[1]}")
def test_any_head_ratio_is_no_worse_than_torch(
    heads: tuple[int, int], dtype: torch.dtype, sizes: Sizes
) -> None:
    forest = FORESTS["two groups"]
    problem = make_problem(forest.num_tokens, dtype, sizes, heads=heads, seed=heads[0])
    assert_no_worse_than_torch(forest, problem, "with dlse")
    assert_no_worse_than_torch(forest, problem, "without dlse", with_dlse=False)


@pytest.mark.parametrize("deterministic", [False, True])
def test_no_tokens_have_no_results(deterministic: bool) -> None:
    problem = make_problem(0, torch.bfloat16, 128, heads=(8, 2))
    got = run_cuda(NAMED["empty"].layout(DEVICE), problem, deterministic=deterministic)
    assert {name: tuple(x.shape) for name, x in got.items()} == {
        "out": (0, 8, 128), "lse": (8, 0), "dq": (0, 8, 128), "dk": (0, 2, 128), "dv": (0, 2, 128),
    }  # fmt: skip


@pytest.mark.parametrize("kv_heads", [8, 4, 2, 1])
@pytest.mark.parametrize("deterministic", [False, True])
def test_key_tiles_that_are_cut_add_up(kv_heads: int, deterministic: bool) -> None:
    """Their dK and dV go through slots, of which each number of kv heads has its own list."""
    deep = random_forest(np.random.default_rng(3), max_nodes=40, max_length=900)
    for index, (name, forest) in enumerate(
        {"long prompt": LONG_PROMPT, "wide": WIDE, "deep": deep}.items()
    ):
        assert min(num_split_tiles(forest.layout("cpu").schedule_header, kv_heads)) > 0, name
        dtype, sizes = KINDS[(3 * index + kv_heads) % len(KINDS)]
        problem = make_problem(forest.num_tokens, dtype, sizes, heads=(8, kv_heads), seed=kv_heads)
        assert_equals_reference(forest, problem, name, deterministic=deterministic)


def test_more_kv_heads_than_any_list_is_made_for_are_right() -> None:
    problem = make_problem(WIDE.num_tokens, torch.bfloat16, 128, heads=(24, 12))
    assert_equals_reference(WIDE, problem, "24:12")


def _slice(pool: Problem, start: int, num_tokens: int, heads: int, kv_heads: int) -> Problem:
    """A problem of some rows and heads of a pool."""
    rows = slice(start, start + num_tokens)
    return Problem(
        q_TNH=pool.q_TNH[rows, :heads],
        k_TKH=pool.k_TKH[rows, :kv_heads],
        v_TKH=pool.v_TKH[rows, :kv_heads],
        dout_TNH=pool.dout_TNH[rows, :heads],
        dlse_NT=pool.dlse_NT[:heads, rows],
        scale=pool.scale,
    )


def _errors_and_norms(got: Results, expected: Results) -> Tensor:
    """[5, 2] on the GPU, so that nothing waits for it between the forests."""
    return torch.stack(
        [torch.stack(((got[name].float() - x).norm(), x.norm())) for name, x in expected.items()]
    )


def test_a_thousand_random_forests_equal_the_reference() -> None:
    rng = np.random.default_rng(11)
    pools = [make_problem(3300, *kind, heads=(8, 8), seed=i) for i, kind in enumerate(KINDS)]
    cases: list[tuple[Forest, Problem]] = []
    measured: list[Tensor] = []
    for index in range(NUM_RANDOM):
        max_length = int(rng.choice([1, 4, 20, 60, 130]))
        forest = random_forest(rng, max_nodes=int(rng.integers(1, 24)), max_length=max_length)
        heads, kv_heads = ((4, 4), (4, 2), (5, 1), (8, 1))[index // len(KINDS) % 4]
        problem = _slice(
            pools[index % len(KINDS)], int(rng.integers(0, 100)), forest.num_tokens, heads, kv_heads
        )
        layout = forest.layout(DEVICE)
        got = run_cuda(layout, problem, deterministic=index % 3 == 0)
        measured.append(_errors_and_norms(got, run_reference(layout, problem)))
        cases.append((forest, problem))
    error, norm = torch.stack(measured).cpu().unbind(dim=-1)
    largest_gradient = norm[:, 2:].amax(dim=1)
    assert (largest_gradient > 0).all()
    # dQ and dK of a forest of few tokens may be truly zero: the size of the others then counts.
    size = norm.clone()
    size[:, 2:4] = torch.maximum(norm[:, 2:4], 0.05 * largest_gradient[:, None])
    rounding = [rounding_of(KINDS[index % len(KINDS)][0]) for index in range(NUM_RANDOM)]
    tolerance = torch.tensor(rounding)[:, None].repeat(1, 5)
    tolerance[:, 1] = LSE_TOLERANCE
    bad = ~(error <= tolerance * size)  # also NaN
    worst = (error / (tolerance * size)).nan_to_num(torch.inf).amax(dim=0)
    assert not bad[:, [0, 1, 4]].any(), f"out, lse, dv: {worst.tolist()}"
    indices = bad.any(dim=1).nonzero()[:, 0].tolist()
    assert len(indices) <= NUM_RANDOM // 100, f"{indices}: {worst.tolist()}"
    for index in indices:
        forest, problem = cases[index]
        layout = forest.layout(DEVICE)
        got = run_cuda(layout, problem, deterministic=index % 3 == 0)
        expected = run_reference_of_rounded(layout, problem, got["out"])
        assert_close(got, expected, rounding_of(problem.q_TNH.dtype), f"forest {index}")


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 128), (torch.float16, 64)])
def test_other_backends_agree(dtype: torch.dtype, head_dim: int) -> None:
    """flex runs wherever we do, and flash where it is installed."""
    forest = FORESTS["star across tiles"]
    problem = make_problem(forest.num_tokens, dtype, head_dim, heads=(8, 2))
    layout = forest.layout(DEVICE)
    ours = run_cuda(layout, problem)
    peers = [
        status.name
        for status in list_backends()
        if status.op == "tree_attention" and status.is_available and status.name != "cuda"
    ]
    assert {"flex", "reference"} <= set(peers)
    for name in peers:
        theirs = run(attention_of(layout, problem.scale, backend=name), problem)
        assert_close(theirs, ours, 2 * rounding_of(dtype), name)


@pytest.mark.parametrize("sizes", [128, 256, (192, 128)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_workspace_is_no_more_than_the_gradients_in_fp32(
    deterministic: bool, sizes: Sizes
) -> None:
    problem = make_problem(LONG_PROMPT.num_tokens, torch.bfloat16, sizes, heads=(8, 2))
    layout = LONG_PROMPT.layout(DEVICE)
    run_cuda(layout, problem, deterministic=deterministic)
    inputs = [x.clone().requires_grad_() for x in (problem.q_TNH, problem.k_TKH, problem.v_TKH)]
    attention = attention_of(layout, problem.scale, deterministic=deterministic)
    out_TNH, lse_NT = attention(*inputs)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    grads = torch.autograd.grad((out_TNH, lse_NT), inputs, (problem.dout_TNH, problem.dlse_NT))
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    results = sum(2 * grad.numel() for grad in grads)
    in_fp32 = sum(4 * grad.numel() for grad in (grads[1:] if deterministic else grads))
    # Two floats a query and head; each gradient's last tile is a whole one.
    rest = 2 * 4 * lse_NT.numel() + 3 * 4 * 8 * 128 * problem.q_TNH.shape[2]
    assert results < peak <= results + in_fp32 + rest


@pytest.mark.parametrize("deterministic", [False, True])
def test_nothing_waits_for_the_gpu(deterministic: bool) -> None:
    forest = FORESTS["two groups"]
    problem = make_problem(forest.num_tokens, torch.bfloat16, 128)
    layout = forest.layout(DEVICE)
    expected = run_cuda(layout, problem, deterministic=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = run_cuda(layout, problem, deterministic=deterministic)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if deterministic:
        assert_same_bits(got, expected)
    else:
        assert_close(got, expected, rounding_of(torch.bfloat16))
