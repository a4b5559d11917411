"""Token log-probs of the reference backend: values, gradients, refusals; in one pass."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from ratoon_kernels import (
    KernelArgumentError,
    LowRankTerm,
    SamplingMask,
    best_tokens,
    token_logprobs,
    token_logprobs_forward_backward,
)
from ratoon_kernels.token_logprobs import reference
from ratoon_kernels.token_logprobs.operands import Operands
from tests.kernels.forests import relative_error
from tests.kernels.largest_tensor import LargestTensor
from tests.kernels.one_pass import (
    Case,
    in_two_passes,
    kept_tokens,
    leaves_of,
    make_case,
    masked,
    results_of,
    with_term,
)

Function = Callable[..., tuple[Tensor, Tensor]]


def _dense(
    hidden_RD: Tensor,
    lm_head_VD: Tensor,
    targets_M: Tensor,
    row_of_target_M: Tensor,
    temperature_R: Tensor,
    *,
    mask: SamplingMask | None = None,
    term: LowRankTerm | None = None,
) -> tuple[Tensor, Tensor]:
    logits_RV = hidden_RD.double() @ lm_head_VD.double().T
    if term is not None:
        logits_RV = logits_RV + term.u_RA.double() @ term.b_VA.double().T
    logits_RV = logits_RV / temperature_R.double()[:, None]
    is_kept_RV = torch.ones_like(logits_RV, dtype=torch.bool)
    if mask is not None:
        is_kept_RV[mask.row_N] = False
        is_kept_RV[mask.row_N, mask.token_N] = True
    logp_RV = torch.log_softmax(logits_RV.masked_fill(~is_kept_RV, -torch.inf), dim=-1)
    entropy_R = -(logp_RV.exp() * logp_RV.masked_fill(~is_kept_RV, 0.0)).sum(dim=-1)
    return logp_RV[row_of_target_M, targets_M], entropy_R


def _run(function: Function, case: Case, *, reads: str = "both") -> dict[str, Tensor]:
    case, leaves = leaves_of(case)
    logprob_M, entropy_R = function(
        case.hidden_RD, case.lm_head_VD, *case.rest, mask=case.mask, term=case.term
    )
    loss = torch.zeros((), dtype=logprob_M.dtype)
    if reads in {"both", "logprob"}:
        loss = loss + logprob_M @ case.dlogprob_M.to(logprob_M.dtype)
    if reads in {"both", "entropy"}:
        loss = loss + entropy_R @ case.dentropy_R.to(entropy_R.dtype)
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    named = {name.rpartition("_")[0]: each for name, each in zip(leaves, gradients, strict=True)}
    return {"logprob": logprob_M.detach(), "entropy": entropy_R.detach()} | named


@pytest.fixture(params=[1, 3, 4096], ids=lambda rows: f"{rows}_rows_a_chunk")
def chunk_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Rows of one chunk for a vocabulary of 37 in fp64."""
    monkeypatch.setattr(reference, "LOGIT_BYTES", request.param * 37 * 8)
    return request.param


@pytest.mark.usefixtures("poisoned_memory", "chunk_rows")
@pytest.mark.parametrize("reads", ["both", "logprob", "entropy"])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_results_and_gradients_equal_dense_log_softmax(reads: str, rank: int) -> None:
    """Rows of many targets, of the same target twice, and of none; every row has a temperature.

    With a term of an adapter of each rank; 0: without.
    """
    for seed, (rows, targets) in enumerate(((1, 1), (3, 9), (7, 5), (8, 200), (10, 3))):
        case = make_case(rows, 37, targets, seed=seed)
        case = with_term(case, rank) if rank else case
        got, expected = _run(token_logprobs, case, reads=reads), _run(_dense, case, reads=reads)
        for name, value in expected.items():
            assert value.norm() > 0, name
            assert relative_error(got[name], value) < 1e-12, f"{name} {rows} {targets}"


