"""The flash and flex backends on a GPU, against the reference backend in fp32."""

import functools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from ratoon_kernels import (
    BackendUnavailableError,
    TreeLayout,
    list_backends,
    tree_attention,
)
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
    relative_error,
    run,
    star,
)
from tests.kernels.parts import run_in_parts

pytestmark = pytest.mark.gpu

# Rounding of P and dS to 16 bits; fp16 has 8 times finer steps and tells more of the mask.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
# (dtype, head_dim): each is a set of kernels to be compiled.
KINDS = [(torch.bfloat16, 128), (torch.float16, 64)]
# Lengths that are no multiple of a tile, within one bucket of flex each.
SMALL = ("single_token", "one_sequence", "star", "comb", "binary_of_tokens", "two_trees")
LARGE = {
    "deep": chain(9, 143),
    "star": star(517, 7, 111),
    "short leaves": star(900, 131, 3),
    "two groups": forest_from([-1, 0, 0, 0, -1, 4, 5, 5], [300, 61, 200, 1, 270, 77, 255, 129]),
}


@pytest.fixture(params=["flash", "flex"])
def backend(request: pytest.FixtureRequest) -> str:
    for status in list_backends():
        if (status.op, status.name) == ("tree_attention", request.param) and status.reason:
            pytest.skip(f"{request.param}: {status.reason}")
    return request.param


@pytest.fixture(autouse=True)
def stale_memory_is_nan() -> Iterator[None]:
    """What the allocator hands out anew was NaN before: small blocks, and large ones to be cut."""
    small = [torch.full((2**17,), torch.nan, device="cuda") for _ in range(256)]
    large = torch.full((2**28,), torch.nan, device="cuda")
    del small, large
    yield
    torch.cuda.synchronize()


def _attention(layout: TreeLayout, scale: float, backend: str) -> Callable[..., tuple]:
    return functools.partial(tree_attention, layout=layout, scale=scale, backend=backend)


def _problem(forest: Forest, dtype: torch.dtype, head_dim: int, seed: int = 0) -> Problem:
    return random_problem(
        forest.num_tokens, heads=8, kv_heads=2, head_dim=head_dim, dtype=dtype, seed=seed,
        device="cuda",
    )  # fmt: skip


def _in_fp32(problem: Problem) -> Problem:
    return Problem(
        q_TNH=problem.q_TNH.float(),
        k_TKH=problem.k_TKH.float(),
        v_TKH=problem.v_TKH.float(),
        dout_TNH=problem.dout_TNH.float(),
        dlse_NT=problem.dlse_NT,
        scale=problem.scale,
    )


def _truth(layout: TreeLayout, problem: Problem, *, with_dlse: bool = True) -> Results:
    attention = _attention(layout, problem.scale, "reference")
    return run(attention, _in_fp32(problem), with_dlse=with_dlse)


def _check(backend: str, forest: Forest, problem: Problem, label: str, *, with_dlse: bool) -> None:
    layout = forest.layout("cuda")
    got = run(_attention(layout, problem.scale, backend), problem, with_dlse=with_dlse)
    expected = _truth(layout, problem, with_dlse=with_dlse)
    assert_close(got, expected, TOLERANCE[problem.q_TNH.dtype], f"{backend} {label}")
    assert relative_error(got["lse"], expected["lse"]) < 1e-4, f"{backend} {label} lse"


@pytest.mark.parametrize(("dtype", "head_dim"), KINDS)
def test_results_and_all_gradients_equal_the_reference(
    backend: str, dtype: torch.dtype, head_dim: int
) -> None:
    small = {name: NAMED[name] for name in SMALL if dtype == torch.float16}
    for index, (name, forest) in enumerate({**small, **LARGE}.items()):
        problem = _problem(forest, dtype, head_dim, seed=index)
        _check(backend, forest, problem, name, with_dlse=True)
    _check(backend, LARGE["star"], _problem(LARGE["star"], dtype, head_dim), "", with_dlse=False)


