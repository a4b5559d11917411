"""Sliding windows by depth along the path, sinks, and values of another head size."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from ratoon_kernels import Span, TreeLayout, sink_gradient, tree_attention, with_sink
from ratoon_kernels.tree_attention import blocks
from tests.kernels.forests import (
    NAMED,
    Forest,
    Problem,
    Results,
    assert_close,
    chain,
    forest_from,
    random_forest,
    random_problem,
    run,
)
from tests.kernels.parts import random_cuts, run_in_parts

HEADS, KV_HEADS = 4, 2


def dense(forest: Forest, problem: Problem, window: int | None, sink_N: Tensor | None) -> Results:
    """Results of a dense softmax in fp64, the sink a column of its own, by torch's derivatives."""
    mask_TT = torch.from_numpy(forest.mask(window))

    def attention(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        group = q.shape[1] // k.shape[1]
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
        scores = (q @ k.mT * problem.scale).masked_fill(~mask_TT, -torch.inf)
        if sink is not None:
            column = sink[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat((scores, column), dim=-1)
            v = torch.cat((v, torch.zeros_like(v[:, :1])), dim=1)
        return (torch.softmax(scores, dim=-1) @ v).transpose(0, 1), scores.logsumexp(dim=-1)

    return differentiate(attention, problem, sink_N)


def differentiate(
    attention: Callable[..., tuple[Tensor, Tensor]], problem: Problem, sink_N: Tensor | None
) -> Results:
    """Output, log-sum-exp and gradients, that of the sink among them."""
    if sink_N is None:
        return run(lambda *qkv: attention(*qkv, None), problem)
    sink_N = sink_N.clone().requires_grad_()
    inputs = [x.clone().requires_grad_() for x in (problem.q_TNH, problem.k_TKH, problem.v_TKH)]
    out, lse = attention(*inputs, sink_N)
    dq, dk, dv, dsink = torch.autograd.grad(
        [out, lse], [*inputs, sink_N], [problem.dout_TNH, problem.dlse_NT]
    )
    return {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv, "dsink": dsink}


def _attend(
    layout: TreeLayout,
    scale: float,
    window: int | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return tree_attention(q, k, v, layout, scale, window=window, sink_N=sink_N)


def windowed_problem(
    forest: Forest, seed: int, *, value_dim: int = 8, dtype: torch.dtype = torch.float64
) -> Problem:
    problem = random_problem(
        forest.num_tokens, heads=HEADS, kv_heads=KV_HEADS, head_dim=8, dtype=dtype, seed=seed
    )
    wide = random_problem(
        forest.num_tokens, heads=HEADS, kv_heads=KV_HEADS, head_dim=value_dim, dtype=dtype,
        seed=seed + 1000,
    )  # fmt: skip
    return replace(problem, v_TKH=wide.v_TKH, dout_TNH=wide.dout_TNH)


def sinks(seed: int) -> Tensor:
    """As large as the logits, so that they take a good part of the softmax."""
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(HEADS, generator=generator, dtype=torch.float64)


def longest_path(forest: Forest) -> int:
    return int(forest.mask().sum(axis=1).max())


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("group_tokens", [1, 8, 64])
def test_random_forests_equal_a_dense_softmax(
    group_tokens: int, block_kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any tree, window and head size of the values, with sinks or without: all gradients."""
    monkeypatch.setattr(blocks, "GROUP_TOKENS", group_tokens)
    monkeypatch.setattr(blocks, "WINDOW_QUERIES", group_tokens)
    rng = np.random.default_rng(group_tokens)
    for seed in range(16):
        forest = random_forest(rng, max_nodes=10, max_length=int(rng.integers(1, 14)))
        layout, longest = forest.layout(), longest_path(forest)
        problem = windowed_problem(forest, seed, value_dim=(8, 4, 24)[seed % 3])
        sink_N = sinks(seed) if seed % 2 else None
        for window in {1, 2, int(rng.integers(1, longest + 1)), longest - 1, longest + 7} - {0}:
            attend = functools.partial(_attend, layout, problem.scale, window)
            got = differentiate(attend, problem, sink_N)
            expected = dense(forest, problem, window, sink_N)
            assert_close(got, expected, 1e-10, f"{block_kernel} {seed} {window}")
            assert sink_N is None or got["dsink"].norm() > 0


@pytest.mark.usefixtures("poisoned_memory")
def test_any_split_under_a_window_adds_up(
    block_kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts know depths of the whole forest; a sink is applied once, to what is merged."""
    monkeypatch.setattr(blocks, "GROUP_TOKENS", 4)
    rng = np.random.default_rng(3)
    for seed in range(16):
        forest = random_forest(rng, max_nodes=10, max_length=int(rng.integers(1, 12)))
        window = int(rng.integers(1, longest_path(forest) + 2))
        problem = windowed_problem(forest, seed, value_dim=(8, 4, 24)[seed % 3])
        problem = replace(problem, dlse_NT=torch.zeros_like(problem.dlse_NT))
        sink_N = sinks(seed) if seed % 2 else None
        cuts = [random_cuts(rng, forest.num_tokens) for _ in range(2)]
        got = run_in_parts(forest.layout(), problem, *cuts, window=window, sink_N=sink_N)
        expected = dense(forest, problem, window, sink_N)
        assert_close(got, expected, 1e-10, f"{block_kernel} {seed} {window} {cuts}")


def test_a_window_reaches_across_forks_and_not_across_siblings() -> None:
    """By hand: prompt of 3, two responses of 2; a window of 3 from the first response token."""
    forest = forest_from([-1, 0, 0], [3, 2, 2])
    q = torch.zeros((7, 1, 1), dtype=torch.float64)
    v = torch.arange(7, dtype=torch.float64)[:, None, None]
    out, lse = tree_attention(q, q, v, forest.layout(), 1.0, window=3)
    assert out[:, 0, 0].tolist() == [0, 0.5, 1, 2, 3, (1 + 2 + 5) / 3, (2 + 5 + 6) / 3]
    torch.testing.assert_close(lse[0].exp(), torch.tensor([1.0, 2, 3, 3, 3, 3, 3]).double())


def test_a_window_of_the_longest_path_changes_no_bit(block_kernel: str) -> None:
    for name in ("two_trees", "star", "comb", "chain_of_tokens"):
        forest = NAMED[name]
        problem, layout = windowed_problem(forest, 1, dtype=torch.float32), forest.layout()
        without, widest = (
            run(functools.partial(_attend, layout, problem.scale, window), problem)
            for window in (None, longest_path(forest))
        )
        for result, value in without.items():
            assert torch.equal(widest[result], value), f"{block_kernel} {name} {result}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_inputs_give_equal_bits(dtype: torch.dtype) -> None:
    forest = NAMED["two_trees"]
    problem, layout = windowed_problem(forest, 2, value_dim=16, dtype=dtype), forest.layout()
    first, second = (
        differentiate(
            functools.partial(_attend, layout, problem.scale, 21), problem, sinks(1).to(dtype)
        )
        for _ in range(2)
    )
    for name, value in first.items():
        assert value.isfinite().all()
        assert torch.equal(second[name], value), name


@pytest.mark.parametrize(("window", "value_dim"), [(None, 3), (3, 2), (5, 5)])
def test_gradcheck(window: int | None, value_dim: int) -> None:
    forest = forest_from([-1, 0, 1, 0, -1], [3, 2, 1, 4, 2])
    layout = forest.layout()
    generator = torch.Generator().manual_seed(0)
    shapes = ((12, 2, 3), (12, 1, 3), (12, 1, value_dim), (2,))
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    torch.autograd.gradcheck(
        lambda q, k, v, sink: tree_attention(q, k, v, layout, 0.7, window=window, sink_N=sink),
        [x.requires_grad_() for x in inputs],
    )


def test_a_sink_far_below_changes_nothing_and_far_above_takes_all() -> None:
    forest = NAMED["two_trees"]
    problem = windowed_problem(forest, 5)
    q, k, v = problem.q_TNH, problem.k_TKH, problem.v_TKH
    out, lse = tree_attention(q, k, v, forest.layout(), problem.scale)
    for sink, factor in ((-1e4, 1.0), (1e4, 0.0)):
        got, got_lse = with_sink(out, lse, torch.full((HEADS,), sink))
        torch.testing.assert_close(got, out * factor)
        torch.testing.assert_close(got_lse, lse.clamp_min(sink))
        dsink = sink_gradient(problem.dout_TNH, got, got_lse, torch.full((HEADS,), sink))
        torch.testing.assert_close(dsink, torch.zeros(HEADS, dtype=torch.float64))


def test_the_work_of_a_window_does_not_grow_with_the_path() -> None:
    """A long path was cut into one block of all pairs, whose mask has the size of their number."""
    table = chain(4, 4096).layout().node_table_M4
    tokens = Span(0, 4 * 4096)
    cut = blocks.cut_into_blocks(table, tokens, tokens, 128)
    pairs = sum(len(block.queries) * len(block.keys) for block in cut)
    assert pairs < 2.5 * 128 * len(tokens)
    assert max(len(block.queries) for block in cut) <= 128
