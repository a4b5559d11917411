"""What the GPU tests of tree attention's cuda backend share: stale memory, truths, bounds.

In: a forest and a problem on the GPU. Out: the backend's results, computed in memory full of NaN,
and what they are held against. Invariant: the truths are dense fp64 (small forests) and the
reference backend in fp32 (any), neither of which reads the work lists of the backend.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ratoon_kernels import TreeLayout, tree_attention
from ratoon_kernels.schedule import ScheduleHeader
from tests.kernels.forests import (
    Forest,
    Problem,
    Results,
    assert_close,
    dense_oracle,
    forest_from,
    relative_error,
    run,
)
from tests.kernels.parts import run_in_parts

DEVICE: Final = "cuda"
BACKEND: Final = "cuda"
DTYPES: Final = (torch.bfloat16, torch.float16)
# The head size of queries, keys and values, or that of queries and keys beside that of values.
Sizes = int | tuple[int, int]
SIZES: Final[tuple[Sizes, ...]] = (128, 64, 256, (192, 128))
# (dtype, head_dim): the kernels that there are.
KINDS: Final = tuple(product(DTYPES, SIZES))
HEADS: Final = ((4, 4), (4, 2), (4, 1), (8, 1), (5, 1), (32, 8))
# A log-sum-exp is fp32 throughout: of logits rounded to 16 bits it would be 5e-4 off, or more.
LSE_TOLERANCE: Final = 5e-6

# A prompt whose key tiles are all cut in the backward, with responses of the usual lengths.
LONG_PROMPT: Final = forest_from([-1] + [0] * 8, [5059, 1432, 1866, 504, 379, 1588, 411, 152, 218])
# Few key tiles that many queries sweep.
WIDE: Final = forest_from([-1] + [0] * 60, [300] + [200] * 60)

Attention = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@contextmanager
def stale_memory() -> Iterator[None]:
    """Every uninitialised allocation is NaN (or the largest int) meanwhile, in every thread.

    Blocks that the allocator holds are filled with NaN as well, so that what a kernel reads past
    the end of a tensor is NaN too.
    """
    fill_free_memory()
    was_enabled = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_enabled, warn_only=warns_only)


def fill_free_memory() -> None:
    """Writes NaN to blocks of the allocator: small ones, and a large one to be cut."""
    small = [torch.full((2**17,), torch.nan, device=DEVICE) for _ in range(32)]
    large = torch.full((2**26,), torch.nan, device=DEVICE)
    del small, large


def attention_of(
    layout: TreeLayout,
    scale: float,
    *,
    backend: str = BACKEND,
    deterministic: bool = False,
    window: int | None = None,
) -> Attention:
    return functools.partial(
        tree_attention,
        layout=layout,
        scale=scale,
        window=window,
        backend=backend,
        deterministic=deterministic,
    )


def run_cuda(
    layout: TreeLayout,
    problem: Problem,
    *,
    with_dlse: bool = True,
    deterministic: bool = False,
    window: int | None = None,
) -> Results:
    """Results and all gradients of the backend."""
    attention = attention_of(layout, problem.scale, deterministic=deterministic, window=window)
    with stale_memory():
        return run(attention, problem, with_dlse=with_dlse)


run_cuda_in_parts = functools.partial(run_in_parts, backend=BACKEND, memory=stale_memory)


def run_reference(
    layout: TreeLayout, problem: Problem, *, with_dlse: bool = True, window: int | None = None
) -> Results:
    """Results of the reference backend, in fp32."""
    attention = attention_of(layout, problem.scale, backend="reference", window=window)
    return run(attention, in_fp32(problem), with_dlse=with_dlse)


def run_reference_of_rounded(layout: TreeLayout, problem: Problem, out_TNH: Tensor) -> Results:
    """Results of the reference backend whose gradients follow from the `out` that was returned.

    A backward reads delta = dout . out of a 16-bit `out`. Where dP - delta cancels (a forest of two
    tokens has one such difference a head), that rounding is the error of dQ and dK, whatever the
    backward does. It is known, and delta is what `dlse` is subtracted from: so it is put there.
    """
    exact = run_reference(layout, problem)
    rounding_TNH = out_TNH.float() - exact["out"]
    shift_NT = (problem.dout_TNH.float() * rounding_TNH).sum(dim=-1).T
    shifted = run_reference(layout, replace(problem, dlse_NT=problem.dlse_NT - shift_NT))
    return shifted | {name: exact[name] for name in ("out", "lse")}


def run_torch(mask: npt.NDArray[np.bool_], problem: Problem, *, with_dlse: bool = True) -> Results:
    """Results of torch in the problem's dtype: 16-bit products with a dense mask.

    Only the sums of the softmax and of the log-sum-exp are fp32.
    """
    mask_TT = torch.from_numpy(mask).to(DEVICE)

    def attention(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> tuple[Tensor, Tensor]:
        group = q_TNH.shape[1] // k_TKH.shape[1]
        q, k, v = (x.transpose(0, 1) for x in (q_TNH, k_TKH, v_TKH))
        k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
        scores = (q @ k.mT * problem.scale).masked_fill(~mask_TT, -torch.inf)
        out = torch.softmax(scores, dim=-1) @ v
        return out.transpose(0, 1), torch.logsumexp(scores.float(), dim=-1)

    return run(attention, problem, with_dlse=with_dlse)


def dims_of(sizes: Sizes) -> tuple[int, int]:
    """Head size of queries and keys, and that of values."""
    return (sizes, sizes) if isinstance(sizes, int) else sizes


def make_problem(
    num_tokens: int,
    dtype: torch.dtype,
    sizes: Sizes,
    *,
    heads: tuple[int, int] = (4, 2),
    seed: int = 0,
) -> Problem:
    """As `random_problem`, but drawn on the GPU."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device=DEVICE)

    num_heads, kv_heads = heads
    head_dim, value_dim = dims_of(sizes)
    return Problem(
        q_TNH=draw(num_tokens, num_heads, head_dim).to(dtype),
        k_TKH=draw(num_tokens, kv_heads, head_dim).to(dtype),
        v_TKH=draw(num_tokens, kv_heads, value_dim).to(dtype),
        dout_TNH=draw(num_tokens, num_heads, value_dim).to(dtype),
        dlse_NT=draw(num_heads, num_tokens).float(),
        scale=1.7 * head_dim**-0.5,
    )