def test_random_forests_equal_the_reference(backend: str) -> None:
    rng = np.random.default_rng(7)
    for seed in range(60):
        forest = random_forest(rng, max_nodes=20, max_length=int(rng.integers(1, 100)))
        if forest.num_tokens <= 1024:
            problem = _problem(forest, torch.float16, 64, seed)
            _check(backend, forest, problem, str(seed), with_dlse=True)


# 5 and 7 heads do not fill a tile of 192 or 128 rows with whole queries.
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 64), (5, 1, 64), (7, 1, 128)])
def test_other_head_ratios_equal_the_reference(
    backend: str, heads: int, kv_heads: int, head_dim: int
) -> None:
    forest = LARGE["two groups"]
    problem = random_problem(
        forest.num_tokens, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=torch.float16,
        seed=3, device="cuda",
    )  # fmt: skip
    _check(backend, forest, problem, f"{heads}:{kv_heads}", with_dlse=True)


def test_no_tokens_have_no_results(backend: str) -> None:
    forest = NAMED["empty"]
    problem = _problem(forest, torch.bfloat16, 128)
    got = run(_attention(forest.layout("cuda"), problem.scale, backend), problem)
    assert {name: tuple(x.shape) for name, x in got.items()} == {
        "out": (0, 8, 128), "lse": (8, 0), "dq": (0, 8, 128), "dk": (0, 2, 128), "dv": (0, 2, 128),
    }  # fmt: skip


def test_parts_add_up_to_the_reference(backend: str) -> None:
    forest = LARGE["two groups"]
    problem, layout = _problem(forest, torch.float16, 64), forest.layout("cuda")
    cuts = [(0, 300), (300, 301), (301, 820), (820, forest.num_tokens)]
    got = run_in_parts(layout, problem, cuts, cuts, backend=backend)
    assert_close(got, _truth(layout, problem, with_dlse=False), 3e-3, backend)


def test_strided_inputs_and_expanded_gradients_are_read(backend: str) -> None:
    forest = LARGE["star"]
    layout, scale = forest.layout("cuda"), _problem(forest, torch.float16, 64).scale
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn((forest.num_tokens, 12, 64), generator=generator).to("cuda", torch.float16)

    def gradient(dtype: torch.dtype, name: str) -> Tensor:
        leaf = qkv.detach().to(dtype).requires_grad_()
        q, k, v = leaf.split((8, 2, 2), dim=1)
        out, lse = tree_attention(q, k, v, layout, scale, backend=name)
        (out.sum() + lse.sum()).backward()
        assert leaf.grad is not None
        return leaf.grad

    got, expected = gradient(torch.float16, backend), gradient(torch.float32, "reference")
    assert relative_error(got, expected) < 3e-3


def test_a_deterministic_call_repeats_its_bits_or_is_refused(backend: str) -> None:
    forest = LARGE["star"]
    problem, layout = _problem(forest, torch.bfloat16, 128), forest.layout("cuda")
    attention = functools.partial(
        tree_attention, layout=layout, scale=problem.scale, backend=backend, deterministic=True
    )
    if backend == "flash":
        with pytest.raises(BackendUnavailableError, match="no fixed order"):
            run(attention, problem)
        return
    first = run(attention, problem)
    for _ in range(5):
        for name, value in run(attention, problem).items():
            assert torch.equal(value, first[name]), name


def test_the_op_compiles_into_a_full_graph(backend: str) -> None:
    """The length is one that flex has no kernel for yet: it is compiled while the graph runs."""
    forest = star(999, 7, 200)
    layout = forest.layout("cuda")

    def model(hidden: Tensor) -> Tensor:
        q, k, v = (hidden * 2).view(-1, 6, 64).split((4, 1, 1), dim=1)
        out, lse = tree_attention(q, k, v, layout, 0.125, backend=backend)
        return (out * out).sum() + lse.sum()

    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn((forest.num_tokens, 384), generator=generator).to("cuda", torch.bfloat16)
    hidden.requires_grad_()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    (got,), (expected,) = (torch.autograd.grad(f(hidden), hidden) for f in (compiled, model))
    assert relative_error(got, expected) < 5e-3
