"""What the cuda backend is given: views of any strides, gradients of any kind, extreme numbers.

Where only the strides differ, the deterministic mode must give the same bits as for dense tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ratoon_kernels import BackendUnavailableError, KernelArgumentError, tree_attention
from tests.kernels.cuda_attention import (
    BACKEND,
    DEVICE,
    KINDS,
    LSE_TOLERANCE,
    SIZES,
    Sizes,
    assert_no_worse_than_torch,
    assert_same_bits,
    attention_of,
    make_problem,
    rounding_of,
    run_cuda,
    run_reference,
    stale_memory,
)
from tests.kernels.forests import (
    NAMED,
    Problem,
    Results,
    assert_close,
    dense_oracle,
    forest_from,
    relative_error,
)

pytestmark = pytest.mark.gpu

FOREST = forest_from([-1, 0, 0, 0, -1, 4, 5, 5], [300, 61, 200, 1, 270, 77, 255, 129])
LAYOUT_TOKENS = FOREST.num_tokens


def _within(x_TNH: Tensor, *, before: int, after: int) -> Tensor:
    """A copy whose values are the inner channels of wider rows, between NaN."""
    tokens, heads, head_dim = x_TNH.shape
    wide = x_TNH.new_full((tokens, heads, before + head_dim + after), torch.nan)
    inner = wide[..., before : before + head_dim]
    return inner.copy_(x_TNH)


def _among_heads(x_TNH: Tensor) -> Tensor:
    """A copy whose values are some heads of a fused projection."""
    tokens, heads, head_dim = x_TNH.shape
    return x_TNH.new_full((tokens, heads + 5, head_dim), torch.nan)[:, 3:-2].copy_(x_TNH)


def _every_other_token(x_TNH: Tensor) -> Tensor:
    tokens, heads, head_dim = x_TNH.shape
    return x_TNH.new_full((2 * tokens, heads, head_dim), torch.nan)[::2].copy_(x_TNH)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads of a projection": _among_heads,
    "heads outermost": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every other token": _every_other_token,
    "channels of aligned rows": lambda x: _within(x, before=8, after=16),
    "misaligned rows": lambda x: _within(x, before=0, after=3),
    "misaligned address": lambda x: _within(x, before=1, after=7),
}


def _results(
    problem: Problem, grads: tuple[Tensor | None, Tensor | None], *, deterministic: bool = True
) -> Results:
    """As `run`, but the tensors keep their strides; gradients of an output may be None."""
    inputs = [x.detach().requires_grad_() for x in (problem.q_TNH, problem.k_TKH, problem.v_TKH)]
    attention = attention_of(FOREST.layout(DEVICE), problem.scale, deterministic=deterministic)
    with stale_memory():
        out_TNH, lse_NT = attention(*inputs)
        given = [
            (x, grad) for x, grad in zip((out_TNH, lse_NT), grads, strict=True) if grad is not None
        ]
        dq, dk, dv = torch.autograd.grad([x for x, _ in given], inputs, [grad for _, grad in given])
    return {
        "out": out_TNH.detach(), "lse": lse_NT.detach(), "dq": dq, "dk": dk, "dv": dv,
    }  # fmt: skip


@pytest.mark.parametrize(("dtype", "sizes"), KINDS)
@pytest.mark.parametrize("name", VIEWS)
def test_views_give_the_bits_of_dense_tensors(name: str, dtype: torch.dtype, sizes: Sizes) -> None:
    problem = make_problem(LAYOUT_TOKENS, dtype, sizes, heads=(6, 2))
    expected = _results(problem, (problem.dout_TNH, problem.dlse_NT))
    view = VIEWS[name]
    strided = replace(
        problem, q_TNH=view(problem.q_TNH), k_TKH=view(problem.k_TKH), v_TKH=view(problem.v_TKH)
    )
    assert strided.q_TNH.stride() != problem.q_TNH.stride()
    dlse_NT = problem.dlse_NT.T.contiguous().T
    got = _results(strided, (view(problem.dout_TNH), dlse_NT))
    assert_same_bits(got, expected, name)


def test_a_fused_projection_gets_its_gradient_in_one_piece() -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn((LAYOUT_TOKENS, 12, 128), generator=generator).to(DEVICE, torch.bfloat16)

    def gradient(dtype: torch.dtype, backend: str) -> Tensor:
        leaf = qkv.to(dtype).requires_grad_()
        q, k, v = leaf.split((8, 2, 2), dim=1)
        attention = attention_of(FOREST.layout(DEVICE), 128**-0.5, backend=backend)
        out, lse = attention(q, k, v)
        return torch.autograd.grad(out.float().square().sum() + lse.sum(), leaf)[0]

    got = gradient(torch.bfloat16, BACKEND)
    expected = gradient(torch.float32, "reference")
    assert relative_error(got, expected) <= rounding_of(torch.bfloat16)


def test_keys_that_all_heads_share_are_read_without_copies() -> None:
    """An expanded dimension has the stride 0."""
    problem = make_problem(LAYOUT_TOKENS, torch.bfloat16, 64, heads=(6, 3))
    shared = replace(
        problem,
        k_TKH=problem.k_TKH[:, :1].expand(-1, 3, -1),
        v_TKH=problem.v_TKH[:, 2:].expand(-1, 3, -1),
    )
    dense = replace(shared, k_TKH=shared.k_TKH.contiguous(), v_TKH=shared.v_TKH.contiguous())
    grads = (problem.dout_TNH, problem.dlse_NT)
    assert_same_bits(_results(shared, grads), _results(dense, grads))


@pytest.mark.parametrize("dim", ["tokens", "heads", "channels", "all"])
def test_expanded_gradients_are_read_right(dim: str) -> None:
    """A sum or a mean gives its gradient as one number with strides 0."""
    problem = make_problem(LAYOUT_TOKENS, torch.bfloat16, 128)
    cut: dict[str, tuple[Any, Any]] = {
        "tokens": ((slice(1),), (slice(None), slice(1))),
        "heads": ((slice(None), slice(1)), (slice(1),)),
        "channels": ((slice(None), slice(None), slice(1)), ()),
        "all": ((slice(1), slice(1), slice(1)), (slice(1), slice(1))),
    }
    of_out, of_lse = cut[dim]
    dout_TNH = problem.dout_TNH[of_out].expand_as(problem.dout_TNH)
    dlse_NT = problem.dlse_NT[of_lse].expand_as(problem.dlse_NT)
    expected = _results(problem, (dout_TNH.contiguous(), dlse_NT.contiguous()))
    assert_same_bits(_results(problem, (dout_TNH, dlse_NT)), expected, dim)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_gradient_of_none_is_a_gradient_of_zeros(deterministic: bool) -> None:
    problem = make_problem(LAYOUT_TOKENS, torch.float16, 64)
    dout_TNH, dlse_NT = problem.dout_TNH, problem.dlse_NT
    no_dout, no_dlse = torch.zeros_like(dout_TNH), torch.zeros_like(dlse_NT)
    for given, same in (
        ((dout_TNH, None), (dout_TNH, no_dlse)),
        ((None, dlse_NT), (no_dout, dlse_NT)),
    ):
        got = _results(problem, given, deterministic=deterministic)
        expected = _results(problem, same)
        if deterministic:
            assert_same_bits(got, expected)
        else:
            assert_close(got, expected, rounding_of(torch.float16))
    assert (got["dv"] == 0).all()
    assert got["dq"].norm() > 0


@pytest.mark.parametrize("scale", [-0.3, -1e-3, 1e-6, 1e-30, 0.5])
@pytest.mark.parametrize("sizes", SIZES)
def test_scales_of_either_sign_and_any_size(sizes: Sizes, scale: float) -> None:
    for deterministic in (False, True):
        problem = replace(make_problem(LAYOUT_TOKENS, torch.bfloat16, sizes), scale=scale)
        assert_no_worse_than_torch(
            FOREST, problem, f"{scale} {deterministic}", deterministic=deterministic
        )


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_scale_of_zero_is_the_mean_of_the_path(deterministic: bool) -> None:
    problem = replace(make_problem(LAYOUT_TOKENS, torch.float16, 128), scale=0.0)
    got = run_cuda(FOREST.layout(DEVICE), problem, deterministic=deterministic)
    _assert_forward_and_dv(got, dense_oracle(FOREST.mask(), problem), torch.float16)
    assert (got["dq"] == 0).all()
    assert (got["dk"] == 0).all()


@pytest.mark.parametrize(("dtype", "sizes"), KINDS)
def test_large_logits_neither_overflow_nor_lose_the_largest(
    dtype: torch.dtype, sizes: Sizes
) -> None:
    """Logits of several hundred: P is 0 or 1 nearly everywhere.

    dS is a difference of equal numbers there, of which the rounding of `out` remains: dQ and dK are
    held to that, not to their own size.
    """
    problem = make_problem(LAYOUT_TOKENS, dtype, sizes)
    problem = replace(problem, q_TNH=problem.q_TNH * 12, k_TKH=problem.k_TKH * 12)
    exact = dense_oracle(FOREST.mask(), problem)
    assert exact["lse"].abs().max() > 500
    for deterministic in (False, True):
        got = run_cuda(FOREST.layout(DEVICE), problem, deterministic=deterministic)
        _assert_forward_and_dv(got, exact, dtype)
        for name, other_TNH in (("dq", problem.k_TKH), ("dk", problem.q_TNH)):
            dp = problem.dout_TNH.float().norm() * problem.v_TKH.float().norm(dim=-1).max()
            size = problem.scale * dp * other_TNH.float().norm(dim=-1).max()
            error = (got[name].double() - exact[name]).norm()
            assert error <= torch.finfo(dtype).eps * size, name


def test_logits_that_are_all_very_negative_still_sum_to_one() -> None:
    """A log-sum-exp far below 0: exp(s) itself would be 0 for every key."""
    problem = make_problem(LAYOUT_TOKENS, torch.bfloat16, 128)
    q_TNH, k_TKH = 1 + 0.1 * problem.q_TNH, -1 + 0.1 * problem.k_TKH
    problem = replace(problem, q_TNH=q_TNH, k_TKH=k_TKH, scale=3.0)
    exact = dense_oracle(FOREST.mask(), problem)
    assert exact["lse"].max() < -200
    _assert_forward_and_dv(run_cuda(FOREST.layout(DEVICE), problem), exact, torch.bfloat16)


def _assert_forward_and_dv(got: Results, exact: Results, dtype: torch.dtype) -> None:
    for name in ("out", "dv"):
        assert relative_error(got[name], exact[name]) <= rounding_of(dtype), name
    assert relative_error(got["lse"], exact["lse"]) <= LSE_TOLERANCE
    for name in ("dq", "dk"):
        assert got[name].isfinite().all(), name


@pytest.mark.parametrize("size", [1e-30, 1e-4, 1e4, 1e30])
def test_extreme_gradients_of_the_log_sum_exp(size: float) -> None:
    problem = make_problem(LAYOUT_TOKENS, torch.bfloat16, 128)
    sign_NT = problem.dlse_NT.sign()
    sign_NT[:, ::3] = 0
    without = _results(problem, (problem.dout_TNH, None))
    problem = replace(problem, dlse_NT=sign_NT * size)
    layout = FOREST.layout(DEVICE)
    expected = run_reference(layout, problem)
    for deterministic in (False, True):
        got = run_cuda(layout, problem, deterministic=deterministic)
        assert_close(got, expected, rounding_of(torch.bfloat16), str(size))
        # dLSE has no share in dV.
        assert relative_error(got["dv"], without["dv"]) <= rounding_of(torch.bfloat16)


def _good() -> dict[str, Any]:
    problem = make_problem(NAMED["star"].num_tokens, torch.bfloat16, 64)
    return {
        "q_TNH": problem.q_TNH, "k_TKH": problem.k_TKH, "v_TKV": problem.v_TKH,
        "layout": NAMED["star"].layout(DEVICE), "scale": 0.5, "backend": BACKEND,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "argument", "message"),
    [
        ({"q_TNH": lambda x: x[0]}, "q_TNH", "shape"),
        ({"k_TKH": lambda x: x[:, :0]}, "k_TKH", "shape"),
        ({"v_TKV": lambda x: x[:, :1]}, "v_TKV", "shape"),
        ({"k_TKH": lambda x: x.half()}, "k_TKH", "dtype torch.float16, expected torch.bfloat16"),
        ({"q_TNH": lambda x: x.int()}, "q_TNH", "dtype torch.int32"),
        ({"v_TKV": lambda x: x.cpu()}, "v_TKV", "on cpu, expected cuda:0"),
        ({"q_TNH": lambda x: x.cpu()}, "k_TKH", "on cuda:0, expected cpu"),
        ({"layout": lambda _: NAMED["star"].layout("cpu")}, "layout", "on cpu, expected cuda:0"),
        ({"q_TNH": lambda x: x.mT.contiguous().mT}, "q_TNH", "innermost stride 4, expected 1"),
        (
            {"k_TKH": lambda x: x[:, [0, 1, 1]], "v_TKV": lambda x: x[:, [0, 1, 1]]},
            "k_TKH",
            "3 kv heads, which do not divide the 4 heads",
        ),
        (
            {"k_TKH": lambda x: x[..., :32], "v_TKV": lambda x: x[..., :32]},
            "k_TKH",
            "head_dim 32, expected 64",
        ),
        ({"k_TKH": lambda x: x[1:], "v_TKV": lambda x: x[1:]}, "k_TKH", "183 tokens"),
        ({"layout": lambda _: NAMED["comb"].layout(DEVICE)}, "layout", "of 176 tokens"),
        ({"scale": lambda _: math.inf}, "scale", "finite"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_refused_by_name(
    changes: dict[str, Any], argument: str, message: str
) -> None:
    given = _good()
    tree_attention(**given)
    given.update({name: change(given[name]) for name, change in changes.items()})
    with pytest.raises(KernelArgumentError, match=message) as refusal:
        tree_attention(**given)
    assert refusal.value.argument == argument


@pytest.mark.parametrize(
    ("head_dim", "dtype", "reason"),
    [
        (96, torch.bfloat16, "head_dim 96, it has 64, 128, 256, 192 with values of 128"),
        (192, torch.float16, "head_dim 192, it has 64, 128, 256, 192 with values of 128"),
        (64, torch.float32, "dtype torch.float32, it has bf16 and fp16"),
        (128, torch.float64, "dtype torch.float64, it has bf16 and fp16"),
    ],
)
def test_what_it_has_no_kernel_for_is_refused_with_the_reason(
    head_dim: int, dtype: torch.dtype, reason: str
) -> None:
    """Asked for by name it is this backend or an error, never another one in silence."""
    forest = NAMED["star"]
    problem = make_problem(forest.num_tokens, dtype, head_dim)
    attention = attention_of(forest.layout(DEVICE), problem.scale)
    with pytest.raises(BackendUnavailableError, match=reason) as refusal:
        attention(problem.q_TNH, problem.k_TKH, problem.v_TKH)
    assert BACKEND in str(refusal.value)