def in_fp32(problem: Problem) -> Problem:
    q, k, v, dout = (
        x.float() for x in (problem.q_TNH, problem.k_TKH, problem.v_TKH, problem.dout_TNH)
    )
    return replace(problem, q_TNH=q, k_TKH=k, v_TKH=v, dout_TNH=dout)


def rounding_of(dtype: torch.dtype) -> float:
    """The tolerance against fp32: two units in the last place of the 16-bit P, dS and results."""
    return 2 * torch.finfo(dtype).eps


def assert_no_worse_than_torch(
    forest: Forest,
    problem: Problem,
    label: str,
    *,
    with_dlse: bool = True,
    deterministic: bool = False,
    window: int | None = None,
) -> None:
    """Errors against dense fp64 are at most twice those of torch in the same dtype.

    Where torch happens to be exact, the error of rounding the exact result stands for its own.
    """
    got = run_cuda(
        forest.layout(DEVICE),
        problem,
        with_dlse=with_dlse,
        deterministic=deterministic,
        window=window,
    )
    mask = forest.mask(window)
    exact = dense_oracle(mask, problem, with_dlse=with_dlse)
    theirs = run_torch(mask, problem, with_dlse=with_dlse)
    dtype = problem.q_TNH.dtype
    for name in ("out", "dq", "dk", "dv"):
        assert got[name].dtype == dtype
        assert exact[name].norm() > 0, f"{label} {name}: nothing to compare"
        rounded = relative_error(exact[name].to(dtype), exact[name])
        bound = 2 * max(relative_error(theirs[name], exact[name]), rounded)
        error = relative_error(got[name], exact[name])
        assert error <= bound, f"{label} {name}: {error:.3g}, at most {bound:.3g}"
    assert got["lse"].dtype == torch.float32
    error = relative_error(got["lse"], exact["lse"])
    assert error <= LSE_TOLERANCE, f"{label} lse: {error:.3g}"


def assert_equals_reference(
    forest: Forest,
    problem: Problem,
    label: str,
    *,
    deterministic: bool = False,
    window: int | None = None,
) -> None:
    """Results are those of the reference backend in fp32, but for 16-bit rounding."""
    layout = forest.layout(DEVICE)
    got = run_cuda(layout, problem, deterministic=deterministic, window=window)
    expected = run_reference(layout, problem, window=window)
    assert_close(got, expected, rounding_of(problem.q_TNH.dtype), label)
    error = relative_error(got["lse"], expected["lse"])
    assert error <= LSE_TOLERANCE, f"{label} lse: {error:.3g}"


def assert_same_bits(got: Results, expected: Results, label: str = "") -> None:
    """Also finite: NaN equals nothing, but is no reason to pass where both have it."""
    for name, value in expected.items():
        assert value.isfinite().all(), f"{label} {name} is not finite"
        assert torch.equal(got[name], value), f"{label} {name}"


def num_split_tiles(packed_header: Tensor, kv_heads: int) -> tuple[int, int]:
    """Key tiles that the backward cuts into pieces: by default, and in deterministic mode."""
    header = ScheduleHeader.from_tensor(packed_header)
    return header.sweep.split_tiles.count, header.level(kv_heads).split_tiles.count
