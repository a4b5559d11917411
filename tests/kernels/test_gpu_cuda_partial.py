"""The cuda backend's partial form: over any split of queries and keys the parts are the whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from ratoon_kernels import (
    BackendUnavailableError,
    Span,
    TreeLayout,
    tree_attention_partial_backward,
    tree_attention_partial_forward,
)
from tests.kernels.cuda_attention import (
    BACKEND,
    DEVICE,
    KINDS,
    LONG_PROMPT,
    LSE_TOLERANCE,
    SIZES,
    Sizes,
    dims_of,
    make_problem,
    num_split_tiles,
    rounding_of,
    run_cuda_in_parts,
    run_reference,
    stale_memory,
)
from tests.kernels.forests import (
    Problem,
    Results,
    assert_close,
    forest_from,
    random_forest,
    relative_error,
)
from tests.kernels.parts import random_cuts

pytestmark = pytest.mark.gpu

# Two trees; the second begins at 562.
FOREST = forest_from([-1, 0, 0, 0, -1, 4, 5, 5], [300, 61, 200, 1, 270, 77, 255, 129])
NUM_TOKENS = FOREST.num_tokens


def _forward(
    problem: Problem, layout: TreeLayout, queries: Span, keys: Span
) -> tuple[Tensor, Tensor]:
    q_QNH = problem.q_TNH[queries.start : queries.stop]
    k_SKH, v_SKH = (x[keys.start : keys.stop] for x in (problem.k_TKH, problem.v_TKH))
    with stale_memory():
        return tree_attention_partial_forward(
            *(q_QNH, k_SKH, v_SKH, layout, problem.scale),
            query_start=queries.start,
            key_start=keys.start,
            backend=BACKEND,
        )


def _backward(
    problem: Problem,
    layout: TreeLayout,
    queries: Span,
    keys: Span,
    merged: tuple[Tensor, Tensor],
    buffers: tuple[Tensor, Tensor],
    *,
    deterministic: bool,
) -> Tensor:
    rows = slice(queries.start, queries.stop)
    k_SKH, v_SKH = (x[keys.start : keys.stop] for x in (problem.k_TKH, problem.v_TKH))
    out_QNH, lse_NQ = merged
    with stale_memory():
        return tree_attention_partial_backward(
            *(problem.dout_TNH[rows], problem.q_TNH[rows], k_SKH, v_SKH),
            *(out_QNH.to(problem.q_TNH.dtype), lse_NQ, layout, problem.scale),
            query_start=queries.start,
            key_start=keys.start,
            dk_acc_SKH=buffers[0],
            dv_acc_SKH=buffers[1],
            backend=BACKEND,
            deterministic=deterministic,
        )


def _check(got: Results, layout: TreeLayout, problem: Problem, label: str) -> None:
    expected = run_reference(layout, problem, with_dlse=False)
    assert_close(got, expected, rounding_of(problem.q_TNH.dtype), label)
    assert relative_error(got["lse"], expected["lse"]) <= LSE_TOLERANCE, label


@pytest.mark.parametrize(("dtype", "sizes"), KINDS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_random_splits_add_up_to_the_whole(
    dtype: torch.dtype, sizes: Sizes, deterministic: bool
) -> None:
    rng = np.random.default_rng(sizes)
    for seed in range(12):
        forest = random_forest(rng, max_nodes=16, max_length=int(rng.choice([3, 40, 150])))
        heads = ((4, 2), (5, 1), (4, 4))[seed % 3]
        problem = make_problem(forest.num_tokens, dtype, sizes, heads=heads, seed=seed)
        query_cuts, key_cuts = (random_cuts(rng, forest.num_tokens) for _ in range(2))
        layout = forest.layout(DEVICE)
        got = run_cuda_in_parts(layout, problem, query_cuts, key_cuts, deterministic=deterministic)
        _check(got, layout, problem, f"{seed}: {query_cuts} {key_cuts}")


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("deterministic", [False, True])
def test_waves_of_siblings_add_to_their_prompt(kv_heads: int, deterministic: bool) -> None:
    """Streaming: the prompt runs once and keeps K and V; its key tiles are cut into pieces."""
    layout = LONG_PROMPT.layout(DEVICE)
    problem = make_problem(LONG_PROMPT.num_tokens, torch.bfloat16, 128, heads=(4, kv_heads))
    bounds = [0, 5059, int(LONG_PROMPT.stop[3]), LONG_PROMPT.num_tokens]
    cuts = list(itertools.pairwise(bounds))
    prompt = Span(0, 5059)
    of_prompt, of_wave = (
        num_split_tiles(layout.partial_schedule(queries, prompt).header, kv_heads)[deterministic]
        for queries in (prompt, Span(bounds[2], bounds[3]))
    )
    assert of_prompt > 0
    assert of_wave > 0 or deterministic
    got = run_cuda_in_parts(layout, problem, cuts, cuts, deterministic=deterministic)
    _check(got, layout, problem, "waves")


def test_queries_that_attend_none_of_the_keys_have_no_output_and_no_gradient() -> None:
    """The last of the first tree's and all of the second tree's, against keys of the first."""
    problem, layout = make_problem(NUM_TOKENS, torch.bfloat16, 128), FOREST.layout(DEVICE)
    queries, keys = Span(500, NUM_TOKENS), Span(310, 561)
    num_attending = 61
    out, lse = _forward(problem, layout, queries, keys)
    assert (out[num_attending:] == 0).all()
    assert (lse[:, num_attending:] == -torch.inf).all()
    assert lse[:, :num_attending].isfinite().all()
    assert (out[:num_attending].abs().sum(dim=-1) > 0).all()
    shape = problem.k_TKH[keys.start : keys.stop].shape
    for deterministic in (False, True):
        buffers = (torch.zeros(shape, device=DEVICE), torch.zeros(shape, device=DEVICE))
        dq = _backward(
            problem, layout, queries, keys, (out, lse), buffers, deterministic=deterministic
        )
        assert (dq[num_attending:] == 0).all()
        assert (dq[:num_attending].abs().sum(dim=-1) > 0).all()
        # Keys [310, 361) are a sibling's of the queries, the others are their own path.
        for buffer in buffers:
            assert (buffer[:51] == 0).all()
            assert (buffer[51 : 51 + 190].abs().sum(dim=-1) > 0).all()


NOTHING = {
    "keys after the queries": (Span(10, 200), Span(200, 391)),
    "keys of another tree": (Span(600, 850), Span(0, 300)),
    "keys of a sibling": (Span(361, 561), Span(300, 361)),
    "one query, one key": (Span(0, 1), Span(1, 2)),
    "no queries": (Span(129, 129), Span(0, 300)),
    "no keys": (Span(129, 400), Span(77, 77)),
    "neither": (Span(NUM_TOKENS, NUM_TOKENS), Span(0, 0)),
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", NOTHING)
def test_ranges_without_a_pair_change_nothing(name: str, deterministic: bool) -> None:
    queries, keys = NOTHING[name]
    problem, layout = make_problem(NUM_TOKENS, torch.float16, 64), FOREST.layout(DEVICE)
    out, lse = _forward(problem, layout, queries, keys)
    assert (out.shape, lse.shape) == ((len(queries), 4, 64), (4, len(queries)))
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    merged = (torch.ones_like(out), torch.zeros_like(lse))
    before = make_problem(len(keys), torch.float16, 64, seed=1)
    buffers = (before.k_TKH.float(), before.v_TKH.float())
    held = [buffer.clone() for buffer in buffers]
    dq = _backward(problem, layout, queries, keys, merged, buffers, deterministic=deterministic)
    assert dq.shape == out.shape
    assert (dq == 0).all()
    for buffer, same in zip(buffers, held, strict=True):
        assert torch.equal(buffer, same)


Buffer = Callable[[int, int, int], tuple[Tensor, Tensor]]


def _sevens(*shape: int) -> Tensor:
    return torch.full(shape, 7.0, device=DEVICE)


def _rows_of(wide: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    return wide, wide[..., first : first + width]


# Memory and the view of it, of any strides, that is added to.
BUFFERS: dict[str, Buffer] = {
    "odd rows": lambda s, k, h: _rows_of(_sevens(s, k, h + 1), 0, h),
    "odd address": lambda s, k, h: _rows_of(_sevens(s, k, h + 2), 1, h),
    "wider rows": lambda s, k, h: _rows_of(_sevens(s, k, h + 4), 2, h),
    "heads outermost": lambda s, k, h: (wide := _sevens(k, s, h), wide.transpose(0, 1)),
    "some of the heads": lambda s, k, h: (wide := _sevens(s, k + 3, h), wide[:, 2:-1]),
    "every other token": lambda s, k, h: (wide := _sevens(2 * s, k, h), wide[::2]),
    "tokens of a longer one": lambda s, k, h: (wide := _sevens(s + 300, k, h), wide[131 : 131 + s]),
}


@pytest.mark.parametrize("name", BUFFERS)
@pytest.mark.parametrize("sizes", SIZES)
def test_buffers_of_any_strides_are_added_to_and_nothing_beside_them(
    name: str, sizes: Sizes
) -> None:
    problem, layout = make_problem(NUM_TOKENS, torch.bfloat16, sizes), FOREST.layout(DEVICE)
    queries, keys = Span(45, NUM_TOKENS), Span(3, 700)
    merged = _forward(problem, layout, queries, keys)
    before = make_problem(len(keys), torch.float32, sizes, seed=1)
    dense = (before.k_TKH.clone(), before.v_TKH.clone())
    expected = _backward(problem, layout, queries, keys, merged, dense, deterministic=True)
    assert relative_error(dense[0], before.k_TKH) > 0.1
    head_dim, value_dim = dims_of(sizes)
    wide_dk, dk_acc = BUFFERS[name](len(keys), 2, head_dim)
    wide_dv, dv_acc = BUFFERS[name](len(keys), 2, value_dim)
    dk_acc.copy_(before.k_TKH)
    dv_acc.copy_(before.v_TKH)
    got = _backward(problem, layout, queries, keys, merged, (dk_acc, dv_acc), deterministic=True)
    assert torch.equal(got, expected)
    for wide, view, same in ((wide_dk, dk_acc, dense[0]), (wide_dv, dv_acc, dense[1])):
        assert torch.equal(view, same)
        view.fill_(7.0)
        assert (wide == 7.0).all()


def test_many_waves_are_added_up_in_fp32() -> None:
    """What each wave adds is below half a step of 16 bits of what the buffer holds."""
    problem, layout = make_problem(NUM_TOKENS, torch.bfloat16, 64), FOREST.layout(DEVICE)
    whole = Span(0, NUM_TOKENS)
    merged = _forward(problem, layout, whole, whole)
    once = torch.zeros((2, *problem.k_TKH.shape), device=DEVICE)
    _backward(problem, layout, whole, whole, merged, (once[0], once[1]), deterministic=True)
    large = torch.full_like(once, 4096.0)
    for _ in range(16):
        _backward(problem, layout, whole, whole, merged, (large[0], large[1]), deterministic=True)
    assert relative_error(large - 4096, 16 * once) < 1e-3


def test_what_it_has_no_kernel_for_is_refused_with_the_reason() -> None:
    problem, layout = make_problem(NUM_TOKENS, torch.bfloat16, 96), FOREST.layout(DEVICE)
    with pytest.raises(BackendUnavailableError, match="head_dim 96, it has 64, 128, 256, 192 with"):
        _forward(problem, layout, Span(0, 10), Span(0, 10))
