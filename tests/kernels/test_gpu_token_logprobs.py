"""Token log-probs of the fused backend against dense fp64, and against torch in the same dtype."""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from ratoon_kernels import (
    LowRankTerm,
    SamplingMask,
    best_tokens,
    select_backend,
    token_logprobs,
)
from ratoon_kernels.token_logprobs import fused
from ratoon_kernels.token_logprobs.operands import Operands, Upstream
from tests.kernels import one_pass
from tests.kernels.one_pass import Case

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Rows, vocabulary, targets, hidden size: rows of many targets and of none, odd sizes throughout.
SHAPES = ((1, 7, 1, 8), (5, 37, 60, 24), (133, 5003, 211, 20), (200, 4096, 150, 64))
LARGE = (301, 151_941, 333, 128)
# Log-probs and entropies are fp32 whatever the inputs: a 16-bit logit would be 1e-3 off.
EXACT = 5e-6


def make_case(shape: tuple[int, int, int, int], dtype: torch.dtype, seed: int = 0) -> Case:
    rows, vocab, targets, width = shape
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cuda")

    def index(stop: int) -> Tensor:
        return torch.randint(0, max(stop, 1), (targets,), generator=generator, device="cuda")

    return Case(
        hidden_RD=(draw(rows, width) * 4 * width**-0.5).to(dtype),
        lm_head_VD=draw(vocab, width).to(dtype),
        targets_M=index(vocab),
        row_of_target_M=index(rows),
        temperature_R=torch.rand(rows, generator=generator, device="cuda") + 0.5,
        dlogprob_M=draw(targets),
        dentropy_R=draw(rows),
    )


def dense(
    hidden_RD: Tensor,
    lm_head_VD: Tensor,
    targets_M: Tensor,
    row_of_target_M: Tensor,
    temperature_R: Tensor,
    *,
    mask: SamplingMask | None = None,
    term: LowRankTerm | None = None,
) -> tuple[Tensor, Tensor]:
    """The op in torch: products in the dtype of the inputs, the rest in fp32 or fp64."""
    wide = torch.promote_types(hidden_RD.dtype, torch.float32)
    logits_RV = hidden_RD @ lm_head_VD.T
    if term is not None:
        logits_RV = logits_RV + term.u_RA @ term.b_VA.T
    logits_RV = logits_RV.to(wide) / temperature_R[:, None].to(wide)
    is_kept_RV = torch.ones_like(logits_RV, dtype=torch.bool)
    if mask is not None:
        is_kept_RV[mask.row_N] = False
        is_kept_RV[mask.row_N, mask.token_N] = True
    logp_RV = torch.log_softmax(logits_RV.masked_fill(~is_kept_RV, -torch.inf), dim=-1)
    entropy_R = -(logp_RV.exp() * logp_RV.masked_fill(~is_kept_RV, 0.0)).sum(dim=-1)
    return logp_RV[row_of_target_M, targets_M], entropy_R


def fused_op(
    *tensors: Tensor, mask: SamplingMask | None = None, term: LowRankTerm | None = None
) -> tuple[Tensor, Tensor]:
    hidden_RD, lm_head_VD, *rest = tensors
    return token_logprobs(hidden_RD, lm_head_VD, *rest, mask=mask, term=term, backend="fused")


def run(function: Any, case: Case, *, reads: str = "both", frozen: bool = False) -> dict[str, Any]:
    """Results and gradients of a loss that reads both, log-probs alone or entropies alone."""
    case, leaves = one_pass.leaves_of(case)
    if frozen:
        leaves.pop("dlm_head_VD").requires_grad = False
    logprob_M, entropy_R = function(
        case.hidden_RD, case.lm_head_VD, *case.rest, mask=case.mask, term=case.term
    )
    loss = logprob_M.new_zeros(())
    if reads in {"both", "logprob"}:
        loss = loss + (logprob_M * case.dlogprob_M).sum()
    if reads in {"both", "entropy"}:
        loss = loss + (entropy_R * case.dentropy_R).sum()
    loss.backward()
    results = {"logprob": logprob_M, "entropy": entropy_R}
    results |= {name.rpartition("_")[0]: leaf.grad for name, leaf in leaves.items()}
    return {name: value.detach() for name, value in results.items()}


def truth(case: Case, *, reads: str = "both") -> dict[str, Any]:
    wide = replace(case, hidden_RD=case.hidden_RD.double(), lm_head_VD=case.lm_head_VD.double())
    if case.term is not None:
        term = LowRankTerm(u_RA=case.term.u_RA.double(), b_VA=case.term.b_VA.double())
        wide = replace(wide, term=term)
    return run(dense, wide, reads=reads)