@pytest.mark.usefixtures("poisoned_memory", "chunk_rows")
@pytest.mark.parametrize("reads", ["both", "logprob", "entropy"])
def test_a_mask_leaves_a_row_the_softmax_of_what_it_keeps(reads: str) -> None:
    """Rows without a mask, with one token, with half of all and with all."""
    for seed, (rows, targets) in enumerate(((1, 1), (3, 9), (7, 5), (8, 30), (11, 3))):
        case = make_case(rows, 37, targets, seed=seed)
        is_kept_RV = kept_tokens(case, seed)
        case = with_term(masked(case, is_kept_RV)) if seed % 2 else masked(case, is_kept_RV)
        got, expected = _run(token_logprobs, case, reads=reads), _run(_dense, case, reads=reads)
        for name, value in expected.items():
            assert value.norm() > 0, name
            assert relative_error(got[name], value) < 1e-12, f"{name} {rows} {targets}"


def test_no_gradient_reaches_the_head_of_a_token_that_no_row_keeps() -> None:
    case = make_case(5, 37, 1)
    is_kept_RV = kept_tokens(case)
    is_used_V = is_kept_RV[2]
    assert 0 < is_used_V.sum() < 37
    rest = {"targets_M": torch.zeros(1, dtype=torch.int64), "row_of_target_M": torch.tensor([2])}
    case = masked(replace(case, **rest), is_kept_RV)
    case = replace(case, dentropy_R=case.dentropy_R * (torch.arange(5) == 2))
    dlm_head_VD = _run(token_logprobs, case)["dlm_head"]
    assert (dlm_head_VD != 0).any(1).tolist() == is_used_V.tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_row_that_keeps_one_token_has_its_log_prob_and_no_gradient(dtype: torch.dtype) -> None:
    case = make_case(6, 37, 6, dtype)
    case = replace(case, row_of_target_M=torch.arange(6))
    rows, first_R1 = torch.arange(6, dtype=torch.int32), torch.arange(7)
    mask = SamplingMask(token_N=case.targets_M.int(), row_N=rows, first_R1=first_R1)
    got = _run(token_logprobs, replace(case, mask=mask))
    for name, value in got.items():
        assert not value.any(), name


def test_a_mask_of_some_rows_is_counted_from_the_first_of_them() -> None:
    rows, tokens = torch.tensor([1, 1, 3], dtype=torch.int32), torch.tensor([4, 6, 5]).int()
    mask = SamplingMask(token_N=tokens, row_N=rows, first_R1=torch.tensor([0, 0, 2, 2, 3]))
    for span, kept, row, first in (
        (slice(None), [4, 6, 5], [1, 1, 3], [0, 0, 2, 2, 3]),
        (slice(1, 3), [4, 6], [0, 0], [0, 2, 2]),
        (slice(2, 4), [5], [1], [0, 0, 1]),
    ):
        part = mask.of_rows(span)
        assert part is not None
        found = part.token_N.tolist(), part.row_N.tolist(), part.first_R1.tolist()
        assert found == (kept, row, first)
    assert mask.of_rows(slice(0, 1)) is None
    assert mask.of_rows(slice(2, 2)) is None


