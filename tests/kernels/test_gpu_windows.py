"""Windows and sinks on a GPU: the cuda backend's masks and work lists, flex beside it."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from ratoon_kernels import TreeLayout, select_backend, tree_attention
from tests.kernels.cuda_attention import (
    DEVICE,
    KINDS,
    LONG_PROMPT,
    LSE_TOLERANCE,
    SIZES,
    Sizes,
    assert_equals_reference,
    assert_no_worse_than_torch,
    assert_same_bits,
    dims_of,
    in_fp32,
    make_problem,
    rounding_of,
    run_cuda,
    run_cuda_in_parts,
    run_reference,
    stale_memory,
)
from tests.kernels.forests import (
    NAMED,
    Forest,
    Problem,
    Results,
    assert_close,
    chain,
    comb,
    random_forest,
    relative_error,
    run,
    star,
)
from tests.kernels.parts import random_cuts

pytestmark = pytest.mark.gpu

EVERY_KIND = pytest.mark.parametrize(("dtype", "head_dim"), KINDS)
EITHER_MODE = pytest.mark.parametrize("deterministic", [False, True])

# Forks within a tile, on its edge and off it; branches longer and shorter than a window.
FORESTS: dict[str, Forest] = {
    **{name: forest for name, forest in NAMED.items() if forest.num_tokens},
    "chain across tiles": chain(9, 143),
    "star": star(517, 7, 311),
    "star on edges": star(512, 4, 384),
    "comb": comb(6, 129),
    "deep": random_forest(np.random.default_rng(3), max_nodes=40, max_length=120),
}


def _longest_path(forest: Forest) -> int:
    return int(forest.mask().sum(axis=1).max())


@EVERY_KIND
@EITHER_MODE
def test_values_and_gradients_are_no_worse_than_torch(
    dtype: torch.dtype, head_dim: Sizes, deterministic: bool
) -> None:
    rng = np.random.default_rng(1)
    for index, (name, forest) in enumerate(FORESTS.items()):
        heads = ((4, 2), (5, 1), (4, 4))[index % 3]
        problem = make_problem(forest.num_tokens, dtype, head_dim, heads=heads, seed=index)
        some = int(rng.integers(2, max(_longest_path(forest), 3)))
        for window in (some, 128, (2, 64, 129, 200)[index % 4]):
            assert_no_worse_than_torch(
                forest, problem, f"{name} {window}", deterministic=deterministic, window=window
            )


@EVERY_KIND
def test_a_window_of_one_token_copies_the_values(dtype: torch.dtype, head_dim: Sizes) -> None:
    """The diagonal alone: P is 1, whose gradients of q and k are 0 but for rounding."""
    forest = FORESTS["star"]
    problem = make_problem(forest.num_tokens, dtype, head_dim, heads=(4, 4))
    got = run_cuda(forest.layout(DEVICE), problem, with_dlse=False, window=1)
    assert torch.equal(got["out"], problem.v_TKH)
    assert torch.equal(got["dv"], problem.dout_TNH)
    logits_TN = (problem.q_TNH.float() * problem.k_TKH.float()).sum(dim=-1) * problem.scale
    assert relative_error(got["lse"].T, logits_TN) <= LSE_TOLERANCE
    for name in ("dq", "dk"):
        assert got[name].norm() <= 0.05 * got["dv"].norm(), name


@EVERY_KIND
@EITHER_MODE
def test_a_window_as_long_as_the_longest_path_changes_no_bit(
    dtype: torch.dtype, head_dim: Sizes, deterministic: bool
) -> None:
    forest = FORESTS["star"]
    problem, layout = make_problem(forest.num_tokens, dtype, head_dim), forest.layout(DEVICE)
    without, widest = (
        run_cuda(layout, problem, deterministic=deterministic, window=window)
        for window in (None, _longest_path(forest))
    )
    names = tuple(without) if deterministic else ("out", "lse")
    assert_same_bits(widest, {name: without[name] for name in names})
    narrower = run_cuda(layout, problem, window=_longest_path(forest) - 1)
    assert not torch.equal(narrower["lse"], without["lse"]), "the last token sees one less"


@EVERY_KIND
def test_a_deterministic_call_repeats_its_bits(dtype: torch.dtype, head_dim: Sizes) -> None:
    for window in (128, 700):
        problem = make_problem(LONG_PROMPT.num_tokens, dtype, head_dim, heads=(8, 2))
        layout = LONG_PROMPT.layout(DEVICE)
        first = run_cuda(layout, problem, deterministic=True, window=window)
        for _ in range(3):
            again = run_cuda(layout, problem, deterministic=True, window=window)
            assert_same_bits(again, first, str(window))
        default = run_cuda(layout, problem, window=window)
        assert_same_bits(default, {name: first[name] for name in ("out", "lse")})
        assert_close(default, first, rounding_of(dtype), str(window))


@pytest.mark.parametrize("window", [128, 1000, 4096])
@EITHER_MODE
def test_a_long_prompt_equals_the_reference(window: int, deterministic: bool) -> None:
    """Key tiles at the prompt's end are seen by a part of each response: several pieces."""
    problem = make_problem(LONG_PROMPT.num_tokens, torch.bfloat16, 128, heads=(8, 2))
    assert_equals_reference(
        LONG_PROMPT, problem, str(window), deterministic=deterministic, window=window
    )


