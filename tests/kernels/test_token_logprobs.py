"""Token log-probs of the reference backend: values, gradients and refusals."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from ratoon_kernels import KernelArgumentError, token_logprobs
from ratoon_kernels.token_logprobs import reference
from ratoon_kernels.token_logprobs.operands import Operands
from tests.kernels.forests import relative_error
from tests.kernels.one_pass import Case

Function = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _case(
    rows: int, vocab: int, targets: int, *, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    row_of_target = torch.randint(0, max(rows, 1), (targets,), generator=generator)
    return Case(
        hidden_RD=draw(rows, 12).to(dtype),
        lm_head_VD=draw(vocab, 12).to(dtype),
        targets_M=torch.randint(0, vocab, (targets,), generator=generator),
        row_of_target_M=row_of_target,
        temperature_R=(draw(rows).abs() + 0.3).to(wide),
        dlogprob_M=draw(targets).to(wide),
        dentropy_R=draw(rows).to(wide),
    )


def _dense(
    hidden_RD: Tensor,
    lm_head_VD: Tensor,
    targets_M: Tensor,
    row_of_target_M: Tensor,
    temperature_R: Tensor,
) -> tuple[Tensor, Tensor]:
    logits_RV = hidden_RD.double() @ lm_head_VD.double().T / temperature_R.double()[:, None]
    logp_RV = torch.log_softmax(logits_RV, dim=-1)
    return logp_RV[row_of_target_M, targets_M], -(logp_RV.exp() * logp_RV).sum(dim=-1)


def _run(function: Function, case: Case, *, reads: str = "both") -> dict[str, Tensor]:
    hidden_RD = case.hidden_RD.clone().requires_grad_()
    lm_head_VD = case.lm_head_VD.clone().requires_grad_()
    logprob_M, entropy_R = function(
        hidden_RD, lm_head_VD, case.targets_M, case.row_of_target_M, case.temperature_R
    )
    loss = torch.zeros((), dtype=logprob_M.dtype)
    if reads in {"both", "logprob"}:
        loss = loss + logprob_M @ case.dlogprob_M.to(logprob_M.dtype)
    if reads in {"both", "entropy"}:
        loss = loss + entropy_R @ case.dentropy_R.to(entropy_R.dtype)
    dhidden_RD, dlm_head_VD = torch.autograd.grad(loss, (hidden_RD, lm_head_VD))
    return {
        "logprob": logprob_M.detach(), "entropy": entropy_R.detach(),
        "dhidden": dhidden_RD, "dlm_head": dlm_head_VD,
    }  # fmt: skip


@pytest.fixture(params=[1, 3, 4096], ids=lambda rows: f"{rows}_rows_a_chunk")
def chunk_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Rows of one chunk for a vocabulary of 37 in fp64."""
    monkeypatch.setattr(reference, "LOGIT_BYTES", request.param * 37 * 8)
    return request.param


@pytest.mark.usefixtures("poisoned_memory", "chunk_rows")
@pytest.mark.parametrize("reads", ["both", "logprob", "entropy"])
def test_results_and_gradients_equal_dense_log_softmax(reads: str) -> None:
    """Rows of many targets, of the same target twice, and of none; every row has a temperature."""
    for seed, (rows, targets) in enumerate(((1, 1), (3, 9), (7, 5), (8, 200), (10, 3))):
        case = _case(rows, 37, targets, seed=seed)
        got, expected = _run(token_logprobs, case, reads=reads), _run(_dense, case, reads=reads)
        for name, value in expected.items():
            assert value.norm() > 0, name
            assert relative_error(got[name], value) < 1e-12, f"{name} {rows} {targets}"


@pytest.mark.usefixtures("poisoned_memory", "chunk_rows")
@pytest.mark.parametrize(("rows", "targets"), [(0, 0), (4, 0)])
def test_no_rows_and_no_targets_give_empty_results(rows: int, targets: int) -> None:
    case = _case(rows, 37, targets)
    got, expected = _run(token_logprobs, case), _run(_dense, case)
    assert got["logprob"].shape == (0,)
    for name in ("entropy", "dhidden", "dlm_head"):
        torch.testing.assert_close(got[name], expected[name], rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_of_other_dtypes_are_fp32_and_as_exact(dtype: torch.dtype) -> None:
    """Trap: log-probs stored in bf16 put 0.4% of noise on every ratio."""
    case = _case(40, 501, 90, dtype=dtype)
    got, expected = _run(token_logprobs, case), _run(_dense, case)
    assert (got["logprob"].dtype, got["entropy"].dtype) == (torch.float32, torch.float32)
    assert relative_error(got["logprob"], expected["logprob"]) < 1e-6
    assert relative_error(got["entropy"], expected["entropy"]) < 1e-6
    half_ulp = torch.finfo(dtype).eps / 2
    for name in ("dhidden", "dlm_head"):
        assert got[name].dtype == dtype
        assert relative_error(got[name], expected[name]) < 2 * half_ulp + 1e-6, name


def test_extreme_logits_stay_finite() -> None:
    case = _case(6, 37, 20, dtype=torch.float32)
    case = replace(case, hidden_RD=case.hidden_RD * 1e4)
    got, expected = _run(token_logprobs, case), _run(_dense, case)
    for name, value in expected.items():
        assert got[name].isfinite().all(), name
        torch.testing.assert_close(got[name].double(), value.double(), rtol=1e-5, atol=1e-2)


@pytest.mark.usefixtures("chunk_rows")
def test_the_same_inputs_give_the_same_bits() -> None:
    case = _case(60, 37, 5000, dtype=torch.float32)
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
    case = _case(5, 37, 9)
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


class _LargestTensor(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple) else (result,):
            if isinstance(value, Tensor):
                self.num_elements = max(self.num_elements, value.numel())
        return result


def test_nothing_of_rows_times_vocabulary_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "LOGIT_BYTES", 10 * 300 * 8)
    case = _case(400, 300, 50)
    operands = Operands(
        hidden_RD=case.hidden_RD,
        lm_head_VD=case.lm_head_VD,
        targets_M=case.targets_M,
        row_of_target_M=case.row_of_target_M,
        temperature_R=case.temperature_R,
    )
    with _LargestTensor() as largest:
        reference.forward(operands)
    assert largest.num_elements <= max(10 * 300, case.hidden_RD.numel())


def test_the_op_passes_opcheck_and_compiles_as_a_full_graph() -> None:
    case = _case(6, 37, 9, dtype=torch.float32)
    hidden_RD, lm_head_VD = case.hidden_RD.requires_grad_(), case.lm_head_VD.requires_grad_()
    rest = (case.targets_M, case.row_of_target_M, case.temperature_R)
    args: Any = (hidden_RD, lm_head_VD, *rest, "reference")
    torch.library.opcheck(torch.ops.ratoon.token_logprobs.default, args)
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
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(token_logprobs, fullgraph=True, backend=counter)
    for rows, targets in ((6, 9), (5, 20), (9, 3)):
        case = _case(rows, 37, targets, dtype=torch.float32)
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
    case = _case(6, 37, 9, dtype=torch.float32)
    given: dict[str, Any] = {
        "hidden_RD": case.hidden_RD, "lm_head_VD": case.lm_head_VD, "targets_M": case.targets_M,
        "row_of_target_M": case.row_of_target_M, "temperature_R": case.temperature_R,
    }  # fmt: skip
    token_logprobs(**given)
    given[name] = change(given[name])
    with pytest.raises(KernelArgumentError, match=message) as refusal:
        token_logprobs(**given)
    assert refusal.value.argument == name