@pytest.mark.usefixtures("chunk_rows")
def test_a_mask_of_all_tokens_changes_no_bit() -> None:
    case = make_case(9, 37, 20, torch.float32)
    whole = masked(case, torch.ones((9, 37), dtype=torch.bool))
    expected = _run(token_logprobs, case)
    for name, value in _run(token_logprobs, whole).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("temperature", [1e-5, 1.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_masked_rows_of_any_temperature_are_finite(temperature: float, dtype: torch.dtype) -> None:
    """What is outside must count nothing where all probabilities are alike, too."""
    case = make_case(8, 37, 20, dtype)
    case = replace(case, temperature_R=torch.full_like(case.temperature_R, temperature))
    case = masked(case, kept_tokens(case))
    got, expected = _run(token_logprobs, case), _run(_dense, case)
    for name, value in expected.items():
        assert got[name].isfinite().all(), name
        torch.testing.assert_close(got[name].double(), value.double(), rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("poisoned_memory", "chunk_rows")
@pytest.mark.parametrize(("rows", "targets"), [(0, 0), (4, 0)])
def test_no_rows_and_no_targets_give_empty_results(rows: int, targets: int) -> None:
    case = with_term(make_case(rows, 37, targets))
    got, expected = _run(token_logprobs, case), _run(_dense, case)
    assert got["logprob"].shape == (0,)
    for name in ("entropy", "dhidden", "dlm_head", "du", "db"):
        torch.testing.assert_close(got[name], expected[name], rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_of_other_dtypes_are_fp32_and_as_exact(dtype: torch.dtype) -> None:
    """Trap: log-probs stored in bf16 put 0.4% of noise on every ratio."""
    case = with_term(make_case(40, 501, 90, dtype=dtype))
    got, expected = _run(token_logprobs, case), _run(_dense, case)
    assert (got["logprob"].dtype, got["entropy"].dtype) == (torch.float32, torch.float32)
    assert relative_error(got["logprob"], expected["logprob"]) < 1e-6
    assert relative_error(got["entropy"], expected["entropy"]) < 1e-6
    half_ulp = torch.finfo(dtype).eps / 2
    for name in ("dhidden", "dlm_head", "du", "db"):
        assert got[name].dtype == dtype
        assert relative_error(got[name], expected[name]) < 2 * half_ulp + 1e-6, name


def test_extreme_logits_stay_finite() -> None:
    case = make_case(6, 37, 20, dtype=torch.float32)
    case = replace(case, hidden_RD=case.hidden_RD * 1e4)
    got, expected = _run(token_logprobs, case), _run(_dense, case)
    for name, value in expected.items():
        assert got[name].isfinite().all(), name
        torch.testing.assert_close(got[name].double(), value.double(), rtol=1e-5, atol=1e-2)


@pytest.mark.usefixtures("chunk_rows")
def test_the_same_inputs_give_the_same_bits() -> None:
    case = with_term(make_case(60, 37, 5000, dtype=torch.float32))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first = _run(token_logprobs, case)
        for _ in range(4):
            again = _run(token_logprobs, case)
            for name, value in first.items():
                assert torch.equal(value, again[name]), name
    finally:
        torch.set_num_threads(threads)


def test_a_frozen_head_gets_no_gradient_and_costs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    backward = reference.backward

    def spy(operands: Any, upstream: Any) -> Any:
        asked.append(upstream.needs_lm_head)
        return backward(operands, upstream)

    monkeypatch.setattr(reference, "backward", spy)
    case = make_case(5, 37, 9)
    expected = _run(_dense, case, reads="logprob")
    for freeze in ("lm_head_VD", "hidden_RD"):
        hidden_RD = case.hidden_RD.clone().requires_grad_(freeze != "hidden_RD")
        lm_head_VD = case.lm_head_VD.clone().requires_grad_(freeze != "lm_head_VD")
        logprob_M, _ = token_logprobs(
            hidden_RD, lm_head_VD, case.targets_M, case.row_of_target_M, case.temperature_R
        )
        (logprob_M @ case.dlogprob_M).backward()
        frozen, trained, name = (
            (lm_head_VD, hidden_RD, "dhidden")
            if freeze == "lm_head_VD"
            else (hidden_RD, lm_head_VD, "dlm_head")
        )
        assert frozen.grad is None
        assert trained.grad is not None
        assert relative_error(trained.grad, expected[name]) < 1e-12
    assert asked == [False, True]


def test_nothing_of_rows_times_vocabulary_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "LOGIT_BYTES", 10 * 300 * 8)
    case = with_term(make_case(400, 300, 50))
    operands = Operands(
        hidden_RD=case.hidden_RD,
        lm_head_VD=case.lm_head_VD,
        targets_M=case.targets_M,
        row_of_target_M=case.row_of_target_M,
        temperature_R=case.temperature_R,
        term=case.term,
    )
    with LargestTensor() as largest:
        reference.forward(operands)
    assert largest.num_elements <= max(10 * 300, case.hidden_RD.numel())


def test_the_op_passes_opcheck_and_compiles_as_a_full_graph() -> None:
    case = make_case(6, 37, 9, dtype=torch.float32)
    hidden_RD, lm_head_VD = case.hidden_RD.requires_grad_(), case.lm_head_VD.requires_grad_()
    rest = (case.targets_M, case.row_of_target_M, case.temperature_R)
    args: Any = (hidden_RD, lm_head_VD, *rest, "reference")
    torch.library.opcheck(torch.ops.ratoon.token_logprobs.default, args)
    mask = masked(case, kept_tokens(case)).mask
    assert mask is not None
    kept = mask.token_N, mask.row_N, mask.first_R1
    torch.library.opcheck(torch.ops.ratoon.token_logprobs.default, (*args, *kept))
    term = with_term(case).term
    assert term is not None
    factors = term.u_RA.detach().requires_grad_(), term.b_VA.detach().requires_grad_()
    torch.library.opcheck(torch.ops.ratoon.token_logprobs.default, (*args, *kept, *factors))
    tensors = [x.detach() for x in (hidden_RD, lm_head_VD)]
    operands = Operands(
        hidden_RD=tensors[0],
        lm_head_VD=tensors[1],
        targets_M=case.targets_M,
        row_of_target_M=case.row_of_target_M,
        temperature_R=case.temperature_R,
    )
    _, entropy_R, lse_R = reference.forward(operands)
    for needs_lm_head in (True, False):
        args = (None, case.dentropy_R, *tensors, *rest, entropy_R, lse_R, needs_lm_head)
        op = torch.ops.ratoon.token_logprobs_backward.default
        torch.library.opcheck(op, (*args, "reference"))
        torch.library.opcheck(op, (*args, "reference", *kept))
        factors = term.u_RA.detach(), term.b_VA.detach()
        torch.library.opcheck(op, (*args, "reference", None, None, None, *factors))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(token_logprobs, fullgraph=True, backend=counter)
    for rows, targets in ((6, 9), (5, 20), (9, 3)):
        case = with_term(make_case(rows, 37, targets, dtype=torch.float32))
        got, expected = _run(compiled, case), _run(token_logprobs, case)
        for name, value in expected.items():
            assert torch.equal(got[name], value), name
    assert counter.frame_count <= 2


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("hidden_RD", lambda x: x[0], "1 dimensions, expected 2"),
        ("hidden_RD", lambda x: x.int(), "dtype torch.int32"),
        ("lm_head_VD", lambda x: x.double(), "dtype torch.float64, expected torch.float32"),
        ("lm_head_VD", lambda x: x[:, :5], "expected .1 or more, 12"),
        ("lm_head_VD", lambda x: x[:0], "expected .1 or more, 12"),
        ("lm_head_VD", lambda x: x.to("meta"), "on meta"),
        ("targets_M", lambda x: x.int(), "dtype torch.int32, expected torch.int64"),
        ("targets_M", lambda x: x.float(), "dtype torch.float32"),
        ("targets_M", lambda x: x.index_fill(0, torch.tensor([3]), 37), r"37 at 3, .*\[0, 37\)"),
        ("targets_M", lambda x: x.index_fill(0, torch.tensor([2]), -1), "-1 at 2"),
        ("row_of_target_M", lambda x: x[1:], "8 values, expected 9"),
        ("row_of_target_M", lambda x: x.index_fill(0, torch.tensor([0]), 6), r"6 at 0, .*\[0, 6\)"),
        ("row_of_target_M", lambda x: x - 7, "row_of_target_M: value -"),
        ("temperature_R", lambda x: x[1:], "5 values, expected 6"),
        ("temperature_R", lambda x: x.bfloat16(), "dtype torch.bfloat16"),
        ("temperature_R", lambda x: x * 0, "0.0 at 0, expected a positive finite"),
        ("temperature_R", lambda x: x / 0, "inf at 0"),
        ("temperature_R", lambda x: x * torch.nan, "nan at 0"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(
    name: str, change: Callable[[Tensor], Tensor], message: str
) -> None:
    case = make_case(6, 37, 9, dtype=torch.float32)
    given: dict[str, Any] = {
        "hidden_RD": case.hidden_RD, "lm_head_VD": case.lm_head_VD, "targets_M": case.targets_M,
        "row_of_target_M": case.row_of_target_M, "temperature_R": case.temperature_R,
    }  # fmt: skip
    token_logprobs(**given)
    given[name] = change(given[name])
    with pytest.raises(KernelArgumentError, match=message) as refusal:
        token_logprobs(**given)
    assert refusal.value.argument == name


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("token_N", lambda x: x.long(), r"mask\.token_N: torch.int64"),
        ("token_N", lambda x: x.index_fill(0, torch.tensor([1]), 37), "37 at 1"),
        ("token_N", lambda x: x.index_fill(0, torch.tensor([0]), -1), "-1 at 0"),
        ("row_N", lambda x: x[1:], r"mask\.row_N: .* of shape"),
        ("row_N", lambda x: x + 1, "2 at 0, expected the row that first_R1 says"),
        ("first_R1", lambda x: x[1:], r"mask\.first_R1: .* expected torch.int64 of shape .7,."),
        ("first_R1", lambda x: x + 1, "from 1 to"),
        ("first_R1", lambda x: x.flip(0), "expected 0 to"),
        ("first_R1", lambda x: x.to("meta"), "on meta"),
    ],
)
def test_a_wrong_mask_is_refused_by_name(
    name: str, change: Callable[[Tensor], Tensor], message: str
) -> None:
    case = make_case(6, 37, 9, dtype=torch.float32)
    case = masked(case, kept_tokens(case))
    assert case.mask is not None
    mask = replace(case.mask, **{name: change(getattr(case.mask, name))})
    with pytest.raises(KernelArgumentError, match=message) as refusal:
        _run(token_logprobs, replace(case, mask=mask))
    assert refusal.value.argument == f"mask.{name}"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("u_RA", lambda x: x[:5], "expected torch.float32 of shape .6, 3."),
        ("u_RA", lambda x: x[0], "expected torch.float32 of shape .6, 1."),
        ("u_RA", lambda x: x[:, :0], "expected torch.float32 of shape .6, 1."),
        ("u_RA", lambda x: x.double(), "float64"),
        ("b_VA", lambda x: x[:, :2], "expected torch.float32 of shape .37, 3."),
        ("b_VA", lambda x: x.T, "shape .3, 37."),
        ("b_VA", lambda x: x.to("meta"), "on meta"),
    ],
)
def test_a_wrong_term_is_refused_by_name(
    name: str, change: Callable[[Tensor], Tensor], message: str
) -> None:
    case = with_term(make_case(6, 37, 9, dtype=torch.float32))
    assert case.term is not None
    term = replace(case.term, **{name: change(getattr(case.term, name))})
    with pytest.raises(KernelArgumentError, match=message) as refusal:
        token_logprobs(case.hidden_RD, case.lm_head_VD, *case.rest, term=term)
    assert refusal.value.argument == f"term.{name}"


