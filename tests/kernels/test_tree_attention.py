"""Tree attention, whole form, of the reference backend: values, gradients and refusals."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from ratoon_kernels import KernelArgumentError, Span, TreeLayout, tree_attention
from ratoon_kernels.tree_attention import block_flash, blocks, reference
from ratoon_kernels.tree_attention.operands import Operands
from tests.kernels.forests import (
    NAMED,
    Problem,
    Results,
    assert_close,
    dense_oracle,
    random_forest,
    random_problem,
    relative_error,
    run,
    star,
)
from tests.kernels.largest_tensor import LargestTensor

HEADS = ((4, 4), (4, 2), (6, 1))


def _ours(layout: TreeLayout, problem: Problem, *, with_dlse: bool = True) -> Results:
    return run(
        lambda q, k, v: tree_attention(q, k, v, layout, problem.scale),
        problem,
        with_dlse=with_dlse,
    )


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("name", "heads"), [(name, HEADS[index % 3]) for index, name in enumerate(NAMED)]
)
def test_results_and_all_gradients_equal_the_dense_oracle_on_named_forests(
    name: str, heads: tuple[int, int], block_kernel: str
) -> None:
    forest = NAMED[name]
    problem = random_problem(
        forest.num_tokens, heads=heads[0], kv_heads=heads[1], head_dim=16, dtype=torch.float64,
        seed=3,
    )  # fmt: skip
    got = _ours(forest.layout(), problem)
    assert_close(got, dense_oracle(forest.mask(), problem), 1e-10, f"{name} {block_kernel}")
    without_dlse = _ours(forest.layout(), problem, with_dlse=False)
    expected = dense_oracle(forest.mask(), problem, with_dlse=False)
    assert_close(without_dlse, expected, 1e-10, f"{name} {block_kernel} without dlse")


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("group_tokens", "dtype"),
    [*((tokens, torch.float64) for tokens in (1, 5, 64)), (5, torch.float32)],
)
def test_results_and_all_gradients_equal_the_dense_oracle_on_random_forests(
    dtype: torch.dtype,
    group_tokens: int,
    block_kernel: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blocks, "GROUP_TOKENS", group_tokens)
    rng = np.random.default_rng(group_tokens)
    for seed in range(25):
        forest = random_forest(rng, max_nodes=14, max_length=int(rng.integers(1, 17)))
        heads, kv_heads = HEADS[seed % 3]
        head_dim = int(rng.choice([1, 3, 8, 64]))
        problem = random_problem(
            forest.num_tokens, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype,
            seed=seed,
        )  # fmt: skip
        tolerance = 1e-10 if dtype == torch.float64 else 1e-5
        expected = dense_oracle(forest.mask(), problem)
        assert_close(_ours(forest.layout(), problem), expected, tolerance, f"{block_kernel} {seed}")


def _shifted(mask: np.ndarray, kind: str) -> np.ndarray:
    token = np.arange(len(mask))
    wrong = mask.copy()
    if kind == "one key more":
        wrong[token[1:] - 1, token[1:]] = True
    elif kind == "last key of the path dropped":
        wrong[token[:-1] + 1, token[:-1]] = False
    elif kind == "next sibling sees the last one":
        wrong |= np.roll(mask, 1, axis=0) & np.tri(len(mask), dtype=np.bool_)
    return wrong


@pytest.mark.parametrize(
    "kind", ["one key more", "last key of the path dropped", "next sibling sees the last one"]
)
def test_a_mask_off_by_one_would_be_seen(kind: str) -> None:
    """The tolerance of the tests above tells a wrong mask from rounding, in every result."""
    forest = NAMED["two_trees"]
    problem = random_problem(
        forest.num_tokens, heads=4, kv_heads=2, head_dim=16, dtype=torch.float64, seed=5
    )
    wrong = _shifted(forest.mask(), kind)
    assert (wrong != forest.mask()).any()
    expected = dense_oracle(wrong, problem)
    got = _ours(forest.layout(), problem)
    for name, value in expected.items():
        assert relative_error(got[name], value) > 1e-3, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_error_is_at_most_twice_that_of_torch(
    dtype: torch.dtype, block_kernel: str
) -> None:
    """Against exact results of the same rounded inputs; torch gets the dense mask."""
    for name in ("two_trees", "star", "comb", "binary", "chain"):
        forest = NAMED[name]
        problem = random_problem(
            forest.num_tokens, heads=4, kv_heads=2, head_dim=64, dtype=dtype, seed=11
        )
        mask_TT = torch.from_numpy(forest.mask())

        def torch_attention(
            q: Tensor, k: Tensor, v: Tensor, mask_TT: Tensor = mask_TT, problem: Problem = problem
        ) -> tuple[Tensor, Tensor]:
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            out = scaled_dot_product_attention(
                q, k, v, attn_mask=mask_TT, scale=problem.scale, enable_gqa=True
            )
            return out[0].transpose(0, 1), out.sum()

        exact = dense_oracle(forest.mask(), problem, with_dlse=False)
        theirs = run(torch_attention, problem, with_dlse=False)
        ours = _ours(forest.layout(), problem, with_dlse=False)
        for result in ("out", "dq", "dk", "dv"):
            assert ours[result].dtype == dtype
            error, bound = (relative_error(x[result], exact[result]) for x in (ours, theirs))
            assert error <= 2 * bound, f"{name} {block_kernel} {result}: {error:.3g} {bound:.3g}"
        assert ours["lse"].dtype == torch.float32
        assert relative_error(ours["lse"], exact["lse"]) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_gradient_of_the_log_sum_exp_is_not_rounded(
    dtype: torch.dtype, block_kernel: str
) -> None:
    """A dLSE just below the middle of two 16-bit numbers shifts all of dQ where it is rounded."""
    eps = torch.finfo(dtype).eps
    forest = NAMED["two_trees"]
    problem = random_problem(
        forest.num_tokens, heads=4, kv_heads=2, head_dim=64, dtype=dtype, seed=12
    )
    problem = replace(
        problem,
        dout_TNH=torch.zeros_like(problem.dout_TNH),
        dlse_NT=torch.full_like(problem.dlse_NT, 1 + 0.49 * eps),
    )
    got = _ours(forest.layout(), problem)
    exact = dense_oracle(forest.mask(), problem)
    # torch's operator rounds its own dK sums to 16 bits, so there only the order of size is held.
    for name, bound in (("dq", 0.35), ("dk", 0.35 if block_kernel == "math" else 0.7)):
        error = relative_error(got[name], exact[name])
        assert error < bound * eps, f"{block_kernel} {name}: {error / eps} eps"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_inputs_give_the_same_bits(dtype: torch.dtype) -> None:
    forest = star(prompt=260, num_responses=5, length=70)
    problem = random_problem(
        forest.num_tokens, heads=4, kv_heads=2, head_dim=32, dtype=dtype, seed=1
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first = _ours(forest.layout(), problem)
        for _ in range(4):
            again = _ours(forest.layout(), problem)
            for name, value in first.items():
                assert torch.equal(value, again[name]), name
    finally:
        torch.set_num_threads(threads)


def test_strided_queries_and_expanded_gradients_are_read_right() -> None:
    """q, k, v as heads-first views of one projection, and the gradient of a plain sum."""
    forest = NAMED["two_trees"]
    generator = torch.Generator().manual_seed(0)
    qkv_8TH = torch.randn((8, forest.num_tokens, 16), generator=generator, dtype=torch.float64)
    dense = qkv_8TH.transpose(0, 1)
    grads = []
    for qkv_T8H in (dense, dense.contiguous()):
        leaf = qkv_T8H.detach().requires_grad_()
        q, k, v = leaf[:, :4], leaf[:, 4:6], leaf[:, 6:]
        out, lse = tree_attention(q, k, v, forest.layout(), 0.3)
        grads.append(torch.autograd.grad(out.sum() + lse.sum(), leaf)[0])
    assert relative_error(grads[0], grads[1]) < 1e-12
    assert grads[0].norm() > 0


def test_an_unread_log_sum_exp_costs_no_gradient_of_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    backward = block_flash.block_backward

    def spy(block: Any, upstream: Any, mask: Any) -> Any:
        seen.append(upstream.dlse_NQ is None)
        return backward(block, upstream, mask)

    monkeypatch.setattr(block_flash, "block_backward", spy)
    problem = random_problem(150, heads=2, kv_heads=2, head_dim=8, dtype=torch.float64, seed=0)
    layout = star(prompt=90, num_responses=2, length=30).layout()
    _ours(layout, problem, with_dlse=False)
    assert seen
    assert all(seen)
    _ours(layout, problem, with_dlse=True)
    assert not seen[-1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bits_are_rounded_once(dtype: torch.dtype) -> None:
    """However many queries attend a key: the sums over them are fp32."""
    forest = star(prompt=40, num_responses=40, length=30)
    problem = random_problem(
        forest.num_tokens, heads=4, kv_heads=2, head_dim=16, dtype=dtype, seed=0
    )
    exact = dense_oracle(forest.mask(), problem)
    got = _ours(forest.layout(), problem)
    for name in ("dq", "dk", "dv"):
        rounded = relative_error(exact[name].to(dtype), exact[name])
        assert relative_error(got[name], exact[name]) < 2 * rounded, name


def test_nothing_of_tokens_squared_is_made() -> None:
    forest = star(prompt=600, num_responses=10, length=60)
    tokens = Span(0, forest.num_tokens)
    layout = forest.layout()
    problem = random_problem(
        forest.num_tokens, heads=2, kv_heads=1, head_dim=8, dtype=torch.float32, seed=0
    )
    operands = Operands(
        q_QNH=problem.q_TNH, k_SKH=problem.k_TKH, v_SKH=problem.v_TKH, end_T=layout.end_T,
        plan=reference.plan(layout), scale=1.0, window=None, queries=tokens, keys=tokens,
        is_deterministic=True,
    )  # fmt: skip
    with LargestTensor() as largest:
        reference.forward(operands)
    assert largest.num_elements <= 2 * forest.num_tokens * 2 * 8


@pytest.mark.parametrize(("window", "has_sink"), [(None, False), (9, True)])
def test_the_op_passes_opcheck(window: int | None, has_sink: bool) -> None:
    forest = NAMED["two_trees"]
    layout = forest.layout()
    problem = random_problem(
        forest.num_tokens, heads=4, kv_heads=2, head_dim=8, dtype=torch.float32, seed=0
    )
    q, k, v = (x.requires_grad_() for x in (problem.q_TNH, problem.k_TKH, problem.v_TKH))
    plan = reference.plan(layout, window)
    sink = torch.randn(4, requires_grad=True) if has_sink else None
    settings = (0.5, window, "reference", True)
    args: Any = (q, k, v, layout.end_T, plan, sink, *settings)
    torch.library.opcheck(torch.ops.ratoon.tree_attention.default, args)
    out, lse = tree_attention(q, k, v, layout, 0.5)
    saved = [x.detach() for x in (q, k, v, out, lse)]
    settings = (None if sink is None else sink.detach(), *settings)
    for dlse in (None, problem.dlse_NT):
        args = (problem.dout_TNH, dlse, *saved, layout.end_T, plan, *settings)
        torch.library.opcheck(torch.ops.ratoon.tree_attention_backward.default, args)


@pytest.mark.more
def test_a_full_graph_compiles_and_serves_other_forests() -> None:
    """No graph break, right values, and no new graph for the third size of forest."""
    weight = torch.randn((16, 8 * 16), generator=torch.Generator().manual_seed(0)) * 0.2

    def model(hidden: Tensor, layout: TreeLayout) -> Tensor:
        q, k, v = (hidden @ weight).view(-1, 8, 16).split((4, 2, 2), dim=1)
        out, lse = tree_attention(q, k, v, layout, 0.25)
        return (out * out).sum() + lse.sum()

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for name in ("two_trees", "star", "comb", "binary"):
        forest = NAMED[name]
        generator = torch.Generator().manual_seed(1)
        hidden = torch.randn((forest.num_tokens, 16), generator=generator, requires_grad=True)
        got, expected = (f(hidden, forest.layout()) for f in (compiled, model))
        (dgot,), (dexpected,) = (torch.autograd.grad(x, hidden) for x in (got, expected))
        assert math.isclose(got.item(), expected.item(), rel_tol=1e-5)
        assert relative_error(dgot, dexpected) < 1e-5
    assert counter.frame_count <= 2


def test_activation_checkpointing_gives_the_same_gradients() -> None:
    forest = NAMED["comb"]
    problem = random_problem(
        forest.num_tokens, heads=4, kv_heads=2, head_dim=8, dtype=torch.float64, seed=2
    )
    layout = forest.layout()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return tree_attention(q, k, v, layout, problem.scale)

    kept = run(attend, problem)
    again = run(lambda q, k, v: checkpoint(attend, q, k, v, use_reentrant=False), problem)
    for name, value in kept.items():
        assert torch.equal(value, again[name]), name


def _good() -> dict[str, Any]:
    layout = NAMED["star"].layout()
    problem = random_problem(
        layout.num_tokens, heads=4, kv_heads=2, head_dim=8, dtype=torch.float32, seed=0
    )
    return {
        "q_TNH": problem.q_TNH, "k_TKH": problem.k_TKH, "v_TKV": problem.v_TKH,
        "layout": layout, "scale": 0.5, "window": None, "sink_N": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "argument", "message"),
    [
        ({"q_TNH": lambda x: x[0]}, "q_TNH", "shape"),
        ({"k_TKH": lambda x: x[:, :0]}, "k_TKH", "shape"),
        ({"v_TKV": lambda x: x[:, :1]}, "v_TKV", "shape"),
        ({"k_TKH": lambda x: x.double()}, "k_TKH", "dtype torch.float64"),
        ({"q_TNH": lambda x: x.int()}, "q_TNH", "dtype torch.int32"),
        ({"v_TKV": lambda x: x.to("meta")}, "v_TKV", "on meta"),
        ({"window": lambda _: 0}, "window", "at least 1"),
        ({"sink_N": lambda _: torch.zeros(2)}, "sink_N", "shape"),
        ({"sink_N": lambda _: torch.zeros(4, dtype=torch.int64)}, "sink_N", "int64"),
        ({"sink_N": lambda _: torch.zeros(4, device="meta")}, "sink_N", "on meta"),
        ({"layout": lambda x: replace(x, end_T=x.end_T.to("meta"))}, "layout", "on meta"),
        ({"q_TNH": lambda x: x.mT.contiguous().mT}, "q_TNH", "innermost stride"),
        (
            {"k_TKH": lambda x: x[:, [0, 1, 1]], "v_TKV": lambda x: x[:, [0, 1, 1]]},
            "k_TKH",
            "3 kv heads, which do not divide the 4 heads",
        ),
        (
            {"k_TKH": lambda x: x[..., :4], "v_TKV": lambda x: x[..., :4]},
            "k_TKH",
            "head_dim 4, expected 8",
        ),
        ({"k_TKH": lambda x: x[1:], "v_TKV": lambda x: x[1:]}, "k_TKH", "183 tokens"),
        ({"layout": lambda _: NAMED["comb"].layout()}, "layout", "of 176 tokens, expected 184"),
        ({"scale": lambda _: math.nan}, "scale", "finite"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(
    changes: dict[str, Any], argument: str, message: str
) -> None:
    given = _good()
    tree_attention(**given)
    given.update({name: change(given[name]) for name, change in changes.items()})
    with pytest.raises(KernelArgumentError, match=message) as refusal:
        tree_attention(**given)
    assert refusal.value.argument == argument
    assert isinstance(refusal.value, ValueError)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales_of_zero_and_less_equal_the_dense_oracle(scale: float) -> None:
    """The CPU's fused operator gave NaN for them."""
    forest = NAMED["two_trees"]
    drawn = random_problem(
        forest.num_tokens, heads=4, kv_heads=2, head_dim=16, dtype=torch.float64, seed=0
    )
    problem = replace(drawn, scale=scale)
    layout = forest.layout()
    got = run(lambda q, k, v: tree_attention(q, k, v, layout, scale), problem)
    expected = dense_oracle(forest.mask(), problem)
    for name, value in expected.items():
        assert float((got[name] - value).norm()) <= 1e-10 * (1 + float(value.norm())), name