def error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm().clamp_min(1e-30))


def assert_as_exact(
    got: dict[str, Any], expected: dict[str, Any], in_torch: dict[str, Any], label: str
) -> None:
    """Values are exact to fp32, and nothing is twice as far off as torch in the same dtype."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if value.norm() == 0:
            assert not got[name].any(), f"{name} {label}"
            continue
        mine = error(got[name], value)
        assert mine <= 2 * error(in_torch[name], value) + 1e-6, f"{name} {label}: {mine}"
        if name in {"logprob", "entropy"}:
            assert got[name].dtype == torch.float32
            assert mine < EXACT, f"{name} {label}: {mine}"


@pytest.fixture(autouse=True)
def poisoned_gpu_memory() -> Iterator[None]:
    """What the allocator hands out next is full of NaN, in its small pool and in its large one."""
    torch.cuda.empty_cache()
    blocks = [torch.full((2**17,), torch.nan, device="cuda") for _ in range(64)]
    blocks += [torch.full((2**20 * size,), torch.nan, device="cuda") for size in (1, 8, 64, 256)]
    del blocks
    yield
    torch.cuda.empty_cache()


@pytest.fixture(params=["one_chunk", "many_chunks"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "many_chunks":
        monkeypatch.setattr(
            fused, "rows_within", lambda _size, _vocab, dtype: 128 // dtype.itemsize
        )


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("reads", ["both", "logprob", "entropy"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("rank", [0, 5, 16])
def test_results_and_gradients_are_as_exact_as_torch(
    dtype: torch.dtype, reads: str, has_mask: bool, rank: int
) -> None:
    """`rank`: of an adapter's term; 0: there is none."""
    for seed, shape in enumerate(SHAPES):
        case = make_case(shape, dtype, seed)
        case = one_pass.with_term(case, rank) if rank else case
        if has_mask:
            case = one_pass.masked(case, one_pass.kept_tokens(case, seed))
        expected, in_torch = truth(case, reads=reads), run(dense, case, reads=reads)
        assert expected["dhidden"].norm() > 0
        assert expected["dlm_head"].norm() > 0
        assert_as_exact(run(fused_op, case, reads=reads), expected, in_torch, f"{shape}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_large_odd_vocabulary(dtype: torch.dtype) -> None:
    for case in (make_case(LARGE, dtype), one_pass.with_term(make_case(LARGE, dtype), 32)):
        assert_as_exact(run(fused_op, case), truth(case), run(dense, case), "large")


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("shape", [(0, 37, 0, 16), (9, 37, 0, 16), (1, 1, 3, 16)])
def test_no_rows_no_targets_and_one_token(shape: tuple[int, int, int, int]) -> None:
    case = make_case(shape, torch.bfloat16)
    got, expected = run(fused_op, case), truth(case)
    for name, value in expected.items():
        assert got[name].shape == value.shape, name
        assert (got[name] - value).norm() <= 2**-7 * value.norm(), name


def test_more_rows_than_a_dimension_of_a_grid() -> None:
    case = make_case((70_000, 37, 70_000, 8), torch.bfloat16)
    assert_as_exact(run(fused_op, case), truth(case), run(dense, case), "many rows")


def test_one_row_serves_thousands_of_targets() -> None:
    """Also the same token many times, whose gradients add up in fp32 before they are rounded."""
    case = make_case((3, 301, 4000, 32), torch.bfloat16)
    case = replace(case, row_of_target_M=torch.ones_like(case.row_of_target_M))
    assert_as_exact(run(fused_op, case), truth(case), run(dense, case), "one row")


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_row_serves_the_128_best_tokens_of_a_teacher(dtype: torch.dtype) -> None:
    """Targets of a row lie in many programs' columns, at their first and last ones, too."""
    rows, vocab, k = 33, 10_007, 128
    case = make_case((rows, vocab, rows * k, 64), dtype)
    edges = torch.tensor([0, 2047, 2048, 4095, 8191, 8192, vocab - 1], device="cuda")
    best = torch.stack([torch.randperm(vocab, device="cuda")[:k] for _ in range(rows)])
    best[:, : len(edges)] = edges
    row_M = torch.arange(rows, device="cuda").repeat_interleave(k)
    case = replace(case, targets_M=best.reshape(-1), row_of_target_M=row_M)
    assert_as_exact(run(fused_op, case), truth(case), run(dense, case), "K best")


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_best_tokens_are_those_of_the_dense_distribution(dtype: torch.dtype) -> None:
    case = make_case((133, 5003, 0, 64), dtype)
    logits_RV = case.hidden_RD.double() @ case.lm_head_VD.double().T
    found_RB = best_tokens(case.hidden_RD, case.lm_head_VD, 64)
    assert torch.equal(found_RB, best_tokens(case.hidden_RD, case.lm_head_VD, 64))
    best = logits_RV.topk(64, dim=1).values
    torch.testing.assert_close(logits_RV.gather(1, found_RB), best, rtol=1e-4, atol=1e-4)
    assert all(len(row.unique()) == 64 for row in found_RB)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_one_likely_token_stay_finite_and_exact(dtype: torch.dtype) -> None:
    """The log-sum-exp is kept in fp32: where logits are 500, that is an error of 2e-5 in p."""
    case = make_case((64, 1003, 90, 32), dtype)
    case = replace(case, hidden_RD=case.hidden_RD * 50)
    got, expected, in_torch = run(fused_op, case), truth(case), run(dense, case)
    for name, value in expected.items():
        assert got[name].isfinite().all(), name
        assert error(got[name], value) <= 2 * error(in_torch[name], value) + 2e-5, name


def test_small_fp16_gradients_do_not_vanish() -> None:
    """Trap: of a mean over many tokens all but the targets' gradients are below fp16's least."""
    case = make_case((64, 5003, 64, 64), torch.float16)
    case = replace(case, dlogprob_M=case.dlogprob_M * 1e-4, dentropy_R=case.dentropy_R * 1e-4)
    case = replace(case, lm_head_VD=case.lm_head_VD * 4, hidden_RD=case.hidden_RD / 8)
    got, expected = run(fused_op, case), truth(case)
    for name in ("dhidden", "dlm_head"):
        # Against the gradient before it is rounded to what fp16 can hold.
        rounded = expected[name].half().double()
        assert error(got[name], rounded) < 2e-3, name


def test_a_frozen_head_gets_no_gradient() -> None:
    case = make_case((133, 5003, 211, 64), torch.bfloat16)
    got, trained = run(fused_op, case, frozen=True), run(fused_op, case)
    assert error(got["dhidden"], trained["dhidden"].double()) < 2**-8
    hidden_RD = case.hidden_RD
    lm_head_VD = case.lm_head_VD.clone().requires_grad_()
    logprob_M, _ = fused_op(hidden_RD, lm_head_VD, *case.rest)
    (logprob_M @ case.dlogprob_M).backward()
    alone = run(fused_op, case, reads="logprob")["dlm_head"]
    assert lm_head_VD.grad is not None
    assert torch.equal(lm_head_VD.grad, alone)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_inputs_give_the_same_bits(dtype: torch.dtype) -> None:
    case = one_pass.with_term(make_case((300, 5003, 6000, 64), dtype), 16)
    first = run(fused_op, case)
    for _ in range(3):
        torch.full((2**22,), torch.nan, device="cuda")
        again = run(fused_op, case)
        for name, value in first.items():
            assert torch.equal(value, again[name]), name


def test_nothing_waits_for_the_device() -> None:
    case = one_pass.with_term(make_case((133, 5003, 211, 64), torch.float16), 16)
    run(fused_op, case)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(fused_op, case)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _peak_mib(call: Any) -> float:
    """Memory that a call takes at most beyond what there is before it; its results count."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def test_memory_is_bounded_by_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of all rows are 800 MiB, an fp32 copy of the head is 49 MiB."""
    rows, vocab, width = 4096, 50_257, 256
    monkeypatch.setattr(fused, "LOGIT_BYTES", 16 * 2**20)
    monkeypatch.setattr(fused, "DLOGIT_BYTES", 32 * 2**20)
    case = make_case((rows, vocab, rows, width), torch.bfloat16)
    operands = Operands(
        hidden_RD=case.hidden_RD,
        lm_head_VD=case.lm_head_VD,
        targets_M=case.targets_M,
        row_of_target_M=case.row_of_target_M,
        temperature_R=case.temperature_R,
    )
    rank = 16
    with_term = replace(operands, term=one_pass.with_term(case, rank).term)
    _, entropy_R, lse_R = fused.forward(operands)
    assert _peak_mib(lambda: fused.forward(operands)) < 16 + 4
    assert _peak_mib(lambda: fused.forward(with_term)) < 16 + 4
    head_mib, term_mib = vocab * width * 2 / 2**20, vocab * rank * 2 / 2**20
    for needs_lm_head in (False, True):
        upstream = Upstream(
            dlogprob_M=case.dlogprob_M,
            dentropy_R=case.dentropy_R,
            entropy_R=entropy_R,
            lse_R=lse_R,
            needs_lm_head=needs_lm_head,
        )
        peak = _peak_mib(lambda upstream=upstream: fused.backward(operands, upstream))
        if needs_lm_head:
            # The fp32 sum, and beside it the buffers or, after them, the gradient.
            assert peak < 2 * head_mib + max(16 + 32, head_mib) + 6
        else:
            assert peak < 16 + 8 + 6
            peak = _peak_mib(lambda upstream=upstream: fused.backward(with_term, upstream))
            assert peak < 16 + 8 + 3 * term_mib + 6


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("has_entropy", [False, True])
@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("has_term", [False, True])
def test_one_pass_gives_the_bits_of_two(
    dtype: torch.dtype, has_entropy: bool, has_mask: bool, has_term: bool
) -> None:
    """Seeds of rows that were not asked for yet are NaN."""
    for rows, vocab, targets, width in (*SHAPES, (3000, 20_011, 3100, 256)):
        case = one_pass.make_case(rows, vocab, targets, dtype, "cuda", width)
        if has_mask:
            case = one_pass.masked(case, one_pass.kept_tokens(case))
        case = one_pass.with_term(case, 16) if has_term else case
        expected = one_pass.in_two_passes(case, has_entropy=has_entropy)
        found = one_pass.results_of(case.in_one_pass(case.late_seeds(has_entropy=has_entropy)))
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), (name, rows)