def test_a_term_of_zeros_changes_no_bit() -> None:
    case = make_case(13, 37, 29, torch.float32)
    term = with_term(case).term
    assert term is not None
    none = replace(case, term=replace(term, b_VA=torch.zeros_like(term.b_VA)))
    plain, found = (_run(token_logprobs, each) for each in (case, none))
    for name, value in plain.items():
        assert torch.equal(found[name], value), name
    assert not found["du"].any()
    assert found["db"].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows_a_chunk", [1, 3, 100])
@pytest.mark.parametrize("has_entropy", [False, True])
@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("has_term", [False, True])
def test_bits_are_those_of_two_passes(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    rows_a_chunk: int,
    has_entropy: bool,
    has_mask: bool,
    has_term: bool,
) -> None:
    case = make_case(13, 37, 29, dtype)
    case = with_term(case) if has_term else case
    if has_mask:
        case = masked(case, kept_tokens(case))
    accumulated = torch.promote_types(dtype, torch.float32)
    monkeypatch.setattr(reference, "LOGIT_BYTES", rows_a_chunk * 37 * accumulated.itemsize)
    expected = in_two_passes(case, has_entropy=has_entropy)
    found = results_of(case.in_one_pass(case.late_seeds(has_entropy=has_entropy)))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_each_run_of_rows_is_asked_for_once_and_its_results_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = make_case(13, 37, 29, torch.float32)
    # For both: how many rows a product has may change its bits.
    monkeypatch.setattr(reference, "LOGIT_BYTES", 5 * 37 * 4)
    truth = in_two_passes(case)
    seen: list[slice] = []

    def seeds_of(rows: slice, logprob_M: Tensor, entropy_R: Tensor) -> Any:
        seen.append(rows)
        is_here_M = (case.row_of_target_M >= rows.start) & (case.row_of_target_M < rows.stop)
        assert torch.equal(logprob_M[is_here_M], truth["logprob_M"][is_here_M])
        assert torch.equal(entropy_R[rows], truth["entropy_R"][rows])
        return None, None

    found = case.in_one_pass(seeds_of)
    assert [(rows.start, rows.stop) for rows in seen] == [(0, 5), (5, 10), (10, 13)]
    assert not found.dhidden_RD.any()
    assert not found.dlm_head_VD.any()


