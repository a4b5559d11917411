"""The partial form: over any split of queries and keys the parts add up to the whole."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ratoon_kernels import (
    KernelArgumentError,
    merge_partials,
    tree_attention,
    tree_attention_partial_backward,
    tree_attention_partial_forward,
)
from ratoon_kernels.tree_attention import blocks
from tests.kernels.forests import (
    NAMED,
    assert_close,
    dense_oracle,
    random_forest,
    random_problem,
    relative_error,
    run,
)
from tests.kernels.parts import random_cuts, run_in_parts


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("group_tokens", [1, 8, 64])
def test_any_split_adds_up_to_the_dense_oracle(
    group_tokens: int, block_kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "GROUP_TOKENS", group_tokens)
    rng = np.random.default_rng(group_tokens)
    for seed in range(20):
        forest = random_forest(rng, max_nodes=10, max_length=int(rng.integers(1, 12)))
        problem = random_problem(
            forest.num_tokens, heads=4, kv_heads=2, head_dim=8, dtype=torch.float64, seed=seed
        )
        query_cuts, key_cuts = (
            random_cuts(rng, forest.num_tokens),
            random_cuts(rng, forest.num_tokens),
        )
        got = run_in_parts(forest.layout(), problem, query_cuts, key_cuts)
        expected = dense_oracle(forest.mask(), problem, with_dlse=False)
        assert_close(got, expected, 1e-10, f"{block_kernel} {seed} {query_cuts} {key_cuts}")


def test_a_prompt_then_waves_of_siblings_equal_the_whole() -> None:
    """Streaming: the prefix keeps K and V, each wave runs against it and adds to its gradients."""
    forest = NAMED["star"]
    layout = forest.layout()
    cuts = [(0, 67), (67, 67 + 3 * 13), (67 + 3 * 13, 67 + 9 * 13)]
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        problem = random_problem(
            forest.num_tokens, heads=4, kv_heads=2, head_dim=16, dtype=dtype, seed=1
        )
        whole = run(
            lambda q, k, v, p=problem: tree_attention(q, k, v, layout, p.scale),
            problem,
            with_dlse=False,
        )
        assert_close(run_in_parts(layout, problem, cuts, cuts), whole, tolerance, str(dtype))


def test_queries_that_attend_none_of_the_keys_have_no_output() -> None:
    forest = NAMED["sequences"]  # the first two: [0, 33) and [33, 34)
    problem = random_problem(
        forest.num_tokens, heads=4, kv_heads=2, head_dim=8, dtype=torch.float32, seed=1
    )
    k, v = problem.k_TKH[:33], problem.v_TKH[:33]
    out, lse = tree_attention_partial_forward(
        problem.q_TNH[30:40], k, v, forest.layout(), 1.0, query_start=30, key_start=0
    )
    assert (out[3:] == 0).all()
    assert (lse[:, 3:] == -torch.inf).all()
    assert lse[:, :3].isfinite().all()


def test_accumulators_are_added_to_and_keep_small_terms() -> None:
    """A bf16 sum of many waves would lose what an fp32 buffer keeps (relative step 2**-9)."""
    forest = NAMED["star"]
    problem = random_problem(
        forest.num_tokens, heads=2, kv_heads=1, head_dim=8, dtype=torch.bfloat16, seed=1
    )
    layout, tokens = forest.layout(), [(0, forest.num_tokens)]
    once = run_in_parts(layout, problem, tokens, tokens)
    out, lse = once["out"].bfloat16(), once["lse"]
    base = 1024.0
    dk_acc = torch.full(problem.k_TKH.shape, base)
    dv_acc = torch.full(problem.v_TKH.shape, -base)
    tree_attention_partial_backward(
        problem.dout_TNH, problem.q_TNH, problem.k_TKH, problem.v_TKH, out, lse, layout,
        problem.scale, query_start=0, key_start=0, dk_acc_SKH=dk_acc, dv_acc_SKH=dv_acc,
    )  # fmt: skip
    assert relative_error(dk_acc - base, once["dk"]) < 1e-3
    assert relative_error(dv_acc + base, once["dv"]) < 1e-3


def test_merging_is_differentiable_through_outputs_and_log_sum_exps() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = ((5, 2, 3), (2, 5), (5, 2, 3), (2, 5))
    parts = [torch.randn(s, generator=generator, dtype=torch.float64) for s in sizes]
    torch.autograd.gradcheck(merge_partials, [x.requires_grad_() for x in parts])
    nothing = torch.full((2, 5), -torch.inf, dtype=torch.float64)
    out, lse = merge_partials(parts[0], nothing, parts[2], nothing)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    out, lse = merge_partials(parts[0], nothing, parts[2], parts[3])
    assert torch.equal(out, parts[2])
    assert torch.equal(lse, parts[3])


def _good() -> dict[str, Any]:
    layout = NAMED["star"].layout()
    problem = random_problem(20, heads=4, kv_heads=2, head_dim=8, dtype=torch.bfloat16, seed=0)
    return {
        "dout_QNH": problem.dout_TNH, "q_QNH": problem.q_TNH, "k_SKH": problem.k_TKH,
        "v_SKH": problem.v_TKH, "out_QNH": problem.dout_TNH, "lse_NQ": torch.zeros(4, 20),
        "layout": layout, "scale": 0.5, "query_start": 164, "key_start": 10,
        "dk_acc_SKH": torch.zeros(20, 2, 8), "dv_acc_SKH": torch.zeros(20, 2, 8),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("query_start", lambda _: 165),
        ("query_start", lambda _: -1),
        ("key_start", lambda _: 180),
        ("dout_QNH", lambda x: x.float()),
        ("dout_QNH", lambda x: x[:1]),
        ("out_QNH", lambda x: x.mT.contiguous().mT),
        ("lse_NQ", lambda x: x.T),
        ("lse_NQ", lambda x: x.bfloat16()),
        ("dk_acc_SKH", lambda x: x.bfloat16()),
        ("dv_acc_SKH", lambda x: x[1:]),
        ("dv_acc_SKH", lambda x: x.to("meta")),
        ("k_SKH", lambda x: x.float()),
    ],
)
def test_a_wrong_argument_is_refused_by_name(name: str, change: Any) -> None:
    given = _good()
    assert isinstance(tree_attention_partial_backward(**given), Tensor)
    given[name] = change(given[name])
    with pytest.raises(KernelArgumentError) as refusal:
        tree_attention_partial_backward(**given)
    assert refusal.value.argument == name
    with pytest.raises(KernelArgumentError, match="lse_b_NQ"):
        merge_partials(given["q_QNH"], torch.zeros(4, 20), given["q_QNH"], torch.zeros(20, 4))