@EVERY_KIND
@EITHER_MODE
def test_random_splits_add_up_to_the_whole(
    dtype: torch.dtype, head_dim: Sizes, deterministic: bool
) -> None:
    rng = np.random.default_rng(1)
    for seed in range(6):
        forest = random_forest(rng, max_nodes=16, max_length=int(rng.choice([3, 40, 150])))
        problem = make_problem(forest.num_tokens, dtype, head_dim, seed=seed)
        window = int(rng.integers(1, _longest_path(forest) + 2))
        cuts = [random_cuts(rng, forest.num_tokens) for _ in range(2)]
        layout = forest.layout(DEVICE)
        got = run_cuda_in_parts(layout, problem, *cuts, window=window, deterministic=deterministic)
        expected = run_reference(layout, problem, with_dlse=False, window=window)
        label = f"{seed}: {window} {cuts}"
        assert_close(got, expected, rounding_of(dtype), label)
        assert relative_error(got["lse"], expected["lse"]) <= LSE_TOLERANCE, label


def _with_sinks(
    layout: TreeLayout, problem: Problem, sink_N: Tensor, window: int | None, backend: str
) -> Results:
    """Results and gradients, that of the sinks among them."""
    sink_N = sink_N.clone().requires_grad_()
    attend = functools.partial(
        tree_attention, layout=layout, scale=problem.scale, window=window, backend=backend
    )
    with stale_memory():
        results = run(functools.partial(attend, sink_N=sink_N), problem)
        out, lse = attend(problem.q_TNH, problem.k_TKH, problem.v_TKH, sink_N=sink_N)
    grads = (problem.dout_TNH, problem.dlse_NT.to(lse.dtype))
    (dsink,) = torch.autograd.grad((out, lse), sink_N, grads)
    return results | {"dsink": dsink}


@EVERY_KIND
@pytest.mark.parametrize("window", [None, 128])
def test_sinks_take_their_share(dtype: torch.dtype, head_dim: Sizes, window: int | None) -> None:
    forest = FORESTS["star"]
    layout = forest.layout(DEVICE)
    problem = make_problem(forest.num_tokens, dtype, head_dim, heads=(8, 2))
    sink_N = torch.linspace(-2, 6, 8, device=DEVICE)
    got = _with_sinks(layout, problem, sink_N, window, "cuda")
    expected = _with_sinks(layout, in_fp32(problem), sink_N, window, "reference")
    assert_close(got, expected, rounding_of(dtype), str(window))
    assert relative_error(got["lse"], expected["lse"]) <= LSE_TOLERANCE
    assert expected["dsink"].abs().min() > 0


@EVERY_KIND
def test_a_sink_far_below_changes_no_bit_and_far_above_takes_all(
    dtype: torch.dtype, head_dim: Sizes
) -> None:
    forest = FORESTS["star"]
    layout = forest.layout(DEVICE)
    problem = make_problem(forest.num_tokens, dtype, head_dim, heads=(4, 2))
    qkv = (problem.q_TNH, problem.k_TKH, problem.v_TKH)
    sink_N = torch.tensor([-torch.inf, -1e4, 1e4, 0.0], device=DEVICE)
    with stale_memory():
        without, got = (
            tree_attention(*qkv, layout, problem.scale, sink_N=sink, backend="cuda")
            for sink in (None, sink_N)
        )
    for head in (0, 1):
        assert torch.equal(got[0][:, head], without[0][:, head])
        assert torch.equal(got[1][head], without[1][head])
    assert got[0][:, 2].abs().max() == 0
    torch.testing.assert_close(got[1][2], torch.full_like(got[1][2], 1e4))
    assert not torch.equal(got[0][:, 3], without[0][:, 3])


@pytest.mark.parametrize("sizes", SIZES)
def test_flex_serves_windows_and_values_of_another_size(sizes: Sizes) -> None:
    forest = FORESTS["star"]
    problem = make_problem(forest.num_tokens, torch.bfloat16, sizes)
    layout = forest.layout(DEVICE)
    for window in (100, None):
        attention = functools.partial(
            tree_attention, layout=layout, scale=problem.scale, window=window, backend="flex"
        )
        expected = run_reference(layout, problem, window=window)
        assert_close(run(attention, problem), expected, rounding_of(torch.bfloat16), str(window))


def test_a_call_with_a_window_takes_the_kernels_of_this_repository() -> None:
    device = torch.device(DEVICE)
    for sizes in SIZES:
        head_dim, value_dim = dims_of(sizes)
        chosen = select_backend(
            "tree_attention", None, device, torch.bfloat16, head_dim,
            value_dim=value_dim, window=128,
        )  # fmt: skip
        assert chosen == "cuda"


def test_a_compiled_call_finds_the_work_lists_of_its_window() -> None:
    """One graph for all forests that were built for the window; one that was not is refused."""
    compiled = torch.compile(tree_attention, fullgraph=True, backend="aot_eager")
    for name, forest in itertools.islice(FORESTS.items(), 2, 6):
        problem = make_problem(forest.num_tokens, torch.bfloat16, 64)
        qkv = (problem.q_TNH, problem.k_TKH, problem.v_TKH)
        nodes = forest.layout(DEVICE, windows=(50,))
        got = compiled(*qkv, nodes, problem.scale, window=50, backend="cuda")
        expected = tree_attention(*qkv, nodes, problem.scale, window=50, backend="cuda")
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one, other), name