def test_a_loss_that_differentiates_is_not_recorded() -> None:
    """The caller's function may use autograd; what it is given and what comes back is outside."""
    case = make_case(5, 11, 7, torch.float32)

    def seeds_of(_rows: slice, logprob_M: Tensor, _entropy_R: Tensor) -> Any:
        leaf_M = logprob_M.clone().requires_grad_()
        (gradient_M,) = torch.autograd.grad(leaf_M.exp().sum(), [leaf_M])
        return gradient_M, None

    hidden_RD = case.hidden_RD.clone().requires_grad_()
    found = token_logprobs_forward_backward(
        hidden_RD, case.lm_head_VD.requires_grad_(), *case.rest, seeds_of, needs_lm_head=True
    )
    assert found.dhidden_RD.abs().sum() > 0
    assert not found.logprob_M.requires_grad
    assert not found.dhidden_RD.requires_grad


def test_a_frozen_head_has_no_gradient() -> None:
    case = make_case(5, 11, 7, torch.float32)
    found = case.in_one_pass(case.late_seeds(), needs_lm_head=False)
    assert found.dlm_head_VD.shape == (0, 12)
    assert torch.equal(found.dhidden_RD, in_two_passes(case)["dhidden_RD"])


def test_no_rows_give_zeros() -> None:
    case = make_case(0, 11, 0, torch.float32)

    def never(*_: Any) -> Any:
        raise AssertionError

    found = case.in_one_pass(never)
    assert found.logprob_M.shape == found.entropy_R.shape == (0,)
    assert not found.dlm_head_VD.any()


