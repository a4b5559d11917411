"""The flex backend on a CPU: FlexAttention traced and run there without its fused kernels.

That makes all scores, so it tests the mask, the padding, the units of the log-sum-exp and the way
through autograd; which tiles the kernels visit is compared with the mask, tile by tile.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as torch_flex

from ratoon_kernels import (
    BackendUnavailableError,
    TreeLayout,
    select_backend,
    tree_attention,
)
from ratoon_kernels.tiles import Span
from ratoon_kernels.tree_attention import flex
from ratoon_kernels.tree_attention.block_plan import BlockGrid, block_plan
from ratoon_kernels.tree_attention.operands import Operands
from tests.kernels.forests import (
    NAMED,
    Problem,
    assert_close,
    dense_oracle,
    random_problem,
    relative_error,
    run,
    star,
)
from tests.kernels.parts import run_in_parts

CPU = torch.device("cpu")


class _Kernels:
    """What is compiled for a CPU, and how much of it."""

    def __init__(self) -> None:
        torch.compiler.reset()
        self.counter = CompileCounterWithBackend("aot_eager")
        self.attend = torch.compile(
            flex.attend, dynamic=False, fullgraph=True, backend=self.counter
        )

    def serve(self, monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
        monkeypatch.setattr(flex, "unavailable_reason", lambda: None)
        monkeypatch.setattr(flex, "unsupported_reason", lambda *_call: None)
        monkeypatch.setattr(torch_flex, "_validate_device", lambda *_tensors: None)
        monkeypatch.setattr(flex, "compiled_attend", lambda: self.attend)
        return self.counter


@pytest.fixture(scope="module")
def first_kernels() -> _Kernels:
    return _Kernels()


@pytest.fixture
def shared_kernels(
    first_kernels: _Kernels, monkeypatch: pytest.MonkeyPatch
) -> CompileCounterWithBackend:
    """For the tests that come first: what one of them has compiled serves the others."""
    return first_kernels.serve(monkeypatch)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    return _Kernels().serve(monkeypatch)


def _attention(layout: TreeLayout, scale: float) -> Callable[..., tuple[Tensor, Tensor]]:
    return functools.partial(tree_attention, layout=layout, scale=scale, backend="flex")


def _problem(num_tokens: int, seed: int = 0) -> Problem:
    return random_problem(
        num_tokens, heads=4, kv_heads=2, head_dim=8, dtype=torch.float32, seed=seed
    )


def test_results_and_all_gradients_equal_the_dense_oracle(
    shared_kernels: CompileCounterWithBackend,
) -> None:
    for name in ("two_trees", "comb", "single_token", "sequences", "empty"):
        forest = NAMED[name]
        problem = _problem(forest.num_tokens)
        for with_dlse in (True, False):
            attention = _attention(forest.layout(), problem.scale)
            got = run(attention, problem, with_dlse=with_dlse)
            expected = dense_oracle(forest.mask(), problem, with_dlse=with_dlse)
            assert_close(got, expected, 1e-5, f"{name} {with_dlse}")
    assert shared_kernels.frame_count == 2, "one that differentiates and one that does not, for all"


@pytest.mark.usefixtures("shared_kernels")
def test_a_forest_of_a_whole_bucket_leaves_its_inputs_alone() -> None:
    forest = star(512, 4, 128)
    assert flex.bucket_of(forest.num_tokens) == forest.num_tokens
    problem = random_problem(
        forest.num_tokens, heads=1, kv_heads=1, head_dim=8, dtype=torch.float32, seed=0
    )
    got = run(_attention(forest.layout(), problem.scale), problem)
    assert_close(got, dense_oracle(forest.mask(), problem), 1e-5)
    assert not problem.q_TNH.requires_grad


@pytest.mark.usefixtures("shared_kernels")
def test_parts_add_up_to_the_dense_oracle() -> None:
    forest = NAMED["two_trees"]
    problem, layout = _problem(forest.num_tokens), forest.layout()
    query_cuts, key_cuts = [(0, 50), (50, 51), (51, 160), (160, 240)], [(0, 128), (128, 240)]
    assert_close(
        run_in_parts(layout, problem, query_cuts, key_cuts, backend="flex"),
        dense_oracle(forest.mask(), problem, with_dlse=False),
        1e-5,
    )


@pytest.mark.usefixtures("shared_kernels")
def test_a_window_and_values_of_another_size_equal_the_dense_oracle() -> None:
    forest = NAMED["two_trees"]
    problem, layout = _problem(forest.num_tokens), forest.layout()
    wide = random_problem(
        forest.num_tokens, heads=4, kv_heads=2, head_dim=16, dtype=torch.float32, seed=1
    )
    problem = replace(problem, v_TKH=wide.v_TKH, dout_TNH=wide.dout_TNH)
    for window in (9, 70):
        attention = functools.partial(_attention(layout, problem.scale), window=window)
        expected = dense_oracle(forest.mask(window), problem)
        assert_close(run(attention, problem), expected, 1e-5, str(window))


@pytest.mark.usefixtures("shared_kernels")
def test_a_plan_made_in_inference_mode_serves_a_backward() -> None:
    forest = NAMED["star"]
    problem = _problem(forest.num_tokens)
    attention = _attention(forest.layout(), problem.scale)
    with torch.inference_mode():
        out, lse = attention(problem.q_TNH, problem.k_TKH, problem.v_TKH)
    got = run(attention, problem)
    assert_close(got, dense_oracle(forest.mask(), problem), 1e-5)
    assert relative_error(out, got["out"]) < 1e-6
    assert relative_error(lse, got["lse"]) < 1e-6


@pytest.mark.usefixtures("kernels")
@pytest.mark.more
def test_the_op_compiles_into_a_full_graph() -> None:
    def model(hidden: Tensor, layout: TreeLayout) -> Tensor:
        q, k, v = hidden.view(-1, 8, 8).split((4, 2, 2), dim=1)
        out, lse = tree_attention(q, k, v, layout, 0.25, backend="flex")
        return (out * out).sum() + lse.sum()

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for name in ("two_trees", "star"):
        forest = NAMED[name]
        generator = torch.Generator().manual_seed(1)
        hidden = torch.randn((forest.num_tokens, 64), generator=generator, requires_grad=True)
        (got,), (expected,) = (
            torch.autograd.grad(f(hidden, forest.layout()), hidden) for f in (compiled, model)
        )
        assert relative_error(got, expected) < 1e-5


def test_listed_tiles_are_those_of_the_mask() -> None:
    """The eager path reads the mask function only; the kernels visit what the lists say."""
    forest = star(700, 5, 331)
    problem, tokens = _problem(forest.num_tokens), Span(0, forest.num_tokens)
    operands = Operands(
        q_QNH=problem.q_TNH, k_SKH=problem.k_TKH, v_SKH=problem.v_TKH,
        end_T=forest.layout().end_T, plan=[forest.layout().node_table_M4], scale=1.0, window=None,
        queries=tokens, keys=tokens, is_deterministic=False,
    )  # fmt: skip
    size = flex.bucket_of(forest.num_tokens)
    grid = BlockGrid(
        key_tile=128, query_tile=128, backward_query_tile=128, padded_queries=size,
        padded_keys=size, is_full_width=True,
    )  # fmt: skip
    block_mask = flex.block_mask_of(block_plan(operands, grid), size, size)
    attended = torch.zeros((size, size), dtype=torch.bool)
    attended[: forest.num_tokens, : forest.num_tokens] = torch.from_numpy(forest.mask())
    tiles = attended.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    torch.testing.assert_close(block_mask.to_dense()[0, 0].bool(), tiles.any(dim=3).any(dim=1))
    # What torch itself derives for the backward from the forward's lists.
    derived = torch_flex.BlockMask.from_kv_blocks(
        block_mask.kv_num_blocks,
        block_mask.kv_indices,
        block_mask.full_kv_num_blocks,
        block_mask.full_kv_indices,
        mask_mod=block_mask.mask_mod,
    )
    for counts, indices in (
        ("q_num_blocks", "q_indices"), ("full_q_num_blocks", "full_q_indices")
    ):  # fmt: skip
        count, index = getattr(block_mask, counts), getattr(block_mask, indices)
        torch.testing.assert_close(count, getattr(derived, counts))
        is_listed = torch.arange(index.shape[-1]) < count[..., None]
        torch.testing.assert_close(index[is_listed], getattr(derived, indices)[is_listed])


def test_buckets_are_few_and_pad_at_most_an_eighth() -> None:
    lengths = range(1, 150_000, 7)
    buckets = [flex.bucket_of(length) for length in lengths]
    assert buckets == sorted(buckets)
    for length, bucket in zip(lengths, buckets, strict=True):
        assert bucket % 128 == 0
        assert length <= bucket <= max(1024, length * 9 / 8 + 1)
        assert flex.bucket_of(bucket) == bucket
    assert len(set(buckets)) <= 1 + 8 * 8
    of_parts = [flex.bucket_of(length, 4) for length in lengths]
    for length, bucket in zip(lengths, of_parts, strict=True):
        assert bucket % 128 == 0
        assert length <= bucket <= max(1024, length * 5 / 4 + 1)
    assert len(set(of_parts)) <= 1 + 8 * 4


def test_a_process_has_more_kernels_than_torch_compiles_by_itself(
    kernels: CompileCounterWithBackend,
) -> None:
    forest = NAMED["single_tokens"]
    layout, problem = forest.layout(), _problem(forest.num_tokens)
    with dynamo_config.patch(recompile_limit=2, accumulated_recompile_limit=2):
        for scale in (0.4, 0.5, 0.6):
            _attention(layout, scale)(problem.q_TNH, problem.k_TKH, problem.v_TKH)
    assert kernels.frame_count == 3


def test_too_many_kernels_are_an_error_and_not_a_slow_path(
    kernels: CompileCounterWithBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex, "MAX_KERNELS", 2)
    forest = NAMED["single_tokens"]
    layout, problem = forest.layout(), _problem(forest.num_tokens)

    def forward(scale: float) -> Tensor:
        return _attention(layout, scale)(problem.q_TNH, problem.k_TKH, problem.v_TKH)[0]

    forward(0.1)
    forward(0.2)
    with pytest.raises(BackendUnavailableError, match="compiled 2 kernels, which is its limit"):
        forward(0.3)
    assert kernels.frame_count == 2
    forward(0.1)


@pytest.mark.usefixtures("kernels")
def test_without_compilation_it_is_an_error_and_not_a_slow_path() -> None:
    forest = NAMED["single_tokens"]
    problem = _problem(forest.num_tokens)
    attention = _attention(forest.layout(), problem.scale)
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(BackendUnavailableError, match=r"torch\.compile is switched off"),
    ):
        attention(problem.q_TNH, problem.k_TKH, problem.v_TKH)


def test_a_machine_without_a_gpu_and_calls_it_cannot_serve_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailableError, match="torch finds no CUDA GPU"):
        select_backend("tree_attention", "flex", CPU, torch.bfloat16, 64)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    for deterministic in (False, True):
        assert flex.unsupported_reason(cuda, torch.float16, 128, deterministic) is None
    for device, dtype, head_dim, reason in (
        (CPU, torch.bfloat16, 64, "not on cpu"),
        (cuda, torch.float32, 64, "float32"),
        (cuda, torch.float64, 64, "float64"),
        (cuda, torch.bfloat16, 80, "head_dim 80"),
    ):
        assert reason in (flex.unsupported_reason(device, dtype, head_dim, False) or "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (7, 5))
    assert "sm_75" in (flex.unsupported_reason(cuda, torch.float16, 64, False) or "")