def test_one_pass_takes_the_memory_of_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """In MiB: chunks of logits, of their gradient, the sum of the head's; as above."""
    rows, vocab, width = 4096, 50_257, 256
    monkeypatch.setattr(fused, "LOGIT_BYTES", 16 * 2**20)
    monkeypatch.setattr(fused, "DLOGIT_BYTES", 32 * 2**20)
    case = one_pass.make_case(rows, vocab, rows, torch.bfloat16, "cuda", width)
    seeds = (case.dlogprob_M, case.dentropy_R)
    head_mib = vocab * width * 2 / 2**20
    peak = _peak_mib(lambda: case.in_one_pass(lambda *_: seeds))
    assert peak < 2 * head_mib + max(16 + 32, head_mib) + 6


def test_the_op_passes_opcheck_and_compiles_as_a_full_graph() -> None:
    case = make_case((6, 37, 9, 16), torch.float32)
    leaves = (case.hidden_RD.requires_grad_(), case.lm_head_VD.requires_grad_())
    args: Any = (*leaves, *case.rest, "fused")
    torch.library.opcheck(torch.ops.ratoon.token_logprobs.default, args)
    term = one_pass.with_term(case).term
    assert term is not None
    factors = term.u_RA.detach().requires_grad_(), term.b_VA.detach().requires_grad_()
    args = (*args, None, None, None, *factors)
    torch.library.opcheck(torch.ops.ratoon.token_logprobs.default, args)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fused_op, fullgraph=True, backend=counter)
    for shape in ((6, 37, 9, 16), (5, 37, 20, 16), (9, 37, 3, 16)):
        case = one_pass.with_term(make_case(shape, torch.bfloat16))
        got, expected = run(compiled, case), run(fused_op, case)
        for name, value in expected.items():
            assert torch.equal(got[name], value), name
    assert counter.frame_count <= 2


def test_it_is_the_backend_that_serves_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    for dtype in DTYPES:
        assert select_backend("token_logprobs", None, device, dtype, 4096) == "fused"
    assert select_backend("token_logprobs", None, device, torch.float64, 4096) == "reference"


@pytest.mark.parametrize("change", ["targets[3] = 37", "targets[3] = -1", "rows[2] = 6"])
def test_a_wrong_index_stops_the_device(change: str) -> None:
    """In a process of its own, because nothing runs on a device after that."""
    code = (
        "import torch\n"
        "from ratoon_kernels import token_logprobs\n"
        "hidden, head = torch.ones(6, 16).cuda().half(), torch.ones(37, 16).cuda().half()\n"
        "targets, rows = torch.zeros(2, 9, dtype=torch.int64).cuda().unbind()\n"
        f"{change}\n"
        "token_logprobs(hidden, head, targets, rows, torch.ones(6).cuda(), backend='fused')\n"
        "torch.cuda.synchronize()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode != 0
    # The device's own line: what torch raises differs by the call that meets the stopped device.
    assert re.search(r"_assert_async_cuda_kernel: .*Assertion", result.stderr), result.stderr