@pytest.mark.usefixtures("chunk_rows")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_best_tokens_are_those_of_the_dense_distribution(dtype: torch.dtype) -> None:
    """The likeliest first, of every row, whatever their number."""
    case = with_term(make_case(13, 37, 0, dtype))
    assert case.term is not None
    plain_RV = case.hidden_RD.double() @ case.lm_head_VD.double().T
    term_RV = case.term.u_RA.double() @ case.term.b_VA.double().T
    for num_tokens, term in itertools.product((1, 5, 37), (None, case.term)):
        logits_RV = plain_RV if term is None else plain_RV + term_RV
        found_RB = best_tokens(case.hidden_RD, case.lm_head_VD, num_tokens, term=term)
        assert found_RB.dtype == torch.int64
        best = logits_RV.topk(num_tokens, dim=1)
        # Tokens may tie but for rounding.
        torch.testing.assert_close(logits_RV.gather(1, found_RB), best.values, rtol=1e-5, atol=1e-5)
        assert all(len(row.unique()) == num_tokens for row in found_RB)
    empty = best_tokens(case.hidden_RD[:0], case.lm_head_VD, 3)
    assert empty.shape == (0, 3)


@pytest.mark.parametrize("num_tokens", [0, 38])
def test_more_tokens_than_there_are_is_refused(num_tokens: int) -> None:
    case = make_case(2, 37, 0, torch.float32)
    with pytest.raises(KernelArgumentError, match="expected 1 to 37"):
        best_tokens(case.hidden_RD, case.lm_head_VD, num_tokens)


def _nothing(_rows: slice, _logprob_M: Tensor, _entropy_R: Tensor) -> tuple[None, None]:
    return None, None


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"hidden_RD": torch.zeros(5, 12, dtype=torch.float16)}, "lm_head_VD"),
        ({"targets_M": torch.full((7,), 11)}, "targets_M"),
        ({"temperature_R": torch.zeros(5)}, "temperature_R"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], argument: str) -> None:
    case = make_case(5, 11, 7, torch.float32)
    with pytest.raises(KernelArgumentError, match=argument):
        replace(case, **change).in_one_pass(_nothing)


def test_half_precision_is_refused_for_its_scale() -> None:
    case = make_case(5, 11, 7, torch.float16)
    with pytest.raises(KernelArgumentError, match=r"hidden_RD.*float16"):
        case.in_one_pass(_nothing)
